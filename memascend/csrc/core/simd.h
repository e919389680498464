// Number formats of the arithmetic kernels, and the instruction sets that are chosen from at run time.
#pragma once

#include <cstdint>
#include <string>

namespace memascend {

enum class FloatFormat { kFloat32, kFloat16, kBFloat16 };

[[nodiscard]] constexpr std::int64_t format_bytes(FloatFormat format) {
  return format == FloatFormat::kFloat32 ? 4 : 2;
}

// kAvx2 also needs FMA, F16C and AES (Intel since 2013, AMD since 2015). kAvx512 needs the subsets F, BW, DQ and VL and
// vector AES (Ice Lake, Zen 4). kAvx2Vaes is for processors with vector AES but without AVX-512 (Zen 3, Intel's
// desktops since 2021).
enum class SimdLevel { kPortable, kAvx2, kAvx2Vaes, kAvx512 };

// Returns the best level of this processor, which is determined once.
[[nodiscard]] SimdLevel best_simd_level();
[[nodiscard]] std::string simd_level_name(SimdLevel level);

// Throws Error(kInvalidArgument), with a message that begins with `what`, for a level that this processor lacks and for
// threads < 1.
void require_runnable(const char* what, SimdLevel level, int threads);

}  // namespace memascend

// Checks whether any element is infinite or NaN, in one pass and without temporary memory (MemAscend, fused overflow
// check).
//
// By IEEE 754 a value is not finite if and only if all its exponent bits are set, so one mask and one comparison per
// element detect both.
#pragma once

#include <cstdint>
#include <vector>

#include "simd.h"

namespace memascend {

// Checks `count` contiguous elements. Uses up to `threads` threads, which all stop soon after one of them has found
// something. Throws Error(kInvalidArgument) for a negative count, a null pointer or threads < 1, and for a level that
// this processor lacks.
[[nodiscard]] bool has_overflow(const void* data, std::int64_t count, FloatFormat format, int threads,
                                SimdLevel level = best_simd_level());

// Checks a strided tensor (strides in elements, not negative); dimensions may be in any order. Throws
// Error(kInvalidArgument) also for negative strides and for different numbers of sizes and strides.
[[nodiscard]] bool has_overflow_strided(const void* data, std::vector<std::int64_t> sizes,
                                        std::vector<std::int64_t> strides, FloatFormat format, int threads);

// Reads every byte and only ORs the words together. Its speed is the upper limit that the check is measured against.
[[nodiscard]] std::uint64_t read_all(const void* data, std::int64_t bytes, int threads,
                                     SimdLevel level = best_simd_level());

}  // namespace memascend

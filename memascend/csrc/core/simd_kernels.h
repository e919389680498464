// Kernels that exist once for every instruction set: simd_kernels_{portable,avx2,avx2_vaes,avx512}.cpp fill a
// table each. Results are the same bits at every level: the same operations in the same order, each rounded as IEEE 754 says.
#pragma once

#include <cstdint>

#include "simd.h"

namespace memascend {

// Elements of a group. Kernels do whole groups; what is less is done in a group of its own, padded.
constexpr std::int64_t kGroup = 32;

// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11): ARS with five rounds passes all of BigCrush.
constexpr int kArsRounds = 5;

// One AdamW step in the numbers that a kernel needs.
struct AdamWFactors {
  float grad_scale;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inverse_root_correction2;  // 1 / sqrt(1 - beta2^step)
  float epsilon;
  float decay;      // 1 - lr * weight_decay
  float step_size;  // lr / (1 - beta1^step)
  std::uint64_t round_key[kArsRounds + 2][2];  // of the random numbers: from the seed
  std::uint64_t step;
};

// `groups` whole groups; the first is the `first_group`-th of the whole tensor. `copy` may be null.
struct AdamWPiece {
  void* param;
  const void* grad;
  void* momentum;
  void* variance;
  void* copy;
  std::int64_t first_group;
  std::int64_t groups;
};

// Returns the first group that has something that is not finite before or after the step, or -1. Such groups are left as
// they were; all others are done.
using AdamWKernel = std::int64_t (*)(const AdamWFactors&, const AdamWPiece&);

// out[i] = data[i] * scale; returns the sum of squares of out, in double; *finite is cleared if one of them is not.
// `out` may be `data` if the formats are the same.
using UnscaleKernel = double (*)(const void* data, void* out, std::int64_t groups, float scale, bool* finite);

enum class CopyFormat { kNone, kFloat16, kBFloat16 };

struct SimdKernels {
  AdamWKernel adamw[2][3][3];  // [fp32, bf16 states][gradient: FloatFormat][CopyFormat]
  UnscaleKernel unscale[3][2];  // [data: FloatFormat][out: as data, fp32]
};

const SimdKernels& simd_kernels_portable();
#if defined(__x86_64__)
const SimdKernels& simd_kernels_avx2();
const SimdKernels& simd_kernels_avx2_vaes();
const SimdKernels& simd_kernels_avx512();
#endif

[[nodiscard]] const SimdKernels& simd_kernels(SimdLevel level);

}  // namespace memascend

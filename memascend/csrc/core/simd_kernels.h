// Kernels that exist once for every instruction set: simd_kernels_{portable,avx2,avx2_vaes,avx512}.cpp fill a
// table each. Results are the same bits at every level: the same operations in the same order, each rounded as IEEE 754
// says.
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
  float decay;  // 1 - lr * weight_decay
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

// The same with 8-bit moments (adamw8.h): a group is a block. `scales` has two bytes per group, the momentum's first.
struct AdamW8Piece {
  void* param;
  const void* grad;
  std::uint8_t* momentum;
  std::uint8_t* root;
  std::uint8_t* scales;
  std::int64_t first_group;
  std::int64_t groups;
};

// An 8-bit code is the exponent's last three bits and the fraction's first bits of a number z in [2^-7, 2): four bits
// of the fraction below a sign for the momentum, five for the root of the variance. Above them is always kCodeBase, so
// a code is a shift away. A value y in [0, 2) is kept as z = max(y, y / 2 + 2^-7), which makes codes below y = 2^-6
// evenly spaced and reach zero, and min(z, 2 z - 2^-6) takes it back. A scale of 2^(exponent - 127) is added to
// exponents; with one of 8 or more nothing here is subnormal.
constexpr std::uint32_t kCodeBase = 0x3C000000u;
constexpr int kMomentumShift = 19;  // of the code's last bit in the bits of a float
constexpr int kRootShift = 18;
constexpr std::uint32_t kLeastExponent = 8;  // what is less is read as this
// From here on the exponent of a block's largest number is not kept: what is infinite or NaN, and 2^127.
constexpr std::uint32_t kExponentLimit = 254;

// Bits of floats, times the scale.
constexpr std::uint32_t code_base(std::uint32_t exponent) { return kCodeBase + ((exponent - 127) << 23); }
constexpr std::uint32_t linear_bits(std::uint32_t exponent) { return (exponent - 6) << 23; }  // 2^-6
constexpr std::uint32_t half_linear_bits(std::uint32_t exponent) { return (exponent - 7) << 23; }  // 2^-7
constexpr std::uint32_t unscaling(std::uint32_t exponent) { return (127 - exponent) << 23; }  // added to bits

// Returns the first group that has something that is not finite before or after the step, or -1. Such groups are left
// as they were; all others are done.
using AdamWKernel = std::int64_t (*)(const AdamWFactors&, const AdamWPiece&);

using AdamW8Kernel = std::int64_t (*)(const AdamWFactors&, const AdamW8Piece&);

// out[i] = data[i] * scale; returns the sum of squares of out, in double; *finite is cleared if one of them is not.
// `out` may be `data` if the formats are the same.
using UnscaleKernel = double (*)(const void* data, void* out, std::int64_t groups, float scale, bool* finite);

enum class CopyFormat { kNone, kFloat16, kBFloat16 };

struct SimdKernels {
  AdamWKernel adamw[2][3][3];  // [fp32, bf16 states][gradient: FloatFormat][CopyFormat]
  AdamW8Kernel adamw8[3];  // [gradient: FloatFormat]
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

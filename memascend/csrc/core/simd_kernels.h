// Kernels that exist once for each instruction set: simd_kernels_{portable,avx2,avx2_vaes,avx512}.cpp each fill a
// table. The results are bitwise identical at every level, because the operations and their order are the same and each
// is rounded according to IEEE 754.
#pragma once

#include <cstdint>

#include "simd.h"

namespace memascend {

// Elements of a group. Kernels process whole groups; a smaller remainder is copied into a padded group.
constexpr std::int64_t kGroup = 32;

// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11): ARS with five rounds passes all of BigCrush.
constexpr int kArsRounds = 5;

// The factors of one AdamW step that a kernel needs.
struct AdamWFactors {
  float grad_scale;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inverse_root_correction2;  // 1 / sqrt(1 - beta2^step)
  float epsilon;
  float decay;  // 1 - lr * weight_decay
  float step_size;  // lr / (1 - beta1^step)
  std::uint64_t round_key[kArsRounds + 2][2];  // for the random numbers, derived from the seed
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

// An 8-bit code consists of the last three bits of the exponent and the first bits of the fraction of a number z in
// [2^-7, 2): four bits of the fraction, and a sign above, for the momentum; five bits for the root of the variance. The
// bits above are always those of kCodeBase, so encoding and decoding need only a shift. A value y in [0, 2) is stored
// as z = max(y, y / 2 + 2^-7), which makes codes below y = 2^-6 evenly spaced down to zero; min(z, 2 z - 2^-6) is the
// inverse. Multiplying by a scale of 2^(exponent - 127) adds to the exponents; if the biased exponent is at least 8, no
// number here is subnormal.
constexpr std::uint32_t kCodeBase = 0x3C000000u;
constexpr int kMomentumShift = 19;  // of the code's last bit in the bits of a float
constexpr int kRootShift = 18;
constexpr std::uint32_t kLeastExponent = 8;  // smaller ones are read as this
// A block whose largest number has this exponent or a larger one is not stored: 2^127 and above, infinite or NaN.
constexpr std::uint32_t kExponentLimit = 254;

// Bit patterns of these floats times the scale.
constexpr std::uint32_t code_base(std::uint32_t exponent) { return kCodeBase + ((exponent - 127) << 23); }
constexpr std::uint32_t linear_bits(std::uint32_t exponent) { return (exponent - 6) << 23; }  // 2^-6
constexpr std::uint32_t half_linear_bits(std::uint32_t exponent) { return (exponent - 7) << 23; }  // 2^-7
constexpr std::uint32_t unscaling(std::uint32_t exponent) { return (127 - exponent) << 23; }  // added to bits

// Updates all groups. Returns the first group with a number that is not finite before or after the step, or -1. Such
// groups are left unchanged.
using AdamWKernel = std::int64_t (*)(const AdamWFactors&, const AdamWPiece&);

using AdamW8Kernel = std::int64_t (*)(const AdamWFactors&, const AdamW8Piece&);

// Sets out[i] = data[i] * scale and returns the sum of squares of out, in double. Clears *finite if any result is not
// finite. `out` may be `data` if the formats are the same.
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

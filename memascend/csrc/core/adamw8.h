// One AdamW step with bf16 parameters and 8-bit moments in one pass over memory: 4 + 2/32 bytes per element.
//
// Block-wise quantisation as in Dettmers et al. (ICLR 2022, arXiv 2110.02861), with a format of its own. A block is 32
// elements of the whole tensor and has two bytes of scale: powers of two, as biased exponents of float32, and at least
// 8 (the scales of OCP's Microscaling formats). Momentum: sign, 3 bits of exponent, 4 of fraction, subnormals.
// Variance: its square root, 3 bits of exponent, 5 of fraction, subnormals. All are rounded stochastically;
// memascend/ops/adamw8.py says why.
#pragma once

#include <cstdint>

#include "adamw_options.h"
#include "simd.h"

namespace memascend {

// Elements that share a scale.
constexpr std::int64_t kBlock = kGroup;

// Runs of `count` elements that do not overlap, and two bytes of scale for each block begun. Zeros are the state before
// the first step.
struct AdamW8Tensors {
  void* param;  // bf16
  const void* grad;
  std::uint8_t* momentum;
  std::uint8_t* root;  // of the variance
  std::uint8_t* scales;
  FloatFormat grad_format;
  std::int64_t count;
};

// A step over slices that begin at a block gives the bits of a step over the whole, with any number of threads and any
// instruction set. Throws Error(kInvalidArgument) for options that make no sense, among them an element offset inside a
// block, and Error(kState) where a number is not finite before or after the step: it names the tensor and the element.
// Then the block around each such number is as it was, and all others are updated.
void adamw8(const AdamW8Tensors& tensors, const AdamWOptions& options, int threads,
            SimdLevel level = best_simd_level());

}  // namespace memascend

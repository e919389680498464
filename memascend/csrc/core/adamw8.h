// One AdamW step with bf16 parameters and 8-bit moments in one pass over memory: 4 + 2/32 bytes per element.
//
// Block-wise quantisation as in Dettmers et al. (ICLR 2022, arXiv 2110.02861), in our own format. A block is 32
// consecutive elements of the whole tensor and has two scales of one byte each, one for the momentum and one for the
// variance. A scale is a power of two, stored as the biased exponent of a float32 (as in OCP's Microscaling formats),
// and is at least 8. The momentum has a sign, 3 bits of exponent and 4 of fraction, with subnormals. The variance is
// stored as its square root, with 3 bits of exponent and 5 of fraction, with subnormals. All are rounded
// stochastically; memascend/ops/adamw8.py says why.
#pragma once

#include <cstdint>

#include "adamw_options.h"
#include "simd.h"

namespace memascend {

// Number of elements that share a scale.
constexpr std::int64_t kBlock = kGroup;

// Arrays of `count` elements each, which do not overlap, and two bytes of scales per block (the last block may be
// partial). Before the first step, momentum, root and scales are all zeros.
struct AdamW8Tensors {
  void* param;  // bf16
  const void* grad;
  std::uint8_t* momentum;
  std::uint8_t* root;  // of the variance
  std::uint8_t* scales;
  FloatFormat grad_format;
  std::int64_t count;
};

// Updates the tensors by one step. A step over slices that begin at a block boundary gives the same bits as a step over
// the whole tensor, with any number of threads and any instruction set. Throws Error(kInvalidArgument) for invalid
// options, for example an element offset inside a block. Throws Error(kState), which names the tensor and the element,
// if a number is not finite before or after the step: the block around each such number is then unchanged, and all
// others are updated.
void adamw8(const AdamW8Tensors& tensors, const AdamWOptions& options, int threads,
            SimdLevel level = best_simd_level());

}  // namespace memascend

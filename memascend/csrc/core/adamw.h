// One AdamW step (Loshchilov and Hutter, 2019; decoupled weight decay, bias correction) in one pass over memory.
#pragma once

#include <cstdint>

#include "adamw_options.h"
#include "simd.h"
#include "simd_kernels.h"

namespace memascend {

// Runs of `count` elements that do not overlap. The states (parameter, momentum, variance) are all fp32, or all bf16
// and then rounded stochastically; the gradient has any format; `copy`, the parameter as it is kept, rounded to
// nearest, may be null (kNone).
struct AdamWTensors {
  void* param;
  const void* grad;
  void* momentum;
  void* variance;
  void* copy;
  FloatFormat state_format;
  FloatFormat grad_format;
  CopyFormat copy_format;
  std::int64_t count;
};

// A step over slices gives the bits of a step over the whole, with any number of threads and any instruction set.
// Throws Error(kInvalidArgument) for options that make no sense, and Error(kState) where a number is not finite before
// or after the step: it names the tensor and the element. Then the group of 32 elements around each such number is as
// it was, and all others are updated.
void adamw(const AdamWTensors& tensors, const AdamWOptions& options, int threads, SimdLevel level = best_simd_level());

}  // namespace memascend

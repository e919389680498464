// One AdamW step (Loshchilov and Hutter, 2019; decoupled weight decay, bias correction) in one pass over memory.
#pragma once

#include <cstdint>

#include "adamw_options.h"
#include "simd.h"
#include "simd_kernels.h"

namespace memascend {

// Arrays of `count` elements each, which do not overlap. The states (parameter, momentum, variance) are all fp32, or
// all bf16 and then rounded stochastically. The gradient may have any format. `copy` receives the parameter as it is
// stored, rounded to nearest; it is null if the format is kNone.
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

// Updates the tensors by one step. A step over slices gives the same bits as a step over the whole tensor, with any
// number of threads and any instruction set. Throws Error(kInvalidArgument) for invalid options. Throws Error(kState),
// which names the tensor and the element, if a number is not finite before or after the step: the group of 32 elements
// around each such number is then unchanged, and all others are updated.
void adamw(const AdamWTensors& tensors, const AdamWOptions& options, int threads, SimdLevel level = best_simd_level());

}  // namespace memascend

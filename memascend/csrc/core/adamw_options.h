// What every AdamW kernel is told, with the checks and the numbers that follow from it.
#pragma once

#include <cstdint>

#include "simd.h"
#include "simd_kernels.h"

namespace memascend {

struct AdamWOptions {
  std::int64_t step;  // counted from one
  double lr;
  double beta1;
  double beta2;
  double epsilon;
  double weight_decay;
  double grad_scale = 1;            // gradients are multiplied by this on the fly: 1 / loss scale, clipping
  std::uint64_t seed = 0;           // of stochastic rounding
  std::int64_t element_offset = 0;  // place of the first element in the whole tensor, for a slice of it
};

// Throws Error(kInvalidArgument), beginning with `what`, for options that make no sense.
void require_options(const char* what, const AdamWOptions& options);

[[nodiscard]] AdamWFactors factors_of(const AdamWOptions& options);

// Element `i`, widened.
[[nodiscard]] float value_at(const void* data, FloatFormat format, std::int64_t i);

}  // namespace memascend

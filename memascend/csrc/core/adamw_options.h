// Options that all AdamW kernels share, their validation, and the factors that follow from them.
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
  std::int64_t element_offset = 0;  // for a slice: the index of its first element in the whole tensor
};

// Throws Error(kInvalidArgument), with a message that begins with `what`, for invalid options.
void require_options(const char* what, const AdamWOptions& options);

[[nodiscard]] AdamWFactors factors_of(const AdamWOptions& options);

// Returns element `i`, widened to float.
[[nodiscard]] float value_at(const void* data, FloatFormat format, std::int64_t i);

}  // namespace memascend

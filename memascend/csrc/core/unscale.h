// The work of a training step between backward and the optimizer in one pass: divides gradients by the loss scale, sums
// their squares (for clipping), and detects infinite values and NaN.
#pragma once

#include <cstdint>

#include "simd.h"

namespace memascend {

struct UnscaleResult {
  double sum_squares;  // of the values written; infinite or NaN if there is an overflow
  bool overflow;
};

// Sets out[i] = data[i] * inverse_scale, computed in fp32 and rounded to nearest. `out` is `data` itself with the same
// format, or fp32 memory that does not overlap it. The sum is added up in double in an order that depends only on
// `count`, so it is bitwise the same for all numbers of threads and instruction sets. In place with an inverse scale of
// one, nothing is written.
// Throws Error(kInvalidArgument) for a negative count, null pointers, threads < 1, an inverse scale that is not finite
// and an `out_format` that is neither fp32 nor the data's.
UnscaleResult unscale_norm_overflow(const void* data, FloatFormat format, void* out, FloatFormat out_format,
                                    std::int64_t count, double inverse_scale, int threads,
                                    SimdLevel level = best_simd_level());

}  // namespace memascend

// What a training step needs between backward and the optimizer, in one pass: gradients divided by the loss scale, the
// sum of their squares (for clipping), and whether any of them is infinite or NaN.
#pragma once

#include <cstdint>

#include "simd.h"

namespace memascend {

struct UnscaleResult {
  double sum_squares;  // of what was written; infinite or NaN if there is an overflow
  bool overflow;
};

// out[i] = data[i] * inverse_scale, in fp32, rounded to nearest. `out` is `data` itself with the same format, or fp32
// memory that does not overlap it. The sum is added up in double in an order that depends on `count` alone, so threads
// and instruction sets change no bit of it. In place with an inverse scale of one nothing is written.
// Throws Error(kInvalidArgument) for a negative count, null pointers, threads < 1, an inverse scale that is not finite
// and an `out_format` that is neither fp32 nor the data's.
UnscaleResult unscale_norm_overflow(const void* data, FloatFormat format, void* out, FloatFormat out_format,
                                    std::int64_t count, double inverse_scale, int threads,
                                    SimdLevel level = best_simd_level());

}  // namespace memascend

// Is any element infinite or NaN? One pass over the bits, no temporary memory (MemAscend, fused overflow check).
//
// IEEE 754: a value is not finite exactly if all its exponent bits are set, so one mask and one comparison an element
// answer both questions.
#pragma once

#include <cstdint>
#include <vector>

#include "simd.h"

namespace memascend {

// `count` elements that lie one after the other. Uses up to `threads` threads, which all stop soon after one
// of them has found something. Throws Error(kInvalidArgument) for a negative count, a null pointer or threads < 1,
// and for a level that this processor lacks.
[[nodiscard]] bool has_overflow(const void* data, std::int64_t count, FloatFormat format, int threads,
                                SimdLevel level = best_simd_level());

// The same over a strided tensor (strides in elements, not negative); dimensions may be in any order.
[[nodiscard]] bool has_overflow_strided(const void* data, std::vector<std::int64_t> sizes,
                                        std::vector<std::int64_t> strides, FloatFormat format, int threads);

// Reads every byte and does nothing else (ORs the words together): the read limit that the check is measured against.
[[nodiscard]] std::uint64_t read_all(const void* data, std::int64_t bytes, int threads,
                                     SimdLevel level = best_simd_level());

}  // namespace memascend

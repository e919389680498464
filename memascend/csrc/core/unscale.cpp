#include "unscale.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "errors.h"
#include "simd_kernels.h"
#include "threads.h"

namespace memascend {
namespace {

// Fixed, since the order of the sum follows from it. 128 or 256 KiB: large enough to stream, and small enough that
// threads wait little for each other at the end.
constexpr std::int64_t kChunk = 2048 * kGroup;

void check(const void* data, FloatFormat format, const void* out, FloatFormat out_format, std::int64_t count,
           double inverse_scale) {
  if (count < 0 || (count > 0 && (data == nullptr || out == nullptr))) {
    throw Error(ErrorKind::kInvalidArgument, "unscale: no data for " + std::to_string(count) + " elements");
  }
  if (out_format != FloatFormat::kFloat32 && out_format != format) {
    throw Error(ErrorKind::kInvalidArgument, "unscale: the output is float32 or has the input's format");
  }
  if (!std::isfinite(inverse_scale) || !std::isfinite(static_cast<float>(inverse_scale))) {
    throw Error(ErrorKind::kInvalidArgument, "unscale: an inverse scale of " + std::to_string(inverse_scale) +
                                                 " is not finite in float32: is the loss scale zero?");
  }
}

}  // namespace

UnscaleResult unscale_norm_overflow(const void* data, FloatFormat format, void* out, FloatFormat out_format,
                                    std::int64_t count, double inverse_scale, int threads, SimdLevel level) {
  check(data, format, out, out_format, count, inverse_scale);
  require_runnable("unscale", level, threads);
  const auto kernel = simd_kernels(level).unscale[static_cast<int>(format)][out_format == format ? 0 : 1];
  const auto scale = static_cast<float>(inverse_scale);
  const auto* in = static_cast<const char*>(data);
  auto* to = static_cast<char*>(out);
  const std::int64_t in_bytes = format_bytes(format);
  const std::int64_t out_bytes = format_bytes(out_format);
  const std::int64_t chunks = (count + kChunk - 1) / kChunk;
  std::vector<double> sums(static_cast<std::size_t>(chunks));
  std::atomic<bool> all_finite{true};
  parallel_chunks(chunks, threads, [&](std::int64_t chunk) {
    const std::int64_t begin = chunk * kChunk;
    const std::int64_t groups = std::min(kChunk, count - begin) / kGroup;
    const std::int64_t rest = std::min(kChunk, count - begin) % kGroup;
    bool finite = true;
    double sum = kernel(in + begin * in_bytes, to + begin * out_bytes, groups, scale, &finite);
    if (rest > 0) {
      alignas(64) char padded_in[kGroup * 4] = {};
      alignas(64) char padded_out[kGroup * 4];
      const std::int64_t at = begin + groups * kGroup;
      std::memcpy(padded_in, in + at * in_bytes, static_cast<std::size_t>(rest * in_bytes));
      sum += kernel(padded_in, padded_out, 1, scale, &finite);
      if (data != out || scale != 1.0f) {
        std::memcpy(to + at * out_bytes, padded_out, static_cast<std::size_t>(rest * out_bytes));
      }
    }
    sums[static_cast<std::size_t>(chunk)] = sum;
    if (!finite) {
      all_finite.store(false, std::memory_order_relaxed);
    }
    return true;
  });
  double total = 0;
  for (const double sum : sums) {
    total += sum;
  }
  return {total, !all_finite.load()};
}

}  // namespace memascend

#include "adamw.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "errors.h"
#include "simd_portable.h"
#include "threads.h"

namespace memascend {
namespace {

// A chunk is 64 KiB of each fp32 tensor: long enough for the prefetchers, short enough to distribute work evenly.
constexpr std::int64_t kChunkGroups = 512;
constexpr std::int64_t kNowhere = std::numeric_limits<std::int64_t>::max();

void require(bool good, const std::string& message) {
  if (!good) {
    throw Error(ErrorKind::kInvalidArgument, "adamw: " + message);
  }
}

void check(const AdamWTensors& t, const AdamWOptions& o) {
  require(t.count >= 0, std::to_string(t.count) + " elements");
  require(t.count == 0 || (t.param && t.grad && t.momentum && t.variance), "no data");
  require(t.count == 0 || (t.copy != nullptr) == (t.copy_format != CopyFormat::kNone), "a copy needs a format");
  require(t.state_format != FloatFormat::kFloat16, "float16 states are not supported: use float32 or bfloat16");
  require_options("adamw", o);
}

// Runs the step over a chunk, or over part of a group in a padded group. Called by several threads at once.
class Step {
 public:
  Step(const AdamWTensors& tensors, const AdamWOptions& options, SimdLevel level)
      : t_(tensors),
        offset_(options.element_offset),
        factors_(factors_of(options)),
        kernel_(simd_kernels(level).adamw[t_.state_format == FloatFormat::kFloat32 ? 0 : 1]
                                         [static_cast<int>(t_.grad_format)][static_cast<int>(t_.copy_format)]) {}

  // Updates elements [begin, begin + 32 * groups); offset + begin is a multiple of 32.
  void whole(std::int64_t begin, std::int64_t groups) {
    const AdamWPiece piece{at(t_.param, begin, state_bytes()),
                           at(t_.grad, begin, grad_bytes()),
                           at(t_.momentum, begin, state_bytes()),
                           at(t_.variance, begin, state_bytes()),
                           t_.copy == nullptr ? nullptr : at(t_.copy, begin, 2),
                           (offset_ + begin) / kGroup,
                           groups};
    const std::int64_t bad = kernel_(factors_, piece);
    if (bad >= 0) {
      note(begin + bad * kGroup);
    }
  }

  // Updates fewer elements than a group has. They are copied into a padded group, at the position that they have in
  // their group of the whole tensor, since the random numbers depend on it.
  void part(std::int64_t begin, std::int64_t count) {
    alignas(64) char param[kGroup * 4] = {}, momentum[kGroup * 4] = {}, variance[kGroup * 4] = {};
    alignas(64) char grad[kGroup * 4], copy[kGroup * 2];
    for (std::int64_t i = 0; i < kGroup; ++i) {  // a gradient of one keeps the padding finite
      put_one(grad + i * grad_bytes());
    }
    const std::int64_t place = (offset_ + begin) % kGroup;
    const auto state = static_cast<std::size_t>(count * state_bytes());
    std::memcpy(param + place * state_bytes(), at(t_.param, begin, state_bytes()), state);
    std::memcpy(momentum + place * state_bytes(), at(t_.momentum, begin, state_bytes()), state);
    std::memcpy(variance + place * state_bytes(), at(t_.variance, begin, state_bytes()), state);
    std::memcpy(grad + place * grad_bytes(), at(t_.grad, begin, grad_bytes()),
                static_cast<std::size_t>(count * grad_bytes()));
    if (kernel_(factors_, {param, grad, momentum, variance, copy, (offset_ + begin) / kGroup, 1}) >= 0) {
      note(begin);
      return;
    }
    std::memcpy(at(t_.param, begin, state_bytes()), param + place * state_bytes(), state);
    std::memcpy(at(t_.momentum, begin, state_bytes()), momentum + place * state_bytes(), state);
    std::memcpy(at(t_.variance, begin, state_bytes()), variance + place * state_bytes(), state);
    if (t_.copy != nullptr) {
      std::memcpy(at(t_.copy, begin, 2), copy + place * 2, static_cast<std::size_t>(count * 2));
    }
  }

  // Describes the arrays from element `first` on, in chunks of `elements`, for planning threads near the data. States
  // count twice, since they are read and written.
  [[nodiscard]] std::vector<ChunkedArray> arrays(std::int64_t first, std::int64_t elements) const {
    std::vector<ChunkedArray> found;
    for (const void* data : {t_.param, t_.momentum, t_.variance}) {
      found.push_back({at<const void*>(data, first, state_bytes()), elements * state_bytes(), 2});
    }
    found.push_back({at(t_.grad, first, grad_bytes()), elements * grad_bytes(), 1});
    return found;
  }

  // Throws if a group was skipped because a number is not finite.
  void report(const AdamWOptions& options) const {
    const std::int64_t begin = first_bad_.load();
    if (begin == kNowhere) {
      return;
    }
    const std::int64_t end = std::min(t_.count, begin + kGroup - (offset_ + begin) % kGroup);
    const std::string when = " before step " + std::to_string(options.step);
    for (std::int64_t i = begin; i < end; ++i) {
      for (const auto& [name, data, format] :
           {Named{"parameter", t_.param, t_.state_format}, Named{"gradient", t_.grad, t_.grad_format},
            Named{"momentum", t_.momentum, t_.state_format}, Named{"variance", t_.variance, t_.state_format}}) {
        const float value = value_at(data, format, i);
        if (!std::isfinite(value)) {
          fail(name + std::string(" is ") + std::to_string(value), i, when + advice(data == t_.grad));
        }
      }
      if (value_at(t_.variance, t_.state_format, i) < 0) {
        fail("variance is negative", i, when + advice(false));
      }
    }
    fail("the update is not finite near", begin,
         " in step " + std::to_string(options.step) + ": gradients are too large for float32, or epsilon is zero");
  }

 private:
  struct Named {
    const char* name;
    const void* data;
    FloatFormat format;
  };

  template <class Pointer>
  static Pointer at(Pointer data, std::int64_t element, std::int64_t bytes) {
    using Bytes = std::conditional_t<std::is_same_v<Pointer, const void*>, const char*, char*>;
    return static_cast<Bytes>(data) + element * bytes;
  }
  [[nodiscard]] std::int64_t state_bytes() const { return format_bytes(t_.state_format); }
  [[nodiscard]] std::int64_t grad_bytes() const { return format_bytes(t_.grad_format); }

  void put_one(char* to) const {
    const std::uint32_t one = t_.grad_format == FloatFormat::kFloat32   ? 0x3F800000u
                              : t_.grad_format == FloatFormat::kFloat16 ? 0x3C00u
                                                                        : 0x3F80u;
    std::memcpy(to, &one, static_cast<std::size_t>(grad_bytes()));  // little-endian: the low half comes first
  }

  void note(std::int64_t begin) {
    std::int64_t known = first_bad_.load();
    while (begin < known && !first_bad_.compare_exchange_weak(known, begin)) {
    }
  }

  static std::string advice(bool gradient) {
    return gradient ? ": check gradients for overflow and skip the step" : ": restore the state from a checkpoint";
  }
  [[noreturn]] void fail(const std::string& what, std::int64_t i, const std::string& rest) const {
    throw Error(ErrorKind::kState, "adamw: " + what + " at element " + std::to_string(offset_ + i) + rest +
                                       " (elements near it are unchanged, others are updated)");
  }

  const AdamWTensors& t_;
  const std::int64_t offset_;
  const AdamWFactors factors_;
  const AdamWKernel kernel_;
  std::atomic<std::int64_t> first_bad_{kNowhere};
};

}  // namespace

void adamw(const AdamWTensors& tensors, const AdamWOptions& options, int threads, SimdLevel level) {
  check(tensors, options);
  require_runnable("adamw", level, threads);
  Step step(tensors, options, level);
  const std::int64_t head = std::min(tensors.count, (kGroup - options.element_offset % kGroup) % kGroup);
  const std::int64_t groups = (tensors.count - head) / kGroup;
  const std::int64_t rest = (tensors.count - head) % kGroup;
  if (head > 0) {
    step.part(0, head);
  }
  const std::int64_t chunks = (groups + kChunkGroups - 1) / kChunkGroups;
  const std::optional<NumaPlan> plan = plan_near_data(chunks, threads, step.arrays(head, kChunkGroups * kGroup));
  const auto update = [&](std::int64_t chunk) {
    const std::int64_t first = chunk * kChunkGroups;
    step.whole(head + first * kGroup, std::min(kChunkGroups, groups - first));
    return true;
  };
  parallel_chunks(chunks, threads, update, plan ? &*plan : nullptr);
  if (rest > 0) {
    step.part(head + groups * kGroup, rest);
  }
  step.report(options);
}

}  // namespace memascend

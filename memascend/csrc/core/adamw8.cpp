#include "adamw8.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "errors.h"
#include "threads.h"

namespace memascend {
namespace {

// A chunk has as many elements as in adamw.cpp.
constexpr std::int64_t kChunkBlocks = 512;
constexpr std::int64_t kNowhere = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kParamBytes = 2;

void require(bool good, const std::string& message) {
  if (!good) {
    throw Error(ErrorKind::kInvalidArgument, "adamw8: " + message);
  }
}

void check(const AdamW8Tensors& t, const AdamWOptions& o) {
  require(t.count >= 0, std::to_string(t.count) + " elements");
  require(t.count == 0 || (t.param && t.grad && t.momentum && t.root && t.scales), "no data");
  require_options("adamw8", o);
  require(o.element_offset % kBlock == 0, "element offset " + std::to_string(o.element_offset) +
                                              " is inside a block: cut tensors at multiples of 32 elements");
}

// Runs the step over a chunk, or over the last elements in a padded block. Called by several threads at once.
class Step {
 public:
  Step(const AdamW8Tensors& tensors, const AdamWOptions& options, SimdLevel level)
      : t_(tensors),
        offset_(options.element_offset),
        factors_(factors_of(options)),
        kernel_(simd_kernels(level).adamw8[static_cast<int>(t_.grad_format)]) {}

  void whole(std::int64_t block, std::int64_t blocks) {
    const std::int64_t begin = block * kBlock;
    const std::int64_t bad = kernel_(factors_, {param(begin), grad(begin), t_.momentum + begin, t_.root + begin,
                                                t_.scales + 2 * block, offset_ / kBlock + block, blocks});
    if (bad >= 0) {
      note(begin + bad * kBlock);
    }
  }

  // Updates fewer elements than a block has, at its beginning. The rest of the padded block repeats the first element:
  // it is finite if that one is, and does not change the block's scales.
  void part(std::int64_t block, std::int64_t count) {
    alignas(64) char a_param[kBlock * kParamBytes];
    alignas(64) char a_grad[kBlock * 4];
    alignas(64) std::uint8_t momentum[kBlock], root[kBlock];
    std::uint8_t scales[2];
    const std::int64_t begin = block * kBlock;
    for (std::int64_t i = 0; i < kBlock; ++i) {
      const std::int64_t from = begin + (i < count ? i : 0);
      std::memcpy(a_param + i * kParamBytes, param(from), kParamBytes);
      std::memcpy(a_grad + i * grad_bytes(), grad(from), static_cast<std::size_t>(grad_bytes()));
      momentum[i] = t_.momentum[from];
      root[i] = t_.root[from];
    }
    std::memcpy(scales, t_.scales + 2 * block, 2);
    if (kernel_(factors_, {a_param, a_grad, momentum, root, scales, offset_ / kBlock + block, 1}) >= 0) {
      note(begin);
      return;
    }
    const auto bytes = static_cast<std::size_t>(count);
    std::memcpy(param(begin), a_param, bytes * kParamBytes);
    std::memcpy(t_.momentum + begin, momentum, bytes);
    std::memcpy(t_.root + begin, root, bytes);
    std::memcpy(t_.scales + 2 * block, scales, 2);
  }

  // Describes the arrays, in chunks of `elements`, for planning threads near the data. States count twice, since they
  // are read and written.
  [[nodiscard]] std::vector<ChunkedArray> arrays(std::int64_t elements) const {
    return {{t_.param, elements * kParamBytes, 2},
            {t_.momentum, elements, 2},
            {t_.root, elements, 2},
            {t_.grad, elements * grad_bytes(), 1}};
  }

  // Throws if a block was skipped because a number is not finite.
  void report(const AdamWOptions& options) const {
    const std::int64_t begin = first_bad_.load();
    if (begin == kNowhere) {
      return;
    }
    const std::string when = " before step " + std::to_string(options.step);
    const std::string restore = when + ": restore the state from a checkpoint";
    for (std::int64_t i = begin; i < std::min(t_.count, begin + kBlock); ++i) {
      if (const float value = value_at(t_.param, FloatFormat::kBFloat16, i); !std::isfinite(value)) {
        fail("parameter is " + std::to_string(value) + " at element", i, restore);
      }
      if (const float value = value_at(t_.grad, t_.grad_format, i); !std::isfinite(value)) {
        fail("gradient is " + std::to_string(value) + " at element", i,
             when + ": check gradients for overflow and skip the step");
      }
    }
    for (const int k : {0, 1}) {
      if (const int scale = t_.scales[begin / kBlock * 2 + k]; scale >= static_cast<int>(kExponentLimit)) {
        std::string what = k == 0 ? "momentum" : "variance";
        what += " has scale ";
        what += std::to_string(scale);
        what += ", which is no number, in the block of element";
        fail(what, begin, restore);
      }
    }
    fail("the update is not finite near element", begin,
         " in step " + std::to_string(options.step) + ": gradients are too large for float32, or epsilon is zero");
  }

 private:
  [[nodiscard]] std::int64_t grad_bytes() const { return format_bytes(t_.grad_format); }
  [[nodiscard]] char* param(std::int64_t i) const { return static_cast<char*>(t_.param) + i * kParamBytes; }
  [[nodiscard]] const char* grad(std::int64_t i) const { return static_cast<const char*>(t_.grad) + i * grad_bytes(); }

  void note(std::int64_t begin) {
    std::int64_t known = first_bad_.load();
    while (begin < known && !first_bad_.compare_exchange_weak(known, begin)) {
    }
  }

  [[noreturn]] void fail(const std::string& what, std::int64_t i, const std::string& rest) const {
    throw Error(ErrorKind::kState, "adamw8: " + what + " " + std::to_string(offset_ + i) + rest +
                                       " (its block of 32 is unchanged, others are updated)");
  }

  const AdamW8Tensors& t_;
  const std::int64_t offset_;
  const AdamWFactors factors_;
  const AdamW8Kernel kernel_;
  std::atomic<std::int64_t> first_bad_{kNowhere};
};

}  // namespace

void adamw8(const AdamW8Tensors& tensors, const AdamWOptions& options, int threads, SimdLevel level) {
  check(tensors, options);
  require_runnable("adamw8", level, threads);
  Step step(tensors, options, level);
  const std::int64_t blocks = tensors.count / kBlock;
  const std::int64_t chunks = (blocks + kChunkBlocks - 1) / kChunkBlocks;
  const std::optional<NumaPlan> plan = plan_near_data(chunks, threads, step.arrays(kChunkBlocks * kBlock));
  const auto update = [&](std::int64_t chunk) {
    const std::int64_t first = chunk * kChunkBlocks;
    step.whole(first, std::min(kChunkBlocks, blocks - first));
    return true;
  };
  parallel_chunks(chunks, threads, update, plan ? &*plan : nullptr);
  if (const std::int64_t rest = tensors.count % kBlock; rest > 0) {
    step.part(blocks, rest);
  }
  step.report(options);
}

}  // namespace memascend

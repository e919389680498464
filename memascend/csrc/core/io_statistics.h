// What the engine counts: a latency histogram with a resolution of an eighth, and totals.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace memascend {

// Buckets of microseconds: eight a power of two. `bucket_floor_us(i)` is the least latency in bucket i.
class LatencyHistogram {
 public:
  static constexpr std::size_t kBuckets = 256;

  static std::size_t bucket(std::int64_t us) noexcept {
    const auto value = static_cast<std::uint64_t>(us < 0 ? 0 : us);
    if (value < 8) {
      return static_cast<std::size_t>(value);
    }
    const int shift = std::bit_width(value) - 4;
    const std::size_t index = static_cast<std::size_t>(shift + 1) * 8 + ((value >> shift) & 7);
    return index < kBuckets ? index : kBuckets - 1;
  }
  static std::int64_t bucket_floor_us(std::size_t index) noexcept {
    return index < 8 ? static_cast<std::int64_t>(index)
                     : static_cast<std::int64_t>((8 + index % 8) << (index / 8 - 1));
  }
  void add(std::int64_t us) noexcept { ++counts_[bucket(us)]; }
  void add(const LatencyHistogram& other) noexcept {
    for (std::size_t index = 0; index < kBuckets; ++index) {
      counts_[index] += other.counts_[index];
    }
  }
  [[nodiscard]] const std::array<std::uint64_t, kBuckets>& counts() const noexcept { return counts_; }

 private:
  std::array<std::uint64_t, kBuckets> counts_{};
};

struct IoStatistics {
  std::int64_t bytes_read = 0;
  std::int64_t bytes_written = 0;
  std::int64_t requests = 0;       // ended, failed ones included
  std::int64_t failed = 0;
  std::int64_t cancelled = 0;
  std::int64_t commands = 0;       // given to the kernel, repeats included
  std::int64_t short_transfers = 0;
  std::int64_t repeated = 0;       // after EINTR or EAGAIN
  std::int64_t reread = 0;         // reads repeated because the tensor was written meanwhile
  std::int64_t bounced_bytes = 0;
  std::int64_t max_queue_depth = 0;
  double mean_queue_depth = 0;     // commands in the kernel, averaged over commands given
  LatencyHistogram read_latency;   // of commands
  LatencyHistogram write_latency;
};

}  // namespace memascend

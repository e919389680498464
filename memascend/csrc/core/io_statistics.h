// Statistics of an engine: totals, and latency histograms with a relative resolution of one eighth.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace memascend {

// A histogram of latencies in microseconds with eight buckets per power of two. `bucket_floor_us(i)` is the smallest
// latency in bucket i.
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
    return index < 8 ? static_cast<std::int64_t>(index) : static_cast<std::int64_t>((8 + index % 8) << (index / 8 - 1));
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

// Counts since the engine was made, for both kinds of engine. Bounced and buffered bytes are part of the totals.
struct IoStatistics {
  std::int64_t bytes_read = 0;
  std::int64_t bytes_written = 0;
  std::int64_t requests = 0;       // that have ended, including failed ones
  std::int64_t failed = 0;
  std::int64_t cancelled = 0;
  std::int64_t commands = 0;       // submitted to the kernel, including repeats
  std::int64_t short_transfers = 0;
  std::int64_t repeated = 0;       // commands repeated after EINTR or EAGAIN
  std::int64_t reread = 0;         // reads repeated because the tensor was written meanwhile
  std::int64_t bounced_bytes = 0;   // copied through a bounce buffer
  std::int64_t buffered_bytes = 0;  // through the page cache
  std::int64_t max_queue_depth = 0;
  double mean_queue_depth = 0;     // commands in the kernel, averaged over submissions; the sum until `finish`
  double reading_s = 0;            // seconds with at least one read in flight
  double writing_s = 0;            // seconds with at least one write in flight
  LatencyHistogram read_latency;   // of commands
  LatencyHistogram write_latency;

  void count_command(std::int64_t in_kernel) {
    ++commands;
    max_queue_depth = max_queue_depth > in_kernel ? max_queue_depth : in_kernel;
    mean_queue_depth += static_cast<double>(in_kernel);
  }
  void count_request(bool has_failed, bool was_cancelled) {
    ++requests;
    failed += has_failed ? 1 : 0;
    cancelled += was_cancelled && !has_failed ? 1 : 0;
  }
  void add(const IoStatistics& other) {
    bytes_read += other.bytes_read;
    bytes_written += other.bytes_written;
    requests += other.requests;
    failed += other.failed;
    cancelled += other.cancelled;
    commands += other.commands;
    short_transfers += other.short_transfers;
    repeated += other.repeated;
    reread += other.reread;
    bounced_bytes += other.bounced_bytes;
    buffered_bytes += other.buffered_bytes;
    max_queue_depth = max_queue_depth > other.max_queue_depth ? max_queue_depth : other.max_queue_depth;
    mean_queue_depth += other.mean_queue_depth;
    read_latency.add(other.read_latency);
    write_latency.add(other.write_latency);
  }
  // Turns the sums into means.
  void finish() { mean_queue_depth /= static_cast<double>(commands > 0 ? commands : 1); }
};

// Time with at least one request of one direction in flight, from submission to end.
class BusyTime {
 public:
  void begin(std::int64_t now_ns) noexcept {
    if (live_++ == 0) {
      since_ns_ = now_ns;
    }
  }
  void end(std::int64_t now_ns) noexcept {
    if (--live_ == 0) {
      total_ns_ += now_ns - since_ns_;
    }
  }
  [[nodiscard]] double seconds(std::int64_t now_ns) const noexcept {
    return static_cast<double>(total_ns_ + (live_ > 0 ? now_ns - since_ns_ : 0)) * 1e-9;
  }

 private:
  std::int64_t live_ = 0;
  std::int64_t since_ns_ = 0;
  std::int64_t total_ns_ = 0;
};

}  // namespace memascend

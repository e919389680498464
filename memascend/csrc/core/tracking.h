// A heap that records its large blocks and can serve the device's role from a separate kind of memory.
//
// On a machine without a GPU, the tensors that a GPU would store are in host memory too. While the role is "device",
// large blocks come from shared anonymous mappings, which the kernel counts (RssShmem) separately from everything in
// the host's role (RssAnon). The two can therefore be distinguished in a real run without relying on our own records.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace memascend {

enum class Role : std::uint8_t { kHost = 0, kDevice = 1 };

// Blocks of at least this size are recorded; smaller ones (many, short-lived, a fraction of a per cent of the bytes)
// are not.
inline constexpr std::size_t kTrackedFromBytes = 32 * 1024;
// Stock PyTorch aligns CPU tensors to 64 bytes (c10/core/alignment.h); kernels may rely on it.
inline constexpr std::size_t kTensorAlignment = 64;

struct TrackedBlock {
  std::uint64_t id = 0;
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  Role role = Role::kHost;
  std::int64_t born_ns = 0;
};

struct TrackingEvent {
  bool is_free = false;
  TrackedBlock block;
  std::int64_t t_ns = 0;
};

struct TrackingTotals {
  std::array<std::int64_t, 2> live_bytes{};  // by Role
  std::array<std::int64_t, 2> peak_bytes{};
  std::int64_t dropped_events = 0;
};

// Most bytes of freed device blocks that are kept for the next allocations of the same size, as in a GPU's caching
// allocator. A layer asks for the same sizes as the layer before it, and mapping every block anew makes up a third of a
// training step's work. In the host's role none are kept, so that the resident memory then equals the recorded bytes.
inline constexpr std::size_t kReusableBytes = std::size_t{32} << 20;

// Thread-safe. A device block is completely resident from its allocation on, as on a GPU.
class TrackingHeap {
 public:
  static TrackingHeap& instance();  // never destroyed: tensors may outlive static destruction

  // Returns at least `bytes` bytes, aligned to 64 and uninitialised; nullptr for zero. Throws Error(kOutOfMemory).
  [[nodiscard]] void* allocate(std::size_t bytes);
  // Frees a block of `allocate`, whatever the role is now.
  void deallocate(void* pointer) noexcept;

  // Turns logging of further allocations and frees for `drain_events` on or off; totals are counted in either case.
  void set_logging(bool on) noexcept { logging_.store(on, std::memory_order_relaxed); }

  void set_role(Role role) noexcept;
  [[nodiscard]] Role role() const noexcept { return role_.load(std::memory_order_relaxed); }

  [[nodiscard]] std::vector<TrackingEvent> drain_events();
  [[nodiscard]] std::vector<TrackedBlock> live() const;
  [[nodiscard]] TrackingTotals totals() const;
  void reset_peaks();

  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  [[nodiscard]] std::atomic<std::uint32_t>& neighbours(std::uintptr_t address) noexcept;
  void book(void* pointer, std::size_t bytes, Role role);
  [[nodiscard]] void* reuse(std::size_t bytes);
  [[nodiscard]] bool keep(void* pointer, std::size_t bytes);
  void log(bool is_free, const TrackedBlock& block, std::int64_t t_ns);

  std::atomic<Role> role_{Role::kHost};
  std::atomic<bool> logging_{true};
  // Number of recorded blocks in each hash bucket: freeing a small block usually reads one counter instead of taking
  // the lock.
  std::array<std::atomic<std::uint32_t>, 4096> booked_{};
  mutable std::mutex mutex_;
  std::unordered_map<std::uintptr_t, TrackedBlock> blocks_;
  std::unordered_map<std::size_t, std::vector<void*>> reusable_;  // by size
  std::size_t reusable_bytes_ = 0;
  std::vector<TrackingEvent> events_;
  TrackingTotals totals_;
  std::uint64_t next_id_ = 1;
};

}  // namespace memascend

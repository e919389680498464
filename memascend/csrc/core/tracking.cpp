#include "tracking.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "clock.h"
#include "errors.h"

namespace memascend {
namespace {

// 4 million events are about 230 MB. The limit keeps a log that is never drained from dominating the memory that it is
// to measure.
constexpr std::size_t kMaxEvents = std::size_t{1} << 22;

void* map_shared(std::size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

void* heap_block(std::size_t bytes) {
  void* address = nullptr;
  return posix_memalign(&address, kTensorAlignment, bytes) == 0 ? address : nullptr;
}

void fork_prepare() { TrackingHeap::instance().lock_for_fork(); }
void fork_done() { TrackingHeap::instance().unlock_after_fork(); }

}  // namespace

TrackingHeap& TrackingHeap::instance() {
  static TrackingHeap* heap = [] {
    pthread_atfork(fork_prepare, fork_done, fork_done);
    return new TrackingHeap();
  }();
  return *heap;
}

std::atomic<std::uint32_t>& TrackingHeap::neighbours(std::uintptr_t address) noexcept {
  // Multiplicative hash of the 64-byte line; the top 12 bits pick the bucket.
  const std::uint64_t mixed = static_cast<std::uint64_t>(address >> 6) * 0x9E3779B97F4A7C15ull;
  return booked_[mixed >> 52];
}

void* TrackingHeap::allocate(std::size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  const bool tracked = bytes >= kTrackedFromBytes;
  const Role role = tracked ? this->role() : Role::kHost;
  void* pointer = role == Role::kDevice ? reuse(bytes) : heap_block(bytes);
  if (pointer == nullptr && role == Role::kDevice) {
    pointer = map_shared(bytes);
  }
  if (pointer == nullptr) {
    throw Error(ErrorKind::kOutOfMemory, "cannot allocate a tensor of " + std::to_string(bytes) + " bytes (" +
                                             std::strerror(ENOMEM) + "): use a smaller model or batch");
  }
  if (tracked) {
    book(pointer, bytes, role);
  }
  return pointer;
}

void TrackingHeap::deallocate(void* pointer) noexcept {
  if (pointer == nullptr) {
    return;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  auto& bucket = neighbours(address);
  if (bucket.load(std::memory_order_acquire) == 0) {
    std::free(pointer);
    return;
  }
  TrackedBlock block;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = blocks_.find(address);
    if (found != blocks_.end()) {
      block = found->second;
      blocks_.erase(found);
      bucket.fetch_sub(1, std::memory_order_release);
      totals_.live_bytes[static_cast<std::size_t>(block.role)] -= static_cast<std::int64_t>(block.bytes);
      log(true, block, monotonic_ns());
    }
  }
  if (block.role != Role::kDevice) {
    std::free(pointer);
  } else if (!keep(pointer, block.bytes)) {
    munmap(pointer, block.bytes);
  }
}

void* TrackingHeap::reuse(std::size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto same_size = reusable_.find(bytes);
  if (same_size == reusable_.end() || same_size->second.empty()) {
    return nullptr;
  }
  void* pointer = same_size->second.back();
  same_size->second.pop_back();
  reusable_bytes_ -= bytes;
  return pointer;
}

bool TrackingHeap::keep(void* pointer, std::size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (role() != Role::kDevice || reusable_bytes_ + bytes > kReusableBytes) {
    return false;
  }
  reusable_[bytes].push_back(pointer);
  reusable_bytes_ += bytes;
  return true;
}

void TrackingHeap::set_role(Role role) noexcept {
  role_.store(role, std::memory_order_relaxed);
  if (role == Role::kDevice) {
    return;
  }
  std::lock_guard<std::mutex> guard(mutex_);
  for (const auto& [bytes, pointers] : reusable_) {
    for (void* pointer : pointers) {
      munmap(pointer, bytes);
    }
  }
  reusable_.clear();
  reusable_bytes_ = 0;
}

void TrackingHeap::book(void* pointer, std::size_t bytes, Role role) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  std::lock_guard<std::mutex> guard(mutex_);
  const TrackedBlock block{next_id_++, address, bytes, role, monotonic_ns()};
  blocks_.emplace(address, block);
  neighbours(address).fetch_add(1, std::memory_order_release);
  auto& live = totals_.live_bytes[static_cast<std::size_t>(role)];
  auto& peak = totals_.peak_bytes[static_cast<std::size_t>(role)];
  live += static_cast<std::int64_t>(bytes);
  peak = std::max(peak, live);
  log(false, block, block.born_ns);
}

void TrackingHeap::log(bool is_free, const TrackedBlock& block, std::int64_t t_ns) {
  if (!logging_.load(std::memory_order_relaxed)) {
    return;
  }
  if (events_.size() >= kMaxEvents) {
    ++totals_.dropped_events;
    return;
  }
  events_.push_back(TrackingEvent{is_free, block, t_ns});
}

std::vector<TrackingEvent> TrackingHeap::drain_events() {
  std::vector<TrackingEvent> drained;
  std::lock_guard<std::mutex> guard(mutex_);
  drained.swap(events_);
  return drained;
}

std::vector<TrackedBlock> TrackingHeap::live() const {
  std::lock_guard<std::mutex> guard(mutex_);
  std::vector<TrackedBlock> blocks;
  blocks.reserve(blocks_.size());
  for (const auto& [address, block] : blocks_) {
    blocks.push_back(block);
  }
  std::sort(blocks.begin(), blocks.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return blocks;
}

TrackingTotals TrackingHeap::totals() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return totals_;
}

void TrackingHeap::reset_peaks() {
  std::lock_guard<std::mutex> guard(mutex_);
  totals_.peak_bytes = totals_.live_bytes;
}

}  // namespace memascend

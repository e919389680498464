// A worker of the direct engine: a thread with its own ring. Included only by direct_engine.cpp.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <utility>

#include "clock.h"
#include "crc32c.h"
#include "direct_request.h"
#include "errors.h"

namespace memascend {

constexpr int kCommandTries = 1000;  // for one command that is interrupted or temporarily refused
constexpr int kLargeBounces = 4;     // large bounce buffers per worker, each for one bounced block

class DirectEngine::Worker {
 public:
  Worker(DirectEngine& engine, int number)
      : engine_(engine),
        number_(number),
        depth_(engine.options_.depth),
        transfers_(static_cast<std::size_t>(depth_)),
        large_bytes_(engine.bounced_block_bytes()),
        bounces_(depth_ * kSectorBytes + kLargeBounces * large_bytes_) {
    for (int bounce = kLargeBounces; bounce-- > 0;) {
      free_bounces_.push_back(bounce);
    }
    for (int slot = depth_; slot-- > 0;) {
      free_.push_back(slot);
    }
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() = default;

  // The bounce buffers: one sector per slot, and a few larger ones. They are allocated by the constructor and not on
  // first use, so that the memory of an engine is known from its start.
  [[nodiscard]] const SectorBuffer& bounces() const { return bounces_; }

  // Makes the ring. Called in the worker's thread, since a ring belongs to the thread that makes it.
  void start() {
    std::vector<int> files;
    for (const auto& device : engine_.store_->devices()) {
      files.push_back(device->fd());
    }
    // No transfer uses this descriptor. While the ring holds it, a killed process still counts as alive.
    files.push_back(engine_.store_->control_fd());
    backend_ = make_backend(engine_.kind_, depth_, files, engine_.calls_);
    events_.resize(static_cast<std::size_t>(depth_));
  }

  void run() {
    while (true) {
      const std::uint64_t version = engine_.work_version_.load();
      update_regions();
      fill();
      if (in_flight() > 0) {
        transfer(version);
      } else if (sums_.empty() && !wait_for_work(version)) {
        return;
      }
      sum_one();
    }
  }

  // Called by other threads that have put something into the queue.
  void wake() noexcept {
    if (asleep_.load()) {
      backend_->wake();
    }
  }

  void add_statistics(IoStatistics& sum) const {
    std::lock_guard<std::mutex> guard(statistics_mutex_);
    sum.add(statistics_);
  }

 private:
  // Submits queued commands and handles completions. Blocks only if there is nothing else to do.
  void transfer(std::uint64_t version) {
    asleep_.store(true);
    const bool news = engine_.work_version_.load() != version && in_flight() < depth_;
    const int count = backend_->run(events_.data(), depth_, !news && !must_poll_ && sums_.empty());
    asleep_.store(false);
    must_poll_ = false;
    for (int index = 0; index < count; ++index) {
      completed(events_[static_cast<std::size_t>(index)]);
    }
  }

  // Computes the checksum of one block while the devices work: of a write in flight, or of a read that has ended.
  void sum_one() {
    if (sums_.empty()) {
      return;
    }
    const auto [request, number] = std::move(sums_.front());
    sums_.pop_front();
    const Block& block = request->blocks[number];
    request->checksums[block.order] = crc32c(0, block.data, static_cast<std::size_t>(block.bytes));
    engine_.block_ended(request, 1);
  }

  struct Transfer {
    std::shared_ptr<Request> request;
    std::size_t block = 0;
    char* data = nullptr;       // memory of the transfer: the tensor's or a bounce buffer
    std::int64_t offset = 0;    // whole sectors
    std::int64_t bytes = 0;
    std::int64_t done = 0;
    std::int64_t started_ns = 0;
    int bounce = -1;            // index of the large bounce buffer in use
    bool bounced = false;
    int tries = 0;
  };

  [[nodiscard]] int in_flight() const { return depth_ - static_cast<int>(free_.size()); }

  // Blocks until there is work. Returns false if the engine stops and no request is left.
  bool wait_for_work(std::uint64_t version) {
    std::unique_lock<std::mutex> guard(engine_.mutex_);
    // A request that waits for its turn is made ready by the thread that ends the one before it.
    const auto over = [&] { return engine_.stopping_ && engine_.live_.empty(); };
    engine_.work_ready_->wait(guard, [&] {
      return !engine_.ready_[0].empty() || !engine_.ready_[1].empty() || over() ||
             engine_.work_version_.load() != version;
    });
    return !over();
  }

  // Brings the ring's table of registered memory up to date with the engine's.
  void update_regions() {
    Regions wanted;
    {
      std::lock_guard<std::mutex> guard(engine_.mutex_);
      if (engine_.regions_version_ == regions_seen_) {
        return;
      }
      regions_seen_ = engine_.regions_version_;
      wanted = engine_.regions_;
    }
    std::erase_if(regions_, [&](const auto& there) {
      const auto found = wanted.find(there.first);
      if (found != wanted.end() && found->second == there.second) {
        return false;
      }
      backend_->unregister_buffer(there.second.index);
      return true;
    });
    bool good = true;
    for (const auto& [address, region] : wanted) {
      if (good && !regions_.contains(address)) {
        good = backend_->register_buffer(region.index, reinterpret_cast<void*>(address),
                                         static_cast<std::size_t>(region.bytes));
        if (good) {
          regions_[address] = region;
        }
      }
    }
    std::lock_guard<std::mutex> guard(engine_.mutex_);
    engine_.regions_good_ = engine_.regions_good_ && good;
    ++engine_.regions_answers_;
    engine_.answered_->notify_all();
  }

  // Returns the slot of the ring's table for this memory, or -1.
  [[nodiscard]] int region_of(const void* data, std::int64_t bytes) const {
    const auto at = reinterpret_cast<std::uintptr_t>(data);
    auto found = regions_.upper_bound(at);
    if (found == regions_.begin()) {
      return -1;
    }
    --found;
    const bool inside =
        at - found->first + static_cast<std::uint64_t>(bytes) <= static_cast<std::uint64_t>(found->second.bytes);
    return inside ? found->second.index : -1;
  }

  void fill() {
    for (std::size_t waiting = stalled_.size(); waiting > 0 && !free_.empty(); --waiting) {
      auto [request, block] = std::move(stalled_.front());
      stalled_.pop_front();
      begin(std::move(request), block);
    }
    std::shared_ptr<Request> request;
    std::size_t block = 0;
    while (!free_.empty() && stalled_.empty() && engine_.take_block(number_, rather_write(), request, block)) {
      last_was_write_ = request->write;
      begin(std::move(request), block);
    }
  }

  // Prefers the direction with fewer blocks in flight; if both have the same number, the one that was not last.
  [[nodiscard]] bool rather_write() const {
    const int reads = in_flight() - writes_in_flight_;
    return writes_in_flight_ == reads ? !last_was_write_ : writes_in_flight_ < reads;
  }

  void begin(std::shared_ptr<Request> request, std::size_t number) {
    const Block& block = request->blocks[number];
    Transfer transfer;
    transfer.block = number;
    transfer.offset = sector_down(block.offset);
    transfer.bytes = sector_up(block.offset + block.bytes) - transfer.offset;
    transfer.data = block.data;
    transfer.bounced = transfer.bytes != block.bytes || !engine_.store_->devices()[block.member]->takes(block.data);
    const int slot = free_.back();
    if (transfer.bounced && !give_bounce(transfer, slot)) {
      stalled_.emplace_back(std::move(request), number);
      return;
    }
    if (request->write && transfer.bounced) {
      char* end = transfer.data + block.bytes;
      std::memcpy(transfer.data, block.data, static_cast<std::size_t>(block.bytes));
      std::memset(end, 0, static_cast<std::size_t>(transfer.bytes - block.bytes));
    }
    if (request->write && request->summed) {
      sums_.emplace_back(request, number);
    }
    free_.pop_back();
    writes_in_flight_ += request->write ? 1 : 0;
    transfer.request = std::move(request);
    transfers_[static_cast<std::size_t>(slot)] = std::move(transfer);
    send(slot);
  }

  // Assigns a bounce buffer. Each slot has one of a sector; the larger ones are few. Returns false if none is free.
  bool give_bounce(Transfer& transfer, int slot) {
    if (transfer.bytes <= kSectorBytes) {
      transfer.data = bounces_.data() + slot * kSectorBytes;
      return true;
    }
    if (free_bounces_.empty()) {
      return false;
    }
    transfer.bounce = free_bounces_.back();
    free_bounces_.pop_back();
    transfer.data = bounces_.data() + depth_ * kSectorBytes + transfer.bounce * large_bytes_;
    return true;
  }

  void send(int slot) {
    Transfer& transfer = transfers_[static_cast<std::size_t>(slot)];
    const Block& block = transfer.request->blocks[transfer.block];
    AioCommand command;
    command.write = transfer.request->write;
    command.file = static_cast<int>(block.member);
    command.data = transfer.data + transfer.done;
    command.bytes = static_cast<std::uint32_t>(transfer.bytes - transfer.done);
    command.buffer = transfer.bounced ? -1 : region_of(command.data, command.bytes);
    command.offset = transfer.offset + transfer.done;
    command.token = static_cast<std::uint64_t>(slot);
    transfer.started_ns = monotonic_ns();
    backend_->queue(command);
    std::lock_guard<std::mutex> guard(statistics_mutex_);
    statistics_.count_command(in_flight());
  }

  void completed(const AioEvent& event) {
    const auto slot = static_cast<int>(event.token);
    Transfer& transfer = transfers_[event.token];
    const std::int64_t left = transfer.bytes - transfer.done;
    const bool write = transfer.request->write;
    {
      std::lock_guard<std::mutex> guard(statistics_mutex_);
      (write ? statistics_.write_latency : statistics_.read_latency).add((monotonic_ns() - transfer.started_ns) / 1000);
      statistics_.short_transfers += event.result >= 0 && event.result < left ? 1 : 0;
      statistics_.repeated += event.result == -EINTR || event.result == -EAGAIN ? 1 : 0;
    }
    if (event.result == left) {
      transfer.done += left;
      succeed(transfer);
      release(slot, 1);
      return;
    }
    const std::int64_t moved = event.result > 0 ? sector_down(event.result) : 0;
    const bool again = event.result > 0 || event.result == -EINTR || event.result == -EAGAIN;
    if (again && event.result < left && (moved > 0 || ++transfer.tries <= kCommandTries)) {
      if (moved == 0 && in_flight() == 1) {  // do not spin while the kernel lacks a resource
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      transfer.done += moved;
      send(slot);
      must_poll_ = true;
      return;
    }
    give_up(transfer, event.result);
    release(slot, write ? 1 : transfer.request->units());  // the checksum of a write is already queued
  }

  void succeed(Transfer& transfer) {
    Request& request = *transfer.request;
    const Block& block = request.blocks[transfer.block];
    if (!request.write && transfer.bounced) {
      std::memcpy(block.data, transfer.data + (block.offset - transfer.offset), static_cast<std::size_t>(block.bytes));
    }
    if (!request.write && request.summed) {
      sums_.emplace_back(transfer.request, transfer.block);
    }
    std::lock_guard<std::mutex> guard(statistics_mutex_);
    (request.write ? statistics_.bytes_written : statistics_.bytes_read) += block.bytes;
    statistics_.bounced_bytes += transfer.bounced ? block.bytes : 0;
    statistics_.buffered_bytes += engine_.store_->devices()[block.member]->direct() ? 0 : block.bytes;
  }

  void give_up(const Transfer& transfer, int result) {
    const int error = result < 0 ? -result : 0;
    std::string reason = error != 0 ? std::strerror(error) : "the device ends here: it has shrunk or is another one";
    if (result > 0) {
      reason = result > transfer.bytes - transfer.done ? "more than was asked for" : "too many short transfers";
    }
    const Request& request = *transfer.request;
    engine_.fail(*transfer.request, {request.write ? "write" : "read", request.key, device_of(transfer),
                                     transfer.offset, transfer.bytes, transfer.done, error, std::move(reason)});
  }

  [[nodiscard]] const std::string& device_of(const Transfer& transfer) const {
    return engine_.store_->devices()[transfer.request->blocks[transfer.block].member]->path();
  }

  void release(int slot, std::int64_t units) {
    Transfer& transfer = transfers_[static_cast<std::size_t>(slot)];
    const std::shared_ptr<Request> request = std::move(transfer.request);
    writes_in_flight_ -= request->write ? 1 : 0;
    if (transfer.bounce >= 0) {
      free_bounces_.push_back(transfer.bounce);
    }
    transfer = {};
    free_.push_back(slot);
    engine_.block_ended(request, units);
  }

  DirectEngine& engine_;
  const int number_;
  const int depth_;
  std::unique_ptr<AioBackend> backend_;
  std::vector<Transfer> transfers_;
  std::vector<int> free_;
  int writes_in_flight_ = 0;
  bool last_was_write_ = false;
  std::vector<AioEvent> events_;
  std::deque<std::pair<std::shared_ptr<Request>, std::size_t>> stalled_;  // wait for a bounce buffer
  std::deque<std::pair<std::shared_ptr<Request>, std::size_t>> sums_;  // blocks whose checksum is still missing
  const std::int64_t large_bytes_;
  SectorBuffer bounces_;
  std::vector<int> free_bounces_;  // of the large buffers
  Regions regions_;                // in the ring's table
  std::uint64_t regions_seen_ = 0;
  bool must_poll_ = false;
  std::atomic<bool> asleep_{false};
  mutable std::mutex statistics_mutex_;
  IoStatistics statistics_;
};

}  // namespace memascend

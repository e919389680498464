#include "direct_engine.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <utility>

#include "clock.h"
#include "crc32c.h"
#include "errors.h"

namespace memascend {
namespace {

constexpr int kTries = 1000;        // of one command that is interrupted or refused for the moment
constexpr int kRereads = 100;       // of a tensor that is written faster than it can be read
constexpr int kLargeBounces = 4;    // a worker, each of a block
constexpr int kMaxWorkers = 64;
constexpr int kMaxDepth = 1024;
constexpr std::size_t kTraceRows = 1 << 20;

bool memory_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % kMemoryAlignment == 0; }

}  // namespace

// What one command moves: whole sectors straight from memory, or anything through a bounce buffer.
struct DirectEngine::Block {
  std::uint32_t member;
  std::int64_t offset;  // on the device
  char* data;
  std::int64_t bytes;
  std::uint32_t order;  // by position in the tensor: where its checksum goes
  int buffer;           // registered, or -1
};

struct DirectEngine::Request {
  std::uint64_t id = 0;
  bool write = false;
  std::string key;
  char* data = nullptr;
  std::int64_t bytes = 0;
  std::int64_t offset = 0;
  int priority = 0;
  std::shared_ptr<void> keep_alive;
  TensorRecord record;
  Reservation reservation;  // of a write to new space
  std::shared_ptr<VolatileTensor> tensor;
  bool summed = false;      // checksums of blocks are taken

  std::vector<Block> blocks;
  std::vector<std::uint32_t> checksums;  // by `order`
  std::vector<std::int64_t> lengths;
  int rereads = 0;

  // Guarded by DirectEngine::mutex_.
  std::vector<std::pair<std::size_t, std::size_t>> parts;  // blocks not handed out, one range a worker
  std::int64_t unfinished = 0;                              // units: transfers of blocks, and their checksums
  bool cancelled = false;
  std::optional<RequestFailure> failure;
  std::int64_t submitted_ns = 0;
  std::int64_t started_ns = 0;

  [[nodiscard]] std::int64_t units() const { return summed ? 2 : 1; }  // a block

  // Takes back what was not handed out; returns how many units.
  std::int64_t drop() {
    std::int64_t dropped = 0;
    for (auto& [next, end] : parts) {
      dropped += static_cast<std::int64_t>(end - next);
      next = end;
    }
    return dropped * units();
  }
};

// ------------------------------------------------------------------------------------------------------- workers

class DirectEngine::Worker {
 public:
  Worker(DirectEngine& engine, int number)
      : engine_(engine), number_(number), depth_(engine.options_.depth), transfers_(static_cast<std::size_t>(depth_)) {
    for (int slot = depth_; slot-- > 0;) {
      free_.push_back(slot);
    }
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() = default;

  // In the worker's thread, since a ring belongs to the thread that makes it.
  void start() {
    std::vector<int> files;
    for (const auto& device : engine_.store_->devices()) {
      files.push_back(device->fd());
    }
    files.push_back(engine_.store_->control_fd());  // never used: a killed process counts as alive with its ring
    backend_ = make_backend(engine_.kind_, depth_, files, engine_.calls_);
    events_.resize(static_cast<std::size_t>(depth_));
  }

  void run() {
    while (true) {
      const std::uint64_t version = engine_.work_version_.load();
      register_regions();
      fill();
      if (in_flight() > 0) {
        transfer(version);
      } else if (sums_.empty() && !wait_for_work(version)) {
        return;
      }
      sum_one();
    }
  }

  // Another thread has put something into the queue.
  void wake() noexcept {
    if (asleep_.load()) {
      backend_->wake();
    }
  }

  void add_statistics(IoStatistics& sum) const {
    std::lock_guard<std::mutex> guard(statistics_mutex_);
    sum.bytes_read += statistics_.bytes_read;
    sum.bytes_written += statistics_.bytes_written;
    sum.commands += statistics_.commands;
    sum.short_transfers += statistics_.short_transfers;
    sum.repeated += statistics_.repeated;
    sum.bounced_bytes += statistics_.bounced_bytes;
    sum.max_queue_depth = std::max(sum.max_queue_depth, statistics_.max_queue_depth);
    sum.mean_queue_depth += statistics_.mean_queue_depth;  // the sum of depths, divided by the engine
    sum.read_latency.add(statistics_.read_latency);
    sum.write_latency.add(statistics_.write_latency);
  }

 private:
  // Hands what is queued to the kernel and takes what has ended; sleeps only if there is nothing else to do.
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

  // The checksum of one block, while the devices work: of a write under way, or of a read that has ended.
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
    char* data = nullptr;       // what the kernel sees: the tensor's memory or a bounce buffer
    std::int64_t offset = 0;    // whole sectors
    std::int64_t bytes = 0;
    std::int64_t done = 0;
    std::int64_t started_ns = 0;
    int bounce = -1;            // large bounce buffer held
    bool bounced = false;
    int tries = 0;
  };

  [[nodiscard]] int in_flight() const { return depth_ - static_cast<int>(free_.size()); }

  // False: the engine stops and nothing is left.
  bool wait_for_work(std::uint64_t version) {
    std::unique_lock<std::mutex> guard(engine_.mutex_);
    // Requests that wait for their turn are made ready by whoever ends the one before.
    const auto over = [&] { return engine_.stopping_ && engine_.live_.empty(); };
    engine_.work_ready_->wait(guard, [&] {
      return !engine_.ready_.empty() || over() || engine_.work_version_.load() != version;
    });
    return !over();
  }

  void register_regions() {
    std::vector<Region> fresh;
    {
      std::lock_guard<std::mutex> guard(engine_.mutex_);
      if (engine_.regions_version_ == regions_seen_) {
        return;
      }
      regions_seen_ = engine_.regions_version_;
      fresh = engine_.candidates_;
    }
    bool good = true;
    for (const Region& region : fresh) {
      good = good && backend_->register_buffer(region.index, region.data, static_cast<std::size_t>(region.bytes));
    }
    std::lock_guard<std::mutex> guard(engine_.mutex_);
    engine_.regions_good_ = engine_.regions_good_ && good;
    ++engine_.regions_answers_;
    engine_.ended_->notify_all();
  }

  void fill() {
    for (std::size_t waiting = stalled_.size(); waiting > 0 && !free_.empty(); --waiting) {
      auto [request, block] = std::move(stalled_.front());
      stalled_.pop_front();
      begin(std::move(request), block);
    }
    std::shared_ptr<Request> request;
    std::size_t block = 0;
    while (!free_.empty() && stalled_.empty() && engine_.take_block(number_, request, block)) {
      begin(std::move(request), block);
    }
  }

  void begin(std::shared_ptr<Request> request, std::size_t number) {
    const Block& block = request->blocks[number];
    Transfer transfer;
    transfer.block = number;
    transfer.offset = sector_down(block.offset);
    transfer.bytes = sector_up(block.offset + block.bytes) - transfer.offset;
    transfer.data = block.data;
    transfer.bounced = transfer.bytes != block.bytes || !memory_aligned(block.data);
    const int slot = free_.back();
    try {
      if (transfer.bounced && !give_bounce(transfer, slot)) {
        stalled_.emplace_back(std::move(request), number);
        return;
      }
    } catch (const Error& error) {
      refuse(request, block, ENOMEM, error.what());
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
    transfer.request = std::move(request);
    transfers_[static_cast<std::size_t>(slot)] = std::move(transfer);
    send(slot);
  }

  // A sector a slot is always to be had; of larger ones there are few. False: none is free.
  bool give_bounce(Transfer& transfer, int slot) {
    if (transfer.bytes <= kSectorBytes) {
      if (!small_bounces_) {
        small_bounces_ = std::make_unique<SectorBuffer>(depth_ * kSectorBytes);
        engine_.bounce_bytes_ += small_bounces_->bytes();
      }
      transfer.data = small_bounces_->data() + slot * kSectorBytes;
      return true;
    }
    if (free_bounces_.empty() && large_bounces_.size() < kLargeBounces) {
      large_bounces_.push_back(std::make_unique<SectorBuffer>(engine_.options_.block_bytes + kSectorBytes));
      engine_.bounce_bytes_ += large_bounces_.back()->bytes();
      free_bounces_.push_back(static_cast<int>(large_bounces_.size()) - 1);
    }
    if (free_bounces_.empty()) {
      return false;
    }
    transfer.bounce = free_bounces_.back();
    free_bounces_.pop_back();
    transfer.data = large_bounces_[static_cast<std::size_t>(transfer.bounce)]->data();
    return true;
  }

  void send(int slot) {
    Transfer& transfer = transfers_[static_cast<std::size_t>(slot)];
    const Block& block = transfer.request->blocks[transfer.block];
    AioCommand command;
    command.write = transfer.request->write;
    command.file = static_cast<int>(block.member);
    command.buffer = transfer.bounced ? -1 : block.buffer;
    command.data = transfer.data + transfer.done;
    command.bytes = static_cast<std::uint32_t>(transfer.bytes - transfer.done);
    command.offset = transfer.offset + transfer.done;
    command.token = static_cast<std::uint64_t>(slot);
    transfer.started_ns = monotonic_ns();
    backend_->queue(command);
    std::lock_guard<std::mutex> guard(statistics_mutex_);
    ++statistics_.commands;
    statistics_.max_queue_depth = std::max<std::int64_t>(statistics_.max_queue_depth, in_flight());
    statistics_.mean_queue_depth += in_flight();
  }

  void completed(const AioEvent& event) {
    const auto slot = static_cast<int>(event.token);
    Transfer& transfer = transfers_[event.token];
    const std::int64_t left = transfer.bytes - transfer.done;
    const bool write = transfer.request->write;
    {
      std::lock_guard<std::mutex> guard(statistics_mutex_);
      (write ? statistics_.write_latency : statistics_.read_latency)
          .add((monotonic_ns() - transfer.started_ns) / 1000);
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
    if (again && event.result < left && (moved > 0 || ++transfer.tries <= kTries)) {
      if (moved == 0 && in_flight() == 1) {  // do not spin on a kernel that is out of something
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
      transfer.done += moved;
      send(slot);
      must_poll_ = true;
      return;
    }
    give_up(transfer, event.result);
    release(slot, write ? 1 : transfer.request->units());  // the checksum of a write is on its way
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
  }

  void give_up(const Transfer& transfer, int result) {
    const int error = result < 0 ? -result : 0;
    std::string reason = error != 0 ? std::strerror(error) : "the device ends here: it has shrunk or is another one";
    if (result > 0) {
      reason = result > transfer.bytes - transfer.done ? "more than was asked for" : "too many short transfers";
    }
    const Request& request = *transfer.request;
    engine_.fail(*transfer.request,
                 {request.id, request.write ? "write" : "read", request.key, device_of(transfer), transfer.offset,
                  transfer.bytes, transfer.done, error, std::move(reason)});
  }

  void refuse(const std::shared_ptr<Request>& request, const Block& block, int error, std::string reason) {
    engine_.fail(*request, {request->id, request->write ? "write" : "read", request->key,
                            engine_.store_->devices()[block.member]->path(), block.offset, block.bytes, 0, error,
                            std::move(reason)});
    engine_.block_ended(request, request->units());
  }

  [[nodiscard]] const std::string& device_of(const Transfer& transfer) const {
    return engine_.store_->devices()[transfer.request->blocks[transfer.block].member]->path();
  }

  void release(int slot, std::int64_t units) {
    Transfer& transfer = transfers_[static_cast<std::size_t>(slot)];
    const std::shared_ptr<Request> request = std::move(transfer.request);
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
  std::vector<AioEvent> events_;
  std::deque<std::pair<std::shared_ptr<Request>, std::size_t>> stalled_;  // wait for a bounce buffer
  std::deque<std::pair<std::shared_ptr<Request>, std::size_t>> sums_;     // blocks whose checksum is still to be taken
  std::unique_ptr<SectorBuffer> small_bounces_;
  std::vector<std::unique_ptr<SectorBuffer>> large_bounces_;
  std::vector<int> free_bounces_;
  std::uint64_t regions_seen_ = 0;
  bool must_poll_ = false;
  std::atomic<bool> asleep_{false};
  mutable std::mutex statistics_mutex_;
  IoStatistics statistics_;
};

// -------------------------------------------------------------------------------------------------------- engine

DirectEngine::DirectEngine(std::shared_ptr<Store> store, EngineOptions options, IoSyscalls& calls)
    : store_(std::move(store)),
      options_(std::move(options)),
      calls_(calls),
      kind_(choose_aio(options_.backend, calls)),
      owner_pid_(getpid()),
      threads_(std::make_unique<std::vector<std::thread>>()) {
  if (options_.workers < 1 || options_.workers > kMaxWorkers || options_.depth < 1 || options_.depth > kMaxDepth) {
    throw Error(ErrorKind::kInvalidArgument, "storage engine: use 1 to 64 workers and a depth of 1 to 1024");
  }
  if (options_.block_bytes < kSectorBytes || options_.block_bytes % kSectorBytes != 0 ||
      options_.block_bytes > (std::int64_t{1} << 30)) {
    throw Error(ErrorKind::kInvalidArgument, "storage engine: blocks are a multiple of 4096 bytes, at most 1 GiB");
  }
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(options_.workers));
  int started = 0;
  for (int number = 0; number < options_.workers; ++number) {
    workers_.push_back(std::make_unique<Worker>(*this, number));
  }
  for (int number = 0; number < options_.workers; ++number) {
    threads_->emplace_back([this, number, &errors, &started] {
      Worker& worker = *workers_[static_cast<std::size_t>(number)];
      std::exception_ptr error;
      try {
        worker.start();
      } catch (...) {
        error = std::current_exception();
      }
      {
        std::lock_guard<std::mutex> guard(mutex_);
        errors[static_cast<std::size_t>(number)] = error;
        ++started;
        ended_->notify_all();
      }
      if (!error) {
        worker.run();
      }
    });
  }
  {
    std::unique_lock<std::mutex> guard(mutex_);
    ended_->wait(guard, [&] { return started == options_.workers; });
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      stop_threads();
      std::rethrow_exception(error);
    }
  }
}

DirectEngine::~DirectEngine() { shutdown(); }

void DirectEngine::stop_threads() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
    ++work_version_;
  }
  work_ready_->notify_all();
  for (std::thread& thread : *threads_) {
    thread.join();
  }
  threads_->clear();
}

void DirectEngine::shutdown() {
  std::lock_guard<std::mutex> guard(shutdown_mutex_);
  if (getpid() != owner_pid_) {
    (void)threads_.release();  // the threads, and what they hold, are the parent's
    threads_ = std::make_unique<std::vector<std::thread>>();
    for (auto& worker : workers_) {
      (void)worker.release();
    }
    workers_.clear();
    (void)work_ready_.release();
    (void)ended_.release();
    return;
  }
  if (!threads_->empty()) {
    stop_threads();
  }
}

void DirectEngine::require_own_process() const {
  if (getpid() != owner_pid_) {
    throw Error(ErrorKind::kState, "storage engine: made before the fork, its threads and rings are the parent's: "
                                   "make one in each process");
  }
}

int DirectEngine::region_of(const void* data, std::int64_t bytes) const {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  for (const Region& region : regions_) {
    const auto begin = reinterpret_cast<std::uintptr_t>(region.data);
    if (at >= begin && at - begin + static_cast<std::uint64_t>(bytes) <= static_cast<std::uint64_t>(region.bytes)) {
      return region.index;
    }
  }
  return -1;
}

// Cuts [offset, offset + bytes) of the tensor into blocks: the parts of sectors at either end are blocks of their
// own, the rest goes in pieces of `block_bytes`. Then the devices take turns, in proportion to what each has to do.
void DirectEngine::plan(Request& request) const {
  request.blocks.clear();
  std::int64_t extent_begin = 0;
  for (const Extent& extent : request.record.extents) {
    std::int64_t from = std::max(request.offset, extent_begin);
    const std::int64_t to = std::min(request.offset + request.bytes, extent_begin + extent.bytes);
    while (from < to) {
      const std::int64_t offset = extent.offset + from - extent_begin;
      std::int64_t bytes = std::min(to - from, options_.block_bytes);
      if (offset % kSectorBytes != 0) {
        bytes = std::min(to - from, kSectorBytes - offset % kSectorBytes);
      } else if (bytes > kSectorBytes) {
        bytes = sector_down(bytes);
      }
      char* data = request.data + (from - request.offset);
      request.blocks.push_back({extent.member, offset, data, bytes, static_cast<std::uint32_t>(request.blocks.size()),
                                region_of(data, bytes)});
      from += bytes;
    }
    extent_begin += extent.bytes;
  }
  request.checksums.assign(request.summed ? request.blocks.size() : 0, 0);
  request.lengths.clear();
  std::array<double, kMaxMembers> count{};
  for (const Block& block : request.blocks) {
    request.lengths.push_back(block.bytes);
    count[block.member] += 1;
  }
  if (store_->devices().size() > 1) {
    std::array<double, kMaxMembers> seen{};
    std::vector<std::pair<double, std::size_t>> turns;
    for (std::size_t index = 0; index < request.blocks.size(); ++index) {
      const std::uint32_t member = request.blocks[index].member;
      turns.emplace_back((seen[member] + 0.5) / count[member], index);
      seen[member] += 1;
    }
    std::sort(turns.begin(), turns.end());
    std::vector<Block> sorted;
    sorted.reserve(turns.size());
    for (const auto& turn : turns) {
      sorted.push_back(request.blocks[turn.second]);
    }
    request.blocks = std::move(sorted);
  }
}

// Equal parts over the workers.
void DirectEngine::split(Request& request) const {
  const std::size_t count = request.blocks.size();
  const auto workers = static_cast<std::size_t>(options_.workers);
  request.parts.clear();
  for (std::size_t worker = 0; worker < workers; ++worker) {
    request.parts.emplace_back(count * worker / workers, count * (worker + 1) / workers);
  }
  request.unfinished = static_cast<std::int64_t>(count) * request.units();
}

void DirectEngine::make_ready(const std::shared_ptr<Request>& request) {
  ready_[{-request->priority, request->id}] = request;
  ++work_version_;
}

std::uint64_t DirectEngine::enqueue(std::shared_ptr<Request> request) {
  request->submitted_ns = monotonic_ns();
  bool empty = false;
  std::uint64_t id = 0;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (stopping_) {
      throw Error(ErrorKind::kState, "storage engine: closed, it takes no more requests");
    }
    id = request->id = next_id_++;
    plan(*request);
    split(*request);
    live_[id] = request;
    empty = request->blocks.empty();
    if (!empty && (!request->tensor || request->tensor->turns.join(id, request->write))) {
      make_ready(request);
    }
  }
  if (empty) {
    finish(request);
  } else {
    wake_workers();
  }
  return id;
}

void DirectEngine::wake_workers() {
  work_ready_->notify_all();
  for (const auto& worker : workers_) {
    worker->wake();
  }
}

std::uint64_t DirectEngine::write(const std::string& key, const void* data, TensorRecord record, int priority,
                                  std::shared_ptr<void> keep_alive) {
  require_own_process();
  if (key.empty() || key.size() > kMaxKeyBytes) {
    throw Error(ErrorKind::kInvalidArgument, "storage engine: a key has 1 to 4096 bytes");
  }
  auto request = std::make_shared<Request>();
  request->write = true;
  request->key = key;
  request->data = static_cast<char*>(const_cast<void*>(data));
  request->bytes = record.bytes;
  request->priority = priority;
  request->keep_alive = std::move(keep_alive);
  request->summed = options_.checksums != Checksums::kOff;
  if (options_.is_volatile) {
    request->tensor = place_volatile(key, record);
    record.extents = request->tensor->place.extents();
    request->record = std::move(record);
    return enqueue(std::move(request));
  }
  request->reservation = store_->reserve(record.bytes);
  record.generation = store_->next_generation();
  record.extents = request->reservation.extents;
  request->record = std::move(record);
  try {
    return enqueue(request);
  } catch (...) {
    store_->release(request->reservation);
    throw;
  }
}

std::shared_ptr<VolatileTensor> DirectEngine::volatile_tensor(const std::string& key) const {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = volatile_.find(key);
  return found == volatile_.end() ? nullptr : found->second;
}

// The tensor under `key` if it has that size, else a new one, in place of it. An old one that is in use by requests
// keeps its space until they have ended.
std::shared_ptr<VolatileTensor> DirectEngine::place_volatile(const std::string& key,
                                                             const TensorRecord& record) {
  {
    std::shared_ptr<VolatileTensor> old = volatile_tensor(key);
    if (old && old->record.bytes == record.bytes) {
      return old;
    }
    std::lock_guard<std::mutex> guard(mutex_);
    volatile_.erase(key);
  }
  auto fresh = std::make_shared<VolatileTensor>(store_, record);
  std::lock_guard<std::mutex> guard(mutex_);
  volatile_[key] = fresh;
  return fresh;
}

std::uint64_t DirectEngine::write_part(const std::string& key, const void* data, std::int64_t bytes,
                                       std::int64_t offset, int priority, std::shared_ptr<void> keep_alive) {
  require_own_process();
  const std::shared_ptr<VolatileTensor> tensor = volatile_tensor(key);
  if (!tensor) {
    throw Error(ErrorKind::kInvalidArgument,
                "write to a part of '" + key + "': a volatile engine has to hold the tensor: write all of it first");
  }
  const std::int64_t size = tensor->record.bytes;
  const bool inside = bytes >= 0 && offset >= 0 && offset <= size && bytes <= size - offset;
  if (!inside || offset % kSectorBytes != 0 || ((offset + bytes) % kSectorBytes != 0 && offset + bytes != size)) {
    throw Error(ErrorKind::kInvalidArgument,
                "write to bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) + " of '" + key +
                    "', a tensor of " + std::to_string(size) +
                    ": begin and end at multiples of 4096 bytes, or at the tensor's end");
  }
  auto request = std::make_shared<Request>();
  request->write = true;
  request->key = key;
  request->data = static_cast<char*>(const_cast<void*>(data));
  request->bytes = bytes;
  request->offset = offset;
  request->priority = priority;
  request->keep_alive = std::move(keep_alive);
  request->tensor = tensor;
  request->record.bytes = size;
  request->record.extents = tensor->place.extents();
  return enqueue(std::move(request));
}

RecordPointer DirectEngine::record_of(const std::shared_ptr<VolatileTensor>& tensor) const {
  std::lock_guard<std::mutex> guard(mutex_);
  return tensor ? std::make_shared<TensorRecord>(tensor->record) : nullptr;
}

RecordPointer DirectEngine::find(const std::string& key) {
  return options_.is_volatile ? record_of(volatile_tensor(key)) : store_->find(key);
}

std::vector<std::pair<std::string, RecordPointer>> DirectEngine::list() {
  if (!options_.is_volatile) {
    return store_->list();
  }
  std::vector<std::pair<std::string, RecordPointer>> out;
  std::lock_guard<std::mutex> guard(mutex_);
  for (const auto& [key, tensor] : volatile_) {
    out.emplace_back(key, std::make_shared<TensorRecord>(tensor->record));
  }
  return out;
}

bool DirectEngine::erase(const std::string& key) {
  require_own_process();
  if (!options_.is_volatile) {
    return store_->erase(key);
  }
  std::shared_ptr<VolatileTensor> gone;  // its space is given back without mutex_
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = volatile_.find(key);
  if (found == volatile_.end()) {
    return false;
  }
  gone = std::move(found->second);
  volatile_.erase(found);
  return true;
}

std::uint64_t DirectEngine::read(const std::string& key, void* data, std::int64_t bytes, std::int64_t offset,
                                 int priority, std::shared_ptr<void> keep_alive) {
  require_own_process();
  const std::shared_ptr<VolatileTensor> tensor = volatile_tensor(key);
  const RecordPointer record = options_.is_volatile ? record_of(tensor) : store_->find(key);
  if (!record) {
    throw Error(ErrorKind::kInvalidArgument, "read of '" + key + "': no such tensor on " +
                                                 store_->devices()[0]->path() + ": write it, and wait for the write, first");
  }
  if (bytes < 0 || offset < 0 || offset > record->bytes || bytes > record->bytes - offset) {
    throw Error(ErrorKind::kInvalidArgument,
                "read of '" + key + "': bytes " + std::to_string(offset) + " to " + std::to_string(offset + bytes) +
                    " of a tensor of " + std::to_string(record->bytes) + ": give a buffer of the tensor's size");
  }
  auto request = std::make_shared<Request>();
  request->key = key;
  request->data = static_cast<char*>(data);
  request->bytes = bytes;
  request->offset = offset;
  request->priority = priority;
  request->keep_alive = std::move(keep_alive);
  request->record = *record;
  request->tensor = tensor;
  request->summed = options_.checksums == Checksums::kFull && bytes == record->bytes && (tensor || record->checksum);
  return enqueue(std::move(request));
}

// The next block for a worker: of its own part, else of the longest. False: there is none.
bool DirectEngine::take_block(int worker, std::shared_ptr<Request>& out, std::size_t& block) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (ready_.empty()) {
    return false;
  }
  const std::shared_ptr<Request> request = ready_.begin()->second;
  auto* part = &request->parts[static_cast<std::size_t>(worker)];
  std::size_t left = 0;
  for (auto& other : request->parts) {
    left += other.second - other.first;
    if (part->first == part->second || (part != &request->parts[static_cast<std::size_t>(worker)] &&
                                        other.second - other.first > part->second - part->first)) {
      part = other.first < other.second ? &other : part;
    }
  }
  block = part->first++;
  if (left == 1) {
    ready_.erase(ready_.begin());
  }
  request->started_ns = request->started_ns != 0 ? request->started_ns : monotonic_ns();
  out = request;
  return true;
}

void DirectEngine::block_ended(const std::shared_ptr<Request>& request, std::int64_t count) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    request->unfinished -= count;
    if (request->unfinished > 0) {
      return;
    }
  }
  finish(request);
}

void DirectEngine::fail(Request& request, RequestFailure failure) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!request.failure) {
    request.failure = std::move(failure);
  }
  request.unfinished -= request.drop();  // the failing block itself still counts: the caller ends it
  ready_.erase({-request.priority, request.id});
}

// All blocks have ended. By one thread, without mutex_.
void DirectEngine::finish(const std::shared_ptr<Request>& request) {
  bool cancelled = false;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    cancelled = request->cancelled;
  }
  const char* op = request->write ? "write" : "read";
  try {
    if (request->write) {
      finish_write(*request, cancelled);
    } else if (!cancelled && !request->failure && !finish_read(*request)) {
      std::lock_guard<std::mutex> guard(mutex_);
      ++statistics_.reread;
      plan(*request);
      split(*request);
      make_ready(request);
      wake_workers();
      return;
    }
  } catch (const StorageFailure& error) {
    fail(*request, {request->id, op, request->key, error.device, error.offset, error.expected, error.got, error.error,
                    error.reason});
  } catch (const std::exception& error) {
    fail(*request, {request->id, op, request->key, store_->devices()[0]->path(), 0, request->bytes, 0, 0,
                    error.what()});
  }
  std::lock_guard<std::mutex> guard(mutex_);
  const bool failed = request->failure.has_value();
  ++statistics_.requests;
  statistics_.failed += failed ? 1 : 0;
  statistics_.cancelled += cancelled && !failed ? 1 : 0;
  if (options_.trace && trace_.size() < kTraceRows) {
    trace_.push_back({request->id, request->write, request->key, request->bytes, request->priority,
                      request->submitted_ns, request->started_ns, monotonic_ns(),
                      failed ? "failed" : (cancelled ? "cancelled" : "ok")});
  }
  if (request->tensor) {
    end_turn(*request, cancelled);
  }
  outcomes_[request->id] = {cancelled && !failed, std::move(request->failure), std::move(request->keep_alive)};
  live_.erase(request->id);
  ended_->notify_all();
  if (stopping_) {
    work_ready_->notify_all();
  }
}

// What a volatile tensor now is, and whose turn it is.
void DirectEngine::end_turn(Request& request, bool cancelled) {
  VolatileTensor& tensor = *request.tensor;
  if (request.write && !cancelled && !request.failure) {
    const bool all = request.bytes == tensor.record.bytes;
    tensor.whole = tensor.whole || all;
    tensor.record.checksum = all ? request.record.checksum : std::nullopt;
    tensor.record.generation += 1;
    if (all) {
      tensor.record.dtype = std::move(request.record.dtype);
      tensor.record.shape = std::move(request.record.shape);
    }
  } else if (request.write && request.started_ns != 0) {
    tensor.whole = false;
  }
  const std::vector<std::uint64_t> next = tensor.turns.leave(request.id);
  for (const std::uint64_t id : next) {
    make_ready(live_.at(id));
  }
  if (!next.empty()) {
    wake_workers();
  }
}

std::uint32_t DirectEngine::joined_checksum(const Request& request) {
  std::uint32_t sum = 0;
  for (std::size_t order = 0; order < request.checksums.size(); ++order) {
    sum = crc32c_join(sum, request.checksums[order], static_cast<std::uint64_t>(request.lengths[order]));
  }
  return sum;
}

void DirectEngine::finish_write(Request& request, bool cancelled) {
  if (cancelled || request.failure) {
    if (!request.tensor) {
      store_->release(request.reservation);
    }
    return;
  }
  if (request.summed) {
    request.record.checksum = joined_checksum(request);
  }
  if (request.tensor) {
    return;
  }
  (void)store_->install(request.key, std::move(request.record), request.reservation);
}

// False: the tensor has been written meanwhile, and its old space perhaps been used again; the request now knows the
// new one and is to be read once more.
bool DirectEngine::finish_read(Request& request) {
  if (request.tensor) {
    check_volatile_read(request);
    return true;
  }
  const RecordPointer now = store_->find(request.key);
  if (!now || now->bytes < request.offset + request.bytes) {
    throw StorageFailure("read", store_->devices()[0]->path(), 0, request.bytes, 0, 0,
                         "the tensor was erased or made smaller while it was read");
  }
  if (now->generation != request.record.generation) {
    if (++request.rereads > kRereads) {
      throw StorageFailure("read", store_->devices()[0]->path(), 0, request.bytes, 0, 0,
                           "the tensor is written faster than it can be read");
    }
    request.record = *now;
    request.summed = request.summed && now->checksum && now->bytes == request.bytes;
    return false;
  }
  if (request.summed) {
    compare_checksum(request, *request.record.checksum);
  }
  return true;
}

void DirectEngine::compare_checksum(const Request& request, std::uint32_t expected) const {
  if (const std::uint32_t sum = joined_checksum(request); sum != expected) {
    const Extent where = request.record.extents.empty() ? Extent{} : request.record.extents[0];
    throw StorageFailure("read", store_->devices()[where.member]->path(), where.offset, request.bytes, request.bytes, 0,
                         "checksum " + std::to_string(sum) + " where the index has " + std::to_string(expected));
  }
}

// It ran in its turn: the tensor is what the writes before it have left.
void DirectEngine::check_volatile_read(const Request& request) const {
  bool whole = false;
  std::optional<std::uint32_t> checksum;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    whole = request.tensor->whole;
    checksum = request.tensor->record.checksum;
  }
  if (!whole && request.bytes > 0) {
    const Extent where = request.record.extents[0];
    throw StorageFailure("read", store_->devices()[where.member]->path(), where.offset, request.bytes, 0, 0,
                         "the last write of this tensor failed or was cancelled under way: write all of it again");
  }
  if (request.summed && checksum) {
    compare_checksum(request, *checksum);
  }
}

bool DirectEngine::cancel(std::uint64_t id) {
  require_own_process();
  std::shared_ptr<Request> request;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = live_.find(id);
    if (found == live_.end() || found->second->unfinished == 0) {
      return false;
    }
    request = found->second;
    request->cancelled = true;
    request->unfinished -= request->drop();
    ready_.erase({-request->priority, id});
    if (request->unfinished > 0) {
      return true;
    }
  }
  finish(request);
  return true;
}

namespace {

// Waits on `condition`; false: the time is up.
template <typename Done>
bool wait_on(std::condition_variable& condition, std::unique_lock<std::mutex>& guard, double seconds, Done done) {
  if (seconds < 0) {
    condition.wait(guard, done);
    return true;
  }
  return condition.wait_for(guard, std::chrono::duration<double>(std::min(seconds, 1e6)), done);
}

}  // namespace

std::optional<RequestOutcome> DirectEngine::wait_for(std::uint64_t id, double seconds) {
  require_own_process();
  std::unique_lock<std::mutex> guard(mutex_);
  const bool ended = wait_on(*ended_, guard, seconds, [&] { return !live_.contains(id); });
  if (!ended) {
    return std::nullopt;
  }
  const auto found = outcomes_.find(id);
  if (found == outcomes_.end()) {
    throw Error(ErrorKind::kInvalidArgument,
                "storage engine: request " + std::to_string(id) + " is unknown, or has been waited for");
  }
  RequestOutcome out = std::move(found->second);
  outcomes_.erase(found);
  return out;
}

std::optional<std::vector<std::pair<std::uint64_t, RequestOutcome>>> DirectEngine::wait(double seconds) {
  require_own_process();
  std::unique_lock<std::mutex> guard(mutex_);
  if (!wait_on(*ended_, guard, seconds, [&] { return live_.empty(); })) {
    return std::nullopt;
  }
  std::vector<std::pair<std::uint64_t, RequestOutcome>> out;
  for (auto& [id, outcome] : outcomes_) {
    out.emplace_back(id, std::move(outcome));
  }
  outcomes_.clear();
  return out;
}

bool DirectEngine::register_buffer(void* data, std::int64_t bytes, std::shared_ptr<void> keep_alive) {
  require_own_process();
  std::lock_guard<std::mutex> one_at_a_time(register_mutex_);
  std::unique_lock<std::mutex> guard(mutex_);
  const auto piece = static_cast<std::int64_t>(AioBackend::kBufferBytes);
  const std::int64_t pieces = (bytes + piece - 1) / piece;
  if (bytes <= 0 || stopping_ || kind_ != AioKind::kUring || next_region_ + pieces > AioBackend::kBuffers) {
    return false;
  }
  candidates_.clear();
  for (std::int64_t at = 0; at < bytes; at += piece) {
    candidates_.push_back({static_cast<char*>(data) + at, std::min(piece, bytes - at), next_region_++});
  }
  region_owners_.push_back(std::move(keep_alive));  // also if only some rings took it
  regions_good_ = true;
  regions_answers_ = 0;
  ++regions_version_;
  ++work_version_;
  work_ready_->notify_all();
  for (const auto& worker : workers_) {
    worker->wake();
  }
  ended_->wait(guard, [&] { return regions_answers_ == options_.workers; });
  if (regions_good_) {
    regions_.insert(regions_.end(), candidates_.begin(), candidates_.end());
  }
  return regions_good_;
}

std::int64_t DirectEngine::pending() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return static_cast<std::int64_t>(live_.size());
}

IoStatistics DirectEngine::statistics() const {
  IoStatistics out;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    out = statistics_;
  }
  for (const auto& worker : workers_) {
    worker->add_statistics(out);
  }
  out.mean_queue_depth /= static_cast<double>(std::max<std::int64_t>(1, out.commands));
  return out;
}

std::vector<TraceRow> DirectEngine::drain_trace() {
  std::lock_guard<std::mutex> guard(mutex_);
  return std::exchange(trace_, {});
}

}  // namespace memascend

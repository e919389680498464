#include "direct_engine.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

#include "clock.h"
#include "direct_request.h"
#include "direct_worker.h"
#include "engine_threads.h"
#include "errors.h"

namespace memascend {
namespace {

constexpr int kMaxWorkers = 64;
constexpr int kMaxDepth = 1024;
// Size of blocks that go through a bounce buffer. It is small to keep those buffers small. They are needed because
// slices of DeepSpeed's buffers may be unaligned (after a bias that ends at an odd address), although the buffers
// themselves are aligned.
constexpr std::int64_t kBouncedBlockBytes = 64 << 10;

}  // namespace

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
  for (int number = 0; number < options_.workers; ++number) {
    workers_.push_back(std::make_unique<Worker>(*this, number));
  }
  start_threads();
}

// Each thread makes its own ring, since a ring belongs to the thread that makes it. Returns or throws after all have
// tried.
void DirectEngine::start_threads() {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(options_.workers));
  int started = 0;
  const auto body = [this, &errors, &started](int number) {
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
      answered_->notify_all();
    }
    if (!error) {
      worker.run();
    }
  };
  try {
    memascend::start_threads("storage engine", *threads_, options_.workers, calls_, body);
    {
      std::unique_lock<std::mutex> guard(mutex_);
      answered_->wait(guard, [&] { return started == options_.workers; });
    }
    for (const std::exception_ptr& error : errors) {
      if (error) {
        std::rethrow_exception(error);
      }
    }
  } catch (...) {
    stop_threads();
    throw;
  }
}

DirectEngine::~DirectEngine() { shutdown(); }

void DirectEngine::refuse() {
  require_own_process();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
    ++work_version_;
  }
  work_ready_->notify_all();
  answered_->notify_all();
}

void DirectEngine::stop_threads() {
  refuse();
  for (std::thread& thread : *threads_) {
    thread.join();
  }
  threads_->clear();
}

void DirectEngine::shutdown() {
  std::lock_guard<std::mutex> guard(shutdown_mutex_);
  if (getpid() != owner_pid_) {
    (void)threads_.release();  // the threads and their resources belong to the parent
    threads_ = std::make_unique<std::vector<std::thread>>();
    for (auto& worker : workers_) {
      (void)worker.release();
    }
    workers_.clear();
    (void)work_ready_.release();
    (void)answered_.release();
    completions_.abandon_waiters();
    return;
  }
  if (!threads_->empty()) {
    stop_threads();
  }
}

std::int64_t DirectEngine::bounced_block_bytes() const noexcept {
  return std::min(options_.block_bytes, kBouncedBlockBytes);
}

std::vector<std::pair<std::uintptr_t, std::int64_t>> DirectEngine::bounce_buffers() const {
  std::vector<std::pair<std::uintptr_t, std::int64_t>> found;
  for (const auto& worker : workers_) {
    const SectorBuffer& buffer = worker->bounces();
    found.emplace_back(reinterpret_cast<std::uintptr_t>(buffer.data()), buffer.bytes());
  }
  return found;
}

void DirectEngine::require_own_process() const {
  if (getpid() != owner_pid_) {
    throw Error(ErrorKind::kState,
                "storage engine: made before the fork, its threads and rings are the parent's: "
                "make one in each process");
  }
}

std::string DirectEngine::buffered_path() const {
  for (const auto& device : store_->devices()) {
    if (!device->direct()) {
      return device->path();
    }
  }
  return "";
}

// Divides [offset, offset + bytes) of the tensor into blocks. Partial sectors at either end become separate blocks; the
// rest is divided into pieces of `block_bytes`, or smaller ones if they need bounce buffers. The blocks are then
// ordered so that the devices alternate in proportion to their share of the blocks.
void DirectEngine::plan(Request& request) const {
  request.blocks.clear();
  std::int64_t extent_begin = 0;
  for (const Extent& extent : request.record.extents) {
    std::int64_t from = std::max(request.offset, extent_begin);
    const std::int64_t to = std::min(request.offset + request.bytes, extent_begin + extent.bytes);
    while (from < to) {
      const std::int64_t offset = extent.offset + from - extent_begin;
      char* data = request.data + (from - request.offset);
      const bool aligned = store_->devices()[extent.member]->takes(data);
      std::int64_t bytes = std::min(to - from, aligned ? options_.block_bytes : bounced_block_bytes());
      if (offset % kSectorBytes != 0) {
        bytes = std::min(to - from, kSectorBytes - offset % kSectorBytes);
      } else if (bytes > kSectorBytes) {
        bytes = sector_down(bytes);
      }
      request.blocks.push_back({extent.member, offset, data, bytes, static_cast<std::uint32_t>(request.blocks.size())});
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
    std::vector<std::pair<double, std::size_t>> order;
    for (std::size_t index = 0; index < request.blocks.size(); ++index) {
      const std::uint32_t member = request.blocks[index].member;
      order.emplace_back((seen[member] + 0.5) / count[member], index);
      seen[member] += 1;
    }
    std::sort(order.begin(), order.end());
    std::vector<Block> sorted;
    sorted.reserve(order.size());
    for (const auto& [share, index] : order) {
      sorted.push_back(request.blocks[index]);
    }
    request.blocks = std::move(sorted);
  }
}

// Divides the blocks into equal parts, one per worker.
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
  ready_[request->write ? 1 : 0][{-request->priority, request->id}] = request;
  ++work_version_;
}

std::uint64_t DirectEngine::enqueue(const std::shared_ptr<Request>& request) {
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
    completions_.begin(id);
    (request->write ? writing_ : reading_).begin(request->submitted_ns);
    empty = request->blocks.empty();
    if (!empty && (!request->tensor || request->tensor->queue.join(id, request->write))) {
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
    return enqueue(request);
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
std::uint64_t DirectEngine::read(const std::string& key, void* data, std::int64_t bytes, std::int64_t offset,
                                 int priority, std::shared_ptr<void> keep_alive) {
  require_own_process();
  const std::shared_ptr<VolatileTensor> tensor = volatile_tensor(key);
  const RecordPointer record = options_.is_volatile ? record_of(tensor) : store_->find(key);
  if (!record) {
    throw Error(ErrorKind::kInvalidArgument, "read of '" + key + "': no such tensor on " +
                                                 store_->devices()[0]->path() +
                                                 ": write it, and wait for the write, first");
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
  return enqueue(request);
}

// Finds the next block for a worker: from its own part, else from the longest one. Returns false if there is none.
bool DirectEngine::take_block(int worker, bool rather_write, std::shared_ptr<Request>& out, std::size_t& block) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto& [reads, writes] = ready_;
  if (reads.empty() && writes.empty()) {
    return false;
  }
  bool write = reads.empty();
  if (!reads.empty() && !writes.empty()) {  // keys contain the negative of the priority
    const std::int64_t of_reads = reads.begin()->first.first;
    const std::int64_t of_writes = writes.begin()->first.first;
    write = of_reads == of_writes ? rather_write : of_writes < of_reads;
  }
  Ready& ready = ready_[write ? 1 : 0];
  const std::shared_ptr<Request> request = ready.begin()->second;
  auto* part = &request->parts[static_cast<std::size_t>(worker)];
  std::size_t left = 0;
  for (auto& other : request->parts) {
    left += other.second - other.first;
    if (part->first == part->second || (part != &request->parts[static_cast<std::size_t>(worker)] &&
                                        other.second - other.first > part->second - part->first)) {
      part = other.first < other.second ? &other : part;
    }
  }
  if (left <= 1) {
    ready.erase(ready.begin());
  }
  if (left == 0) {  // cannot happen: what has no blocks to hand out is not in `ready_`
    return false;
  }
  block = part->first++;
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

std::optional<RequestOutcome> DirectEngine::wait_for(std::uint64_t request, double seconds) {
  require_own_process();
  std::unique_lock<std::mutex> lock(mutex_);
  return completions_.wait_for(lock, request, seconds);
}

std::optional<std::vector<EndedRequest>> DirectEngine::wait(double seconds) {
  require_own_process();
  std::unique_lock<std::mutex> lock(mutex_);
  return completions_.wait(lock, seconds);
}

std::vector<EndedRequest> DirectEngine::take_ended() {
  require_own_process();
  std::lock_guard<std::mutex> guard(mutex_);
  return completions_.take();
}

int DirectEngine::completion_fd() {
  require_own_process();
  std::lock_guard<std::mutex> guard(mutex_);
  return completions_.fd();
}

bool DirectEngine::register_buffer(void* data, std::int64_t bytes, std::shared_ptr<void> keep_alive) {
  require_own_process();
  std::lock_guard<std::mutex> one_at_a_time(register_mutex_);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const auto piece = static_cast<std::int64_t>(AioBackend::kBufferBytes);
  const auto pieces = static_cast<std::size_t>((bytes + piece - 1) / piece);
  if (const auto known = registered_.find(begin); known != registered_.end()) {
    return known->second.bytes == bytes;
  }
  if (bytes <= 0 || stopping_ || kind_ != AioKind::kUring || regions_.size() + pieces > AioBackend::kBuffers) {
    return false;
  }
  std::array<bool, AioBackend::kBuffers> used{};
  for (const auto& [address, region] : regions_) {
    used[static_cast<std::size_t>(region.index)] = true;
  }
  int index = 0;
  for (std::int64_t at = 0; at < bytes; at += piece) {
    while (used[static_cast<std::size_t>(index)]) {
      ++index;
    }
    regions_[begin + static_cast<std::uintptr_t>(at)] = {std::min(piece, bytes - at), index++};
  }
  auto fork_guard = std::make_unique<ForkGuard>(data, bytes);
  if (!apply_regions(lock)) {
    drop_regions(begin, bytes);
    (void)apply_regions(lock);  // removes it from the rings that had accepted it
    return false;
  }
  registered_[begin] = {bytes, std::move(keep_alive), std::move(fork_guard)};
  return true;
}

std::shared_ptr<void> DirectEngine::unregister_buffer(void* data) {
  require_own_process();
  std::lock_guard<std::mutex> one_at_a_time(register_mutex_);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = registered_.find(reinterpret_cast<std::uintptr_t>(data));
  if (found == registered_.end()) {
    return nullptr;
  }
  drop_regions(found->first, found->second.bytes);
  (void)apply_regions(lock);
  std::shared_ptr<void> owner = std::move(found->second.keep_alive);
  registered_.erase(found);
  return owner;
}

void DirectEngine::drop_regions(std::uintptr_t begin, std::int64_t bytes) {
  regions_.erase(regions_.lower_bound(begin), regions_.lower_bound(begin + static_cast<std::uintptr_t>(bytes)));
}

// Waits until each worker has brought its ring's table up to date. Returns false if a ring has refused, or if the
// engine ends: a worker that has ended does not answer, but submits no transfers either.
bool DirectEngine::apply_regions(std::unique_lock<std::mutex>& lock) {
  regions_good_ = true;
  regions_answers_ = 0;
  ++regions_version_;
  ++work_version_;
  wake_workers();
  answered_->wait(lock, [&] { return stopping_ || regions_answers_ == options_.workers; });
  return !stopping_ && regions_good_;
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
    out.reading_s = reading_.seconds(monotonic_ns());
    out.writing_s = writing_.seconds(monotonic_ns());
  }
  for (const auto& worker : workers_) {
    worker->add_statistics(out);
  }
  out.finish();
  return out;
}

std::vector<TraceRow> DirectEngine::drain_trace() {
  std::lock_guard<std::mutex> guard(mutex_);
  return std::exchange(trace_, {});
}

}  // namespace memascend

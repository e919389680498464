// The direct NVMe engine: reads and writes tensors by name on the devices of a store, asynchronously.
//
// A request is divided into blocks, which alternate between the devices that the tensor is striped over. The blocks are
// divided into equal parts, one per worker; a worker that has finished its part helps the others. Each worker owns a
// ring. Blocks of the requests with the highest priority go first; among these, reads and writes share a ring evenly,
// so that a device that can do both at once does. Memory or lengths that O_DIRECT does not accept go through bounce
// buffers.
//
// The tensors of a volatile engine end with it, and a new version overwrites the old one in place: see `write`.
//
// Source: MemAscend, section IV-E. There the location dictionary and the allocator exist only in memory; here they are
// the store's index, so that a tensor can be found again after a crash.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "aio.h"
#include "completion.h"
#include "fork_guard.h"
#include "io_statistics.h"
#include "store.h"
#include "volatile_tensor.h"

namespace memascend {

enum class Checksums { kOff, kWrite, kFull };  // kWrite: stored in the index; kFull: also compared on whole reads

struct EngineOptions {
  int workers = 1;
  std::int64_t block_bytes = 1 << 20;
  int depth = 16;  // commands in the kernel per worker
  std::string backend = "auto";
  Checksums checksums = Checksums::kFull;
  bool trace = false;
  bool is_volatile = false;  // for swapping: tensors are written in place and end with the engine
};

struct TraceRow {
  std::uint64_t request = 0;
  bool write = false;
  std::string key;
  std::int64_t bytes = 0;
  int priority = 0;
  std::int64_t submitted_ns = 0;
  std::int64_t started_ns = 0;  // when the first block was handed to a worker
  std::int64_t ended_ns = 0;
  const char* status = "";
};

// Thread-safe. A buffer must stay alive and, for reads, must not be accessed until its request has been waited for.
// Requests are not ordered, except that of two writes to one key the later one wins. Not usable in a forked child.
class DirectEngine {
 public:
  // Throws Error or StorageFailure.
  DirectEngine(std::shared_ptr<Store> store, EngineOptions options, IoSyscalls& calls = kernel_syscalls());
  ~DirectEngine();
  DirectEngine(const DirectEngine&) = delete;
  DirectEngine& operator=(const DirectEngine&) = delete;

  // Begins to write a tensor and returns the request's number. Throws StorageFailure (ENOSPC) and Error before it has
  // begun anything: the tensor under `key` is then unchanged.
  //
  // Volatile: if the tensor under `key` has the same size, it is overwritten in place. A tensor of another size takes
  // the old one's space, or separate space while requests still use the old one. Requests on one key run in the order
  // of submission (reads may run concurrently). If a write fails or is cancelled in flight, the tensor is neither the
  // old nor the new one, and reads of it fail until it is written again.
  std::uint64_t write(const std::string& key, const void* data, TensorRecord record, int priority,
                      std::shared_ptr<void> keep_alive = nullptr);
  // Volatile only: overwrites bytes [offset, offset + bytes) of a tensor. These are whole sectors, except at the
  // tensor's end. Throws Error if there is no such tensor or range.
  std::uint64_t write_part(const std::string& key, const void* data, std::int64_t bytes, std::int64_t offset,
                           int priority, std::shared_ptr<void> keep_alive = nullptr);
  // Begins to read bytes [offset, offset + bytes) of the tensor and returns the request's number. Throws Error if there
  // is no such tensor or range.
  std::uint64_t read(const std::string& key, void* data, std::int64_t bytes, std::int64_t offset, int priority,
                     std::shared_ptr<void> keep_alive = nullptr);

  // Drops the blocks that have not gone to a worker. Returns false if the request has ended already. The request still
  // has to be waited for. A cancelled write changes nothing (for a volatile engine, see `write`).
  bool cancel(std::uint64_t request);

  // Find or list the tensors of this engine: a volatile engine's own, otherwise those of the store.
  [[nodiscard]] RecordPointer find(const std::string& key);
  [[nodiscard]] std::vector<std::pair<std::string, RecordPointer>> list();
  // Returns false if there is no such tensor.
  bool erase(const std::string& key);

  // See Completions. Requests may end, and be reported, in another order than that of their submission.
  [[nodiscard]] std::optional<RequestOutcome> wait_for(std::uint64_t request, double seconds);
  [[nodiscard]] std::optional<std::vector<EndedRequest>> wait(double seconds);
  [[nodiscard]] std::vector<EndedRequest> take_ended();
  [[nodiscard]] int completion_fd();

  // Pins memory in the rings, so that transfers from and to it need no page look-up. Until `unregister_buffer` or the
  // end of the engine, it keeps `keep_alive`, and forked children do not get the memory (ForkGuard): a child that
  // touches it ends by SIGSEGV. Returns false if pinning is not possible here (libaio, limits); transfers work
  // nevertheless.
  bool register_buffer(void* data, std::int64_t bytes, std::shared_ptr<void> keep_alive);
  // Undoes `register_buffer` for the same `data`. When it returns, the memory is in no ring's table any more; requests
  // in flight still complete. Returns the buffer's `keep_alive`, or null if it was not registered.
  std::shared_ptr<void> unregister_buffer(void* data);

  // Makes further submissions fail; requests already submitted continue.
  void refuse();
  // Completes all requests, then ends the workers. Idempotent. In a forked child it only gives up the parent's threads.
  void shutdown();

  [[nodiscard]] AioKind backend() const noexcept { return kind_; }
  [[nodiscard]] Store& store() noexcept { return *store_; }
  // Returns the first device or file that is used through the page cache because its file system refuses O_DIRECT, or
  // an empty string.
  [[nodiscard]] std::string buffered_path() const;
  [[nodiscard]] std::int64_t pending() const;
  [[nodiscard]] IoStatistics statistics() const;
  [[nodiscard]] std::vector<TraceRow> drain_trace();
  // Returns (address, bytes) of each bounce buffer: memory for transfers that O_DIRECT does not accept as they are. It
  // is resident from the start.
  [[nodiscard]] std::vector<std::pair<std::uintptr_t, std::int64_t>> bounce_buffers() const;

 private:
  struct Block;
  struct Request;
  class Worker;
  struct Region {  // memory in one slot of the rings' tables, at most 1 GiB
    std::int64_t bytes;
    int index;
    bool operator==(const Region&) const = default;
  };
  using Regions = std::map<std::uintptr_t, Region>;  // by address
  struct Registration {
    std::int64_t bytes = 0;
    std::shared_ptr<void> keep_alive;
    std::unique_ptr<ForkGuard> fork_guard;
  };

  std::uint64_t enqueue(const std::shared_ptr<Request>& request);
  void plan(Request& request) const;
  void split(Request& request) const;
  void make_ready(const std::shared_ptr<Request>& request);  // with mutex_
  [[nodiscard]] std::shared_ptr<VolatileTensor> volatile_tensor(const std::string& key) const;
  [[nodiscard]] RecordPointer record_of(const std::shared_ptr<VolatileTensor>& tensor) const;
  [[nodiscard]] std::shared_ptr<VolatileTensor> place_volatile(const std::string& key, const TensorRecord& record);
  void leave_queue(Request& request, bool cancelled);  // with mutex_
  void require_own_process() const;
  [[nodiscard]] bool apply_regions(std::unique_lock<std::mutex>& lock);
  void drop_regions(std::uintptr_t begin, std::int64_t bytes);  // with mutex_
  [[nodiscard]] std::int64_t bounced_block_bytes() const noexcept;
  [[nodiscard]] bool take_block(int worker, bool rather_write, std::shared_ptr<Request>& request, std::size_t& block);
  void block_ended(const std::shared_ptr<Request>& request, std::int64_t count);
  void finish(const std::shared_ptr<Request>& request);
  bool finish_read(Request& request);
  void check_volatile_read(const Request& request) const;
  void compare_checksum(const Request& request, std::uint32_t expected) const;
  void finish_write(Request& request, bool cancelled);
  [[nodiscard]] static std::uint32_t joined_checksum(const Request& request);
  void wake_workers();
  void start_threads();
  void stop_threads();
  void fail(Request& request, RequestFailure failure);

  const std::shared_ptr<Store> store_;
  const EngineOptions options_;
  IoSyscalls& calls_;
  const AioKind kind_;
  const pid_t owner_pid_;

  mutable std::mutex mutex_;
  // On the heap so that a forked child can leak them: destroying one waits for its waiters, which are threads of the
  // parent.
  std::unique_ptr<std::condition_variable> work_ready_ = std::make_unique<std::condition_variable>();
  std::unique_ptr<std::condition_variable> answered_ = std::make_unique<std::condition_variable>();
  // Requests with blocks to hand out, reads [0] and writes [1]: the highest priority first, then the oldest.
  using Ready = std::map<std::pair<std::int64_t, std::uint64_t>, std::shared_ptr<Request>>;
  std::array<Ready, 2> ready_;
  std::map<std::uint64_t, std::shared_ptr<Request>> live_;
  Completions completions_;
  BusyTime reading_;
  BusyTime writing_;
  std::map<std::string, std::shared_ptr<VolatileTensor>> volatile_;
  Regions regions_;  // desired contents of each ring's table
  std::map<std::uintptr_t, Registration> registered_;  // by address
  std::uint64_t regions_version_ = 0;
  int regions_answers_ = 0;
  bool regions_good_ = true;
  std::vector<TraceRow> trace_;
  IoStatistics statistics_;
  std::uint64_t next_id_ = 1;
  std::atomic<std::uint64_t> work_version_{0};
  bool stopping_ = false;

  std::mutex shutdown_mutex_;
  std::mutex register_mutex_;
  // On the heap for the same reason.
  std::vector<std::unique_ptr<Worker>> workers_;
  std::unique_ptr<std::vector<std::thread>> threads_;
};

}  // namespace memascend

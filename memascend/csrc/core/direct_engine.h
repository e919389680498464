// The direct NVMe engine: reads and writes tensors by name on the devices of a store, asynchronously.
//
// A request is cut into blocks, which alternate between the devices it is striped over, and the blocks into one equal
// part a worker; a worker that has finished its part helps the others. Each worker owns a ring of its own. Blocks of
// the requests with the highest priority go first; among these, reads and writes share a ring evenly, so that a device
// which can do both at once does. Memory or lengths that O_DIRECT does not take are bounced.
//
// A volatile engine keeps nothing beyond its own life, and takes no second place for a new version: see `write`.
//
// Source: MemAscend, section IV-E. There the location dictionary and the allocator are memory only; here they are the
// store's index, so that a tensor can be found again after a crash.
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

enum class Checksums { kOff, kWrite, kFull };  // kWrite: kept in the index; kFull: also compared on whole reads

struct EngineOptions {
  int workers = 1;
  std::int64_t block_bytes = 1 << 20;
  int depth = 16;  // commands in the kernel, a worker
  std::string backend = "auto";
  Checksums checksums = Checksums::kFull;
  bool trace = false;
  bool is_volatile = false;  // for swapping: tensors are written in place, and are gone with the engine
};

struct TraceRow {
  std::uint64_t request = 0;
  bool write = false;
  std::string key;
  std::int64_t bytes = 0;
  int priority = 0;
  std::int64_t submitted_ns = 0;
  std::int64_t started_ns = 0;  // the first command went out
  std::int64_t ended_ns = 0;
  const char* status = "";
};

// Thread-safe. A buffer must stay alive and, for reads, untouched until its request has been waited for. Requests are
// not ordered among each other, except that of two writes to one key the later wins. Not usable in a forked child.
class DirectEngine {
 public:
  // Throws Error or StorageFailure.
  DirectEngine(std::shared_ptr<Store> store, EngineOptions options, IoSyscalls& calls = kernel_syscalls());
  ~DirectEngine();
  DirectEngine(const DirectEngine&) = delete;
  DirectEngine& operator=(const DirectEngine&) = delete;

  // Returns the request's number. Throws StorageFailure (ENOSPC) and Error without having begun anything: what `key`
  // had it has still.
  //
  // Volatile: a tensor of the size that `key` has overwrites it in place, one of another size takes the old one's space
  // (if requests use that one, space beside it). Requests on one key then run in the order of submission (reads side by
  // side). If a write fails or is cancelled in flight, the tensor is neither the old nor the new one, and reads of it
  // fail until it is written again.
  std::uint64_t write(const std::string& key, const void* data, TensorRecord record, int priority,
                      std::shared_ptr<void> keep_alive = nullptr);
  // Volatile only: over bytes [offset, offset + bytes) of a tensor, whole sectors but for the tensor's end.
  std::uint64_t write_part(const std::string& key, const void* data, std::int64_t bytes, std::int64_t offset,
                           int priority, std::shared_ptr<void> keep_alive = nullptr);
  // Bytes [offset, offset + bytes) of the tensor. Throws Error if there is no such tensor or range.
  std::uint64_t read(const std::string& key, void* data, std::int64_t bytes, std::int64_t offset, int priority,
                     std::shared_ptr<void> keep_alive = nullptr);

  // What has not gone to the kernel is dropped. False: it has ended already. The request still has to be waited for;
  // a cancelled write changes nothing.
  bool cancel(std::uint64_t request);

  // The tensors of this engine: a volatile engine's own, else the store's.
  [[nodiscard]] RecordPointer find(const std::string& key);
  [[nodiscard]] std::vector<std::pair<std::string, RecordPointer>> list();
  // False: there is none.
  bool erase(const std::string& key);

  // As Completions says. Not ordered: a request that was submitted later may end, and be reported, before another.
  [[nodiscard]] std::optional<RequestOutcome> wait_for(std::uint64_t request, double seconds);
  [[nodiscard]] std::optional<std::vector<EndedRequest>> wait(double seconds);
  [[nodiscard]] std::vector<EndedRequest> take_ended();
  [[nodiscard]] int completion_fd();

  // Pins memory in the rings, so that transfers from and to it need no page look-up. Until `unregister_buffer` or the
  // end of the engine `keep_alive` is held, and forked children do not get the memory (ForkGuard): one that touches it
  // ends by SIGSEGV. False: not possible here (libaio, limits); transfers work all the same.
  bool register_buffer(void* data, std::int64_t bytes, std::shared_ptr<void> keep_alive);
  // When it returns no ring knows the memory any more. `data` as it was registered; empty: it was not. Requests on it
  // that are in flight end as they are.
  std::shared_ptr<void> unregister_buffer(void* data);

  // From here on submissions fail; what was submitted goes on.
  void refuse();
  // Ends all requests, then the workers. Idempotent. In a forked child it only lets go of them.
  void shutdown();

  [[nodiscard]] AioKind backend() const noexcept { return kind_; }
  [[nodiscard]] Store& store() noexcept { return *store_; }
  // The first device or file that is used through the page cache, since its file system refuses O_DIRECT; or none.
  [[nodiscard]] std::string buffered_path() const;
  [[nodiscard]] std::int64_t pending() const;
  [[nodiscard]] IoStatistics statistics() const;
  [[nodiscard]] std::vector<TraceRow> drain_trace();
  // Memory for transfers that O_DIRECT does not take as they are, (address, bytes) of each; resident from the start.
  [[nodiscard]] std::vector<std::pair<std::uintptr_t, std::int64_t>> bounce_buffers() const;

 private:
  struct Block;
  struct Request;
  class Worker;
  struct Region {  // what one slot of the rings' tables holds, at most 1 GiB
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
  // On the heap so that a forked child can let go of them: destroying one waits for its waiters, who are the parent's.
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
  Regions regions_;  // as each ring's table is to be
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
  // As are these.
  std::vector<std::unique_ptr<Worker>> workers_;
  std::unique_ptr<std::vector<std::thread>> threads_;
};

}  // namespace memascend

// Reads and writes whole buffers in plain files by worker threads, bypassing the page cache where the file system
// allows it.
//
// The result of every transfer is checked: a partial one is continued, an interrupted one repeated, and an end of file
// before the last byte is a failure. Any address, length and offset is accepted. Whole 4096-byte file blocks are
// transferred directly, through a bounce buffer if the memory is not aligned as the device demands. The remainders at
// either end go through the page cache (writes) or the bounce buffer (reads).
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "completion.h"
#include "io_statistics.h"
#include "io_syscalls.h"

namespace memascend {

enum class IoOp { kRead, kWrite };

// Thread-safe. A buffer must stay alive and, for reads, must not be accessed until its request has been waited for.
// Requests are not ordered: wait before reading what was written. A file is never truncated; bytes outside the request
// are unchanged.
class FileEngine {
 public:
  // `threads` is in [1, 256] and `block_bytes` a positive multiple of 4096. On a file system that refuses O_DIRECT,
  // requests fail with `require_direct`; otherwise they go through its page cache (see `buffered_path`). Throws Error
  // for invalid arguments, or if the system has no more threads.
  FileEngine(int threads, std::int64_t block_bytes, IoSyscalls& calls = kernel_syscalls(), bool require_direct = false);
  ~FileEngine();  // shutdown()
  FileEngine(const FileEngine&) = delete;
  FileEngine& operator=(const FileEngine&) = delete;

  // Returns the request's number. Files are opened by the workers, few at a time, so an invalid path is reported by the
  // wait. `keep_alive` (the owner of the buffer) is kept until the outcome is reported.
  std::uint64_t submit(IoOp op, void* data, std::int64_t bytes, std::string path, std::int64_t offset,
                       std::shared_ptr<void> keep_alive = nullptr);

  // Drops the blocks that no worker has taken. Returns false if the request has ended already. It still has to be
  // waited for. A cancelled write leaves the file as it is then: it may have been made, and contain any of the blocks.
  bool cancel(std::uint64_t request);

  // See Completions.
  [[nodiscard]] std::optional<RequestOutcome> wait_for(std::uint64_t request, double seconds);
  [[nodiscard]] std::optional<std::vector<EndedRequest>> wait(double seconds);
  [[nodiscard]] std::vector<EndedRequest> take_ended();
  [[nodiscard]] int completion_fd();

  // Makes further submissions fail; requests already submitted continue.
  void refuse();
  // Completes all submitted requests, then ends the workers. Later submissions fail; requests that have ended can still
  // be waited for. Idempotent. In a forked child, which has no workers, it only gives up the parent's threads.
  void shutdown();

  [[nodiscard]] std::int64_t pending() const;
  // Returns the path of the oldest request that has not ended, or an empty string.
  [[nodiscard]] std::string pending_path() const;
  [[nodiscard]] IoStatistics statistics() const;
  [[nodiscard]] int threads() const noexcept { return threads_; }
  [[nodiscard]] std::int64_t block_bytes() const noexcept { return block_bytes_; }
  // Returns the first file whose file system has refused O_DIRECT, or an empty string.
  [[nodiscard]] std::string buffered_path() const;
  // Returns the size of all bounce buffers. A worker allocates its buffer when it first needs it.
  [[nodiscard]] std::int64_t bounce_buffer_bytes() const noexcept { return bounce_buffer_bytes_.load(); }

 private:
  struct Request;
  struct Piece;
  class Worker;

  void work();
  void finish_piece(const std::shared_ptr<Request>& request);
  void finish(const std::shared_ptr<Request>& request);
  void require_own_process() const;

  const int threads_;
  const std::int64_t block_bytes_;
  IoSyscalls& calls_;
  const bool require_direct_;
  const pid_t owner_pid_;

  mutable std::mutex mutex_;
  // On the heap so that a forked child can leak it: destroying it waits for its waiters, which are threads of the
  // parent.
  std::unique_ptr<std::condition_variable> work_ready_ = std::make_unique<std::condition_variable>();
  std::deque<std::shared_ptr<Request>> queue_;
  std::map<std::uint64_t, std::shared_ptr<Request>> live_;
  Completions completions_;
  BusyTime reading_;
  BusyTime writing_;
  std::uint64_t next_id_ = 1;
  bool stopping_ = false;

  mutable std::mutex statistics_mutex_;
  IoStatistics statistics_;
  std::string buffered_path_;  // guarded by statistics_mutex_
  std::atomic<int> in_kernel_{0};
  std::atomic<std::int64_t> bounce_buffer_bytes_{0};

  // On the heap so that a forked child can leak it: a joinable std::thread must not be destroyed.
  std::mutex shutdown_mutex_;
  std::unique_ptr<std::vector<std::thread>> workers_;
};

}  // namespace memascend

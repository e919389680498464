// Reads and writes whole buffers in plain files by worker threads, past the page cache where the file system allows.
//
// Every transfer is audited: a partial one is continued, an interrupted one repeated, an end of file before the last
// byte is a failure. Any address, length and offset is accepted: whole 4096-byte file blocks go directly, through a
// bounce buffer if the memory is not aligned as the device demands, and what is left at either end goes through the
// page cache (writes) or the bounce buffer (reads).
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

// Thread-safe. Buffers must stay alive and, for reads, untouched until their request has been waited for. Requests are
// not ordered among each other: wait before reading what was written. A file is never truncated; bytes outside the
// request keep.
class FileEngine {
 public:
  // Throws Error: threads in [1, 256], block_bytes a positive multiple of 4096; or the system has no more threads.
  // `require_direct`: requests on a file system that refuses O_DIRECT fail, where they go through its page cache
  // otherwise (`buffered_path` tells).
  FileEngine(int threads, std::int64_t block_bytes, IoSyscalls& calls = kernel_syscalls(), bool require_direct = false);
  ~FileEngine();  // shutdown()
  FileEngine(const FileEngine&) = delete;
  FileEngine& operator=(const FileEngine&) = delete;

  // Returns the request's number. Files are opened by the workers, few at a time, so a bad path shows up in the wait.
  // `keep_alive` (whatever owns the buffer) is held until the outcome is reported.
  std::uint64_t submit(IoOp op, void* data, std::int64_t bytes, std::string path, std::int64_t offset,
                       std::shared_ptr<void> keep_alive = nullptr);

  // Blocks that no worker has taken are dropped. False: the request has ended already. It still has to be waited for.
  // A cancelled write leaves the file as far as it had come: it may have been made, and hold any of the blocks.
  bool cancel(std::uint64_t request);

  // As Completions says.
  [[nodiscard]] std::optional<RequestOutcome> wait_for(std::uint64_t request, double seconds);
  [[nodiscard]] std::optional<std::vector<EndedRequest>> wait(double seconds);
  [[nodiscard]] std::vector<EndedRequest> take_ended();
  [[nodiscard]] int completion_fd();

  // From here on submissions fail; what was submitted goes on.
  void refuse();
  // Ends all submitted requests, then the workers. Later submissions fail; what has ended can still be waited for.
  // Idempotent. In a forked child, which has no workers, it only lets go of them.
  void shutdown();

  [[nodiscard]] std::int64_t pending() const;
  // Of the oldest request that has not ended; or none.
  [[nodiscard]] std::string pending_path() const;
  [[nodiscard]] IoStatistics statistics() const;
  [[nodiscard]] int threads() const noexcept { return threads_; }
  [[nodiscard]] std::int64_t block_bytes() const noexcept { return block_bytes_; }
  // The first file whose file system has refused O_DIRECT; or none.
  [[nodiscard]] std::string buffered_path() const;
  // Memory held for bouncing: allocated by a worker when it first needs it.
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
  // On the heap so that a forked child can let go of them: destroying one waits for its waiters, who are the parent's.
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

  // On the heap so that a forked child can let go of it: a std::thread object must not die joinable.
  std::mutex shutdown_mutex_;
  std::unique_ptr<std::vector<std::thread>> workers_;
};

}  // namespace memascend

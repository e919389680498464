// Reads and writes whole buffers in plain files by worker threads, past the page cache where the file system allows.
//
// Every transfer is audited: a partial one is continued, an interrupted one repeated, an end of file before the last
// byte is a failure. Any address, length and offset is accepted: whole 4096-byte file blocks go directly, through a
// bounce buffer if the memory is not 512-aligned, and what is left at either end goes through the page cache (writes)
// or the bounce buffer (reads).
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace memascend {

enum class IoOp { kRead, kWrite };

struct IoFailure {
  IoOp op = IoOp::kRead;
  std::string path;
  std::int64_t offset = 0;    // where in the file the failing piece begins
  std::int64_t expected = 0;  // its length in bytes
  std::int64_t got = 0;       // bytes of it that were transferred
  int error = 0;              // errno; 0 for an unexpected end of file
  std::string reason;
};

struct IoWaitResult {
  std::int64_t completed = 0;  // requests that ended since the last wait, failed ones included
  std::vector<IoFailure> failures;
  std::vector<std::shared_ptr<void>> keep_alive;  // of the requests that ended: the caller lets go of them
};

struct IoCounters {
  std::int64_t bytes_read = 0;
  std::int64_t bytes_written = 0;
  std::int64_t ops = 0;             // requests that ended
  std::int64_t bounced_bytes = 0;   // of these, copied through a bounce buffer
  std::int64_t buffered_bytes = 0;  // of these, through the page cache
};

// The system calls, so that a test can stand between the engine and the kernel. All report errors through errno.
struct IoSystemCalls {
  int (*open)(const char* path, int flags, mode_t mode);
  ssize_t (*pread)(int fd, void* data, std::size_t bytes, off_t offset);
  ssize_t (*pwrite)(int fd, const void* data, std::size_t bytes, off_t offset);
  int (*close)(int fd);
};
[[nodiscard]] IoSystemCalls kernel_io_calls();

// Thread-safe. Buffers must stay alive and, for reads, untouched until `wait` returns. Requests are not ordered among
// each other: wait before reading what was written. A file is never truncated; bytes outside the request keep.
class FileEngine {
 public:
  // Throws Error(kInvalidArgument): threads in [1, 256], block_bytes a positive multiple of 4096.
  FileEngine(int threads, std::int64_t block_bytes, IoSystemCalls calls = kernel_io_calls());
  ~FileEngine();  // shutdown()
  FileEngine(const FileEngine&) = delete;
  FileEngine& operator=(const FileEngine&) = delete;

  // Returns the request's number. Files are opened by the workers, few at a time, so a bad path shows up in `wait`.
  // `keep_alive` (whatever owns the buffer) is held until `wait` hands it back.
  std::uint64_t submit(IoOp op, void* data, std::int64_t bytes, std::string path, std::int64_t offset,
                       std::shared_ptr<void> keep_alive = nullptr);

  // Blocks until every submitted request has ended; returns how many did since the last call, and all failures.
  [[nodiscard]] IoWaitResult wait();

  // Ends all submitted requests, then the workers. Later submissions fail; `wait` still reports. Idempotent. In a
  // forked child, which has no workers, it only lets go of them.
  void shutdown();

  [[nodiscard]] std::int64_t pending() const;
  [[nodiscard]] IoCounters counters() const noexcept;
  [[nodiscard]] int threads() const noexcept { return threads_; }
  [[nodiscard]] std::int64_t block_bytes() const noexcept { return block_bytes_; }
  // Memory held for bouncing: allocated by a worker when it first needs it.
  [[nodiscard]] std::int64_t bounce_buffer_bytes() const noexcept { return bounce_buffer_bytes_.load(); }

 private:
  struct Request;
  struct Piece;
  class Worker;

  void work();
  void finish_piece(Request& request);
  void require_own_process() const;

  const int threads_;
  const std::int64_t block_bytes_;
  const IoSystemCalls calls_;
  const pid_t owner_pid_;

  mutable std::mutex mutex_;
  // On the heap so that a forked child can let go of them: destroying one waits for its waiters, who are the parent's.
  std::unique_ptr<std::condition_variable> work_ready_ = std::make_unique<std::condition_variable>();
  std::unique_ptr<std::condition_variable> all_done_ = std::make_unique<std::condition_variable>();
  std::deque<std::shared_ptr<Request>> queue_;
  std::vector<IoFailure> failures_;
  std::vector<std::shared_ptr<void>> finished_keep_alive_;
  std::int64_t unfinished_ = 0;
  std::int64_t completed_ = 0;
  std::uint64_t next_id_ = 1;
  bool stopping_ = false;

  std::atomic<std::int64_t> bytes_read_{0};
  std::atomic<std::int64_t> bytes_written_{0};
  std::atomic<std::int64_t> ops_{0};
  std::atomic<std::int64_t> bounced_bytes_{0};
  std::atomic<std::int64_t> buffered_bytes_{0};
  std::atomic<std::int64_t> bounce_buffer_bytes_{0};

  // On the heap so that a forked child can let go of it: a std::thread object must not die joinable.
  std::mutex shutdown_mutex_;
  std::unique_ptr<std::vector<std::thread>> workers_;
};

}  // namespace memascend

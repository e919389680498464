// Fault injection between the storage engines and the kernel, for tests: errors, short transfers, delays, a device
// that vanishes, a process that is killed at a call. It can also log all writes, from which a test reconstructs what a
// power cut may leave.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "io_syscalls.h"

namespace memascend {

// What happens to matching calls. Calls are counted from the moment the fault is added.
struct Fault {
  std::string op;               // "read", "write", "flush", "any" (of these three), "open", "close" or "thread"
  std::int64_t after = 0;       // number of matching calls that pass unchanged first
  std::int64_t times = -1;      // number of calls changed after that; all if negative
  int error = 0;                // errno that the call fails with, without having moved any bytes
  std::int64_t at_most = -1;    // maximum bytes that the call really moves, rounded up to a multiple of 512
  std::int64_t delay_us = 0;    // delay before the call
  int signal = 0;               // sent to this process: before the call, or after it if `at_most` is set
};

// A header in the log of writes, which is a sequence of them. A write's header is followed by its data.
struct LoggedCall {
  enum Kind : std::uint32_t { kWrite = 1, kWritten = 2, kFlush = 3, kFlushed = 4 };
  std::uint32_t kind = 0;
  std::uint32_t unused = 0;
  std::uint64_t token = 0;  // the same for a write and its end; may be reused after that
  std::int64_t offset = 0;  // for kWrite
  std::int64_t bytes = 0;   // for kWrite: bytes to write; for kWritten: bytes moved, or a negative errno
};
static_assert(sizeof(LoggedCall) == 32);

// Thread-safe. The first fault that matches a call applies to it.
class FaultLayer : public IoSyscalls {
 public:
  ~FaultLayer() override;
  // Throws Error for an unknown op.
  void add(Fault fault);
  void clear();
  // From now on direct transfers fail with EINVAL if their memory is not aligned to `bytes`, as on a device that
  // demands it. `direct_limits` reports the alignment if `reported`; otherwise it reports none, like an old kernel. 0
  // undoes it.
  void demand_alignment(std::uint32_t bytes, bool reported);
  // From now on writes and flushes are also logged to the new file `path`, as `LoggedCall`s. Only for engines with one
  // file and one worker. Throws Error if the file cannot be made.
  void log_writes(const std::string& path);
  [[nodiscard]] std::int64_t injected() const noexcept { return injected_.load(); }
  // Returns the number of calls of this op so far.
  [[nodiscard]] std::int64_t calls(const std::string& op);

  int open(const char* path, int flags, mode_t mode) override;
  int close(int fd) override;  // closes the descriptor even if a fault makes it report an error
  DirectLimits direct_limits(int fd) override;
  ssize_t pread(int fd, void* data, std::size_t bytes, off_t offset) override;
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset) override;
  int fdatasync(int fd) override;
  int prepare(AioCommand& command) override;
  int complete(std::uint64_t token, int result) override;
  std::thread start_thread(std::function<void()> body) override;

 private:
  // Applies a fault before a call: waits, shortens `bytes` and sets `signal`, which the caller sends afterwards.
  // Returns the errno that the call shall fail with, or 0.
  [[nodiscard]] int inject(const std::string& op, std::size_t& bytes, int& signal);
  [[nodiscard]] int inject(const std::string& op);
  void log(LoggedCall call, const void* data = nullptr);

  [[nodiscard]] bool refuses(const void* data) const;

  std::mutex mutex_;
  std::vector<Fault> faults_;
  std::map<std::string, std::int64_t> calls_;
  std::map<std::uint64_t, int> signals_;  // to be sent when a command completes, by its token
  std::mutex log_mutex_;
  std::atomic<int> log_{-1};
  std::atomic<std::uint64_t> next_token_{std::uint64_t{1} << 63};  // for calls without a token
  std::atomic<std::int64_t> injected_{0};
  std::atomic<std::uint32_t> alignment_{0};
  std::atomic<bool> reported_{true};
};

}  // namespace memascend

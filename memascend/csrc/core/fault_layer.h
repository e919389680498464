// Faults between the storage engines and the kernel, for tests: errors, short transfers, delays, a device that
// vanishes, a process that is killed at a call; and a log of all writes, from which a test makes what a power cut
// leaves.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "io_syscalls.h"

namespace memascend {

// What happens to the calls that match. Calls are counted from when the fault was added.
struct Fault {
  std::string op;               // read, write or flush, any of these three, or open, close, thread
  std::int64_t after = 0;       // so many matching calls are let through first
  std::int64_t times = -1;      // then so many are changed, all if negative
  int error = 0;                // errno that the call ends with, without having moved anything
  std::int64_t at_most = -1;    // bytes that the call really moves, rounded up to 512
  std::int64_t delay_us = 0;    // before it goes on
  int signal = 0;  // that this process sends itself: before the call, or after one that `at_most` cut short
};

// What the log of writes holds, one after the other. A write's data follow its header.
struct LoggedCall {
  enum Kind : std::uint32_t { kWrite = 1, kWritten = 2, kFlush = 3, kFlushed = 4 };
  std::uint32_t kind = 0;
  std::uint32_t unused = 0;
  std::uint64_t token = 0;  // the same in a write and its end; free again after that
  std::int64_t offset = 0;  // of a write
  std::int64_t bytes = 0;  // of a write; that moved, or a negative errno, at its end
};
static_assert(sizeof(LoggedCall) == 32);

// Thread-safe. The first fault that matches a call is done to it.
class FaultLayer : public IoSyscalls {
 public:
  ~FaultLayer() override;
  // Throws Error for an unknown op.
  void add(Fault fault);
  void clear();
  // From now on direct transfers whose memory is not at a multiple of `bytes` end with EINVAL, as on a device that
  // demands it; `direct_limits` says so, or (not `told`) says nothing, as an old kernel. 0 undoes it.
  void demand_alignment(std::uint32_t bytes, bool told);
  // From now on writes and flushes go to the new file `path` as well, as `LoggedCall`s; of engines with one file and
  // one worker. Throws Error where it cannot be made.
  void log_writes(const std::string& path);
  [[nodiscard]] std::int64_t injected() const noexcept { return injected_.load(); }
  // How many calls of this op there were.
  [[nodiscard]] std::int64_t calls(const std::string& op);

  int open(const char* path, int flags, mode_t mode) override;
  int close(int fd) override;  // closes, also where it then reports an error
  DirectLimits direct_limits(int fd) override;
  ssize_t pread(int fd, void* data, std::size_t bytes, off_t offset) override;
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset) override;
  int fdatasync(int fd) override;
  int prepare(AioCommand& command) override;
  int complete(std::uint64_t token, int result) override;
  std::thread start_thread(std::function<void()> body) override;

 private:
  // The errno that the call is to end with, or 0; waits, and shortens `bytes`, first. `signal`: to be sent afterwards.
  [[nodiscard]] int inject(const std::string& op, std::size_t& bytes, int& signal);
  [[nodiscard]] int inject(const std::string& op);
  void log(LoggedCall call, const void* data = nullptr);

  [[nodiscard]] bool refuses(const void* data) const;

  std::mutex mutex_;
  std::vector<Fault> faults_;
  std::map<std::string, std::int64_t> calls_;
  std::map<std::uint64_t, int> signals_;  // to be sent with the end of a command, by its token
  std::mutex log_mutex_;
  std::atomic<int> log_{-1};
  std::atomic<std::uint64_t> next_token_{std::uint64_t{1} << 63};  // of calls that have none
  std::atomic<std::int64_t> injected_{0};
  std::atomic<std::uint32_t> alignment_{0};
  std::atomic<bool> told_{true};
};

}  // namespace memascend

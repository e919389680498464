// Faults between the storage engines and the kernel, for tests: errors, short transfers, delays, a device that vanishes.
#pragma once

#include <atomic>
#include <cstdint>
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
};

// Thread-safe. The first fault that matches a call is done to it.
class FaultLayer : public IoSyscalls {
 public:
  // Throws Error for an unknown op.
  void add(Fault fault);
  void clear();
  // From now on direct transfers whose memory is not at a multiple of `bytes` end with EINVAL, as on a device that
  // demands it; `direct_limits` says so, or (not `told`) says nothing, as an old kernel. 0 undoes it.
  void demand_alignment(std::uint32_t bytes, bool told);
  [[nodiscard]] std::int64_t injected() const noexcept { return injected_.load(); }

  int open(const char* path, int flags, mode_t mode) override;
  int close(int fd) override;  // closes, also where it then reports an error
  DirectLimits direct_limits(int fd) override;
  ssize_t pread(int fd, void* data, std::size_t bytes, off_t offset) override;
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset) override;
  int fdatasync(int fd) override;
  int prepare(AioCommand& command) override;
  std::thread start_thread(std::function<void()> body) override;

 private:
  // The errno that the call is to end with, or 0; waits, and shortens `bytes`, first.
  [[nodiscard]] int inject(const std::string& op, std::size_t& bytes);

  [[nodiscard]] bool refuses(const void* data) const;

  std::mutex mutex_;
  std::vector<Fault> faults_;
  std::atomic<std::int64_t> injected_{0};
  std::atomic<std::uint32_t> alignment_{0};
  std::atomic<bool> told_{true};
};

}  // namespace memascend

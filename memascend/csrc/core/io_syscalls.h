// The seam between the storage engines and the kernel: tests derive from it to inject faults and to record writes.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>

namespace memascend {

// One transfer as the kernel sees it. Offset, length and memory obey O_DIRECT; the engine has seen to that.
struct AioCommand {
  bool write = false;
  int file = 0;                // index into the files that the backend was made with
  int buffer = -1;             // registered buffer that holds `data`, or -1
  void* data = nullptr;
  std::uint32_t bytes = 0;
  std::int64_t offset = 0;
  std::uint64_t token = 0;     // handed back with the completion
};

// What direct transfers from and to an open file must obey.
struct DirectLimits {
  bool supported = true;        // false: an open with O_DIRECT may succeed, and is served through the page cache
  std::uint32_t memory = 0;     // addresses are multiples of this; 0: the kernel does not say
  std::uint32_t offset = 0;     // offsets and lengths are
};

// Thread-safe: called by every worker. Errors as the C library reports them: -1 and errno.
class IoSyscalls {
 public:
  IoSyscalls() = default;
  IoSyscalls(const IoSyscalls&) = delete;
  IoSyscalls& operator=(const IoSyscalls&) = delete;
  virtual ~IoSyscalls() = default;

  // io_uring_* and io_* by number.
  virtual long raw(long number, long a, long b, long c, long d, long e, long f);
  virtual int open(const char* path, int flags, mode_t mode);
  virtual int close(int fd);
  virtual DirectLimits direct_limits(int fd);
  virtual ssize_t pread(int fd, void* data, std::size_t bytes, off_t offset);
  virtual ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset);
  virtual int fdatasync(int fd);

  // Before a command goes to the kernel; may shorten it. Nonzero (a negative errno): it completes with that instead.
  virtual int prepare(AioCommand& command);
  // What the kernel reported, and what the engine shall see.
  virtual int complete(std::uint64_t token, int result);

  // Throws std::system_error when the system has no thread to give.
  virtual std::thread start_thread(std::function<void()> body);
};

[[nodiscard]] IoSyscalls& kernel_syscalls();

}  // namespace memascend

// The seam between the storage engine and the kernel: tests derive from it to inject faults and to record writes.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

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

// Thread-safe: called by every worker. Errors as the C library reports them: -1 and errno.
class IoSyscalls {
 public:
  IoSyscalls() = default;
  IoSyscalls(const IoSyscalls&) = delete;
  IoSyscalls& operator=(const IoSyscalls&) = delete;
  virtual ~IoSyscalls() = default;

  // io_uring_* and io_* by number.
  virtual long raw(long number, long a, long b, long c, long d, long e, long f);
  virtual ssize_t pread(int fd, void* data, std::size_t bytes, off_t offset);
  virtual ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset);
  virtual int fdatasync(int fd);

  // Before a command goes to the kernel; may shorten it. Nonzero (a negative errno): it completes with that instead.
  virtual int prepare(AioCommand& command);
  // What the kernel reported, and what the engine shall see.
  virtual int complete(std::uint64_t token, int result);
};

[[nodiscard]] IoSyscalls& kernel_syscalls();

}  // namespace memascend

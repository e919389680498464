// The interface between the storage engines and the kernel. Tests derive from it to inject faults and record writes.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>

namespace memascend {

// One transfer as the kernel sees it. The engine makes sure that offset, length and memory satisfy O_DIRECT.
struct AioCommand {
  bool write = false;
  int file = 0;                // index into the files that the backend was made with
  int buffer = -1;             // registered buffer that contains `data`, or -1
  void* data = nullptr;
  std::uint32_t bytes = 0;
  std::int64_t offset = 0;
  std::uint64_t token = 0;     // returned with the completion
};

// Requirements for direct transfers from and to an open file.
struct DirectLimits {
  bool supported = true;        // false: an open with O_DIRECT may succeed, but transfers use the page cache
  std::uint32_t memory = 0;     // required alignment of addresses; 0 if the kernel does not say
  std::uint32_t offset = 0;     // required alignment of offsets and lengths; 0 if the kernel does not say
};

// Thread-safe: called by every worker. Errors are reported as by the C library: -1 and errno.
class IoSyscalls {
 public:
  IoSyscalls() = default;
  IoSyscalls(const IoSyscalls&) = delete;
  IoSyscalls& operator=(const IoSyscalls&) = delete;
  virtual ~IoSyscalls() = default;

  // Makes a system call by number (io_uring_* and io_*).
  virtual long raw(long number, long a, long b, long c, long d, long e, long f);
  virtual int open(const char* path, int flags, mode_t mode);
  virtual int close(int fd);
  virtual DirectLimits direct_limits(int fd);
  virtual ssize_t pread(int fd, void* data, std::size_t bytes, off_t offset);
  virtual ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset);
  // Allocates blocks of a file, which becomes longer if the range ends past its end. Unlike posix_fallocate, it fails
  // with EOPNOTSUPP if the file system cannot.
  virtual int fallocate(int fd, off_t offset, off_t bytes);
  virtual int fdatasync(int fd);

  // Called before a command goes to the kernel; may shorten it. If the result is not 0 (a negative errno), the command
  // completes with it instead.
  virtual int prepare(AioCommand& command);
  // Called with the result that the kernel reported; returns the result that the engine shall see.
  virtual int complete(std::uint64_t token, int result);

  // Throws std::system_error if the system cannot start another thread.
  virtual std::thread start_thread(std::function<void()> body);
};

[[nodiscard]] IoSyscalls& kernel_syscalls();

}  // namespace memascend

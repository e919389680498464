#include "io_syscalls.h"

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace memascend {

long IoSyscalls::raw(long number, long a, long b, long c, long d, long e, long f) {
  return ::syscall(number, a, b, c, d, e, f);
}
int IoSyscalls::open(const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }
int IoSyscalls::close(int fd) { return ::close(fd); }
ssize_t IoSyscalls::pread(int fd, void* data, std::size_t bytes, off_t offset) {
  return ::pread(fd, data, bytes, offset);
}
ssize_t IoSyscalls::pwrite(int fd, const void* data, std::size_t bytes, off_t offset) {
  return ::pwrite(fd, data, bytes, offset);
}
int IoSyscalls::fallocate(int fd, off_t offset, off_t bytes) { return ::fallocate(fd, 0, offset, bytes); }
int IoSyscalls::fdatasync(int fd) { return ::fdatasync(fd); }
int IoSyscalls::prepare(AioCommand&) { return 0; }
int IoSyscalls::complete(std::uint64_t, int result) { return result; }
std::thread IoSyscalls::start_thread(std::function<void()> body) { return std::thread(std::move(body)); }

IoSyscalls& kernel_syscalls() {
  static IoSyscalls calls;
  return calls;
}

}  // namespace memascend

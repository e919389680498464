#include "io_syscalls.h"

#include <unistd.h>

namespace memascend {

long IoSyscalls::raw(long number, long a, long b, long c, long d, long e, long f) {
  return ::syscall(number, a, b, c, d, e, f);
}
ssize_t IoSyscalls::pread(int fd, void* data, std::size_t bytes, off_t offset) {
  return ::pread(fd, data, bytes, offset);
}
ssize_t IoSyscalls::pwrite(int fd, const void* data, std::size_t bytes, off_t offset) {
  return ::pwrite(fd, data, bytes, offset);
}
int IoSyscalls::fdatasync(int fd) { return ::fdatasync(fd); }
int IoSyscalls::prepare(AioCommand&) { return 0; }
int IoSyscalls::complete(std::uint64_t, int result) { return result; }

IoSyscalls& kernel_syscalls() {
  static IoSyscalls calls;
  return calls;
}

}  // namespace memascend

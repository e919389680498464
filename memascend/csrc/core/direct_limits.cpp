// The alignment that O_DIRECT needs: from STATX_DIOALIGN (Linux 6.1), else the logical block size of the device, which
// kernels before 6.0 demand of memory addresses too.
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <string>

#include "io_syscalls.h"
#include "text_file.h"

namespace memascend {
namespace {

// The running kernel may be newer than the header; the layout of struct statx is stable.
constexpr unsigned kStatxDioAlign = 0x2000;
constexpr std::size_t kMemoryAt = 152;
constexpr std::size_t kOffsetAt = 156;

// Whether this is a file of an in-memory file system. Newer kernels accept O_DIRECT on these, but copy nevertheless. A
// device node is in such a file system too (devtmpfs), but its data is not.
bool is_in_memory(int fd) {
  struct stat file{};
  if (fstat(fd, &file) != 0 || !S_ISREG(file.st_mode)) {
    return false;
  }
  struct statfs status{};
  if (fstatfs(fd, &status) != 0) {
    return false;
  }
  return status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC || status.f_type == HUGETLBFS_MAGIC;
}

bool ask_statx(int fd, DirectLimits& limits) {
  alignas(8) std::array<char, 256> raw{};
  if (::syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kStatxDioAlign, raw.data()) != 0) {
    return false;
  }
  std::uint32_t mask = 0;
  std::memcpy(&mask, raw.data(), sizeof(mask));
  if ((mask & kStatxDioAlign) == 0) {
    return false;
  }
  std::memcpy(&limits.memory, raw.data() + kMemoryAt, sizeof(limits.memory));
  std::memcpy(&limits.offset, raw.data() + kOffsetAt, sizeof(limits.offset));
  limits.supported = limits.memory != 0;
  return true;
}

// Returns the logical block size of a block device, or of the one under a file system; 0 if there is none (network or
// overlay file systems).
std::uint32_t logical_block_bytes(int fd) {
  struct stat status{};
  if (fstat(fd, &status) != 0) {
    return 0;
  }
  int bytes = 0;
  if (S_ISBLK(status.st_mode)) {
    return ioctl(fd, BLKSSZGET, &bytes) == 0 ? static_cast<std::uint32_t>(bytes) : 0;
  }
  const std::string device =
      "/sys/dev/block/" + std::to_string(major(status.st_dev)) + ":" + std::to_string(minor(status.st_dev));
  for (const char* queue : {"/queue/logical_block_size", "/../queue/logical_block_size"}) {  // a disk, a partition
    if (const long said = std::strtol(text_of(device + queue).c_str(), nullptr, 10); said > 0) {
      return static_cast<std::uint32_t>(said);
    }
  }
  return 0;
}

}  // namespace

DirectLimits IoSyscalls::direct_limits(int fd) {
  DirectLimits limits;
  if (is_in_memory(fd)) {
    limits.supported = false;
  } else if (!ask_statx(fd, limits)) {
    limits.memory = limits.offset = logical_block_bytes(fd);
  }
  return limits;
}

}  // namespace memascend

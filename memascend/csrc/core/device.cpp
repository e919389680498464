#include "device.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace memascend {
namespace {

constexpr off_t kLockByte = off_t{1} << 60;  // far past any data; a locked byte does not have to exist
constexpr std::int64_t kZeroBytes = 4 << 20;  // of one write that allocates blocks
constexpr int kTries = 1000;                 // for one call that is interrupted or temporarily refused

}  // namespace

StorageFailure::StorageFailure(std::string op, std::string device, std::int64_t offset, std::int64_t expected,
                               std::int64_t got, int error, std::string reason)
    : Error(ErrorKind::kState, op + " of " + device + " at offset " + std::to_string(offset) + ": expected " +
                                   std::to_string(expected) + " bytes, got " + std::to_string(got) + ": " + reason),
      op(std::move(op)),
      device(std::move(device)),
      offset(offset),
      expected(expected),
      got(got),
      error(error),
      reason(std::move(reason)) {}

SectorBuffer::SectorBuffer(std::int64_t bytes)
    : bytes_(sector_up(bytes > 0 ? bytes : 1)),
      data_(static_cast<char*>(
          std::aligned_alloc(static_cast<std::size_t>(kSectorBytes), static_cast<std::size_t>(bytes_)))) {
  if (!data_) {
    throw Error(ErrorKind::kOutOfMemory, "storage engine: no memory for a buffer of " + std::to_string(bytes_) +
                                             " bytes: use smaller blocks or a smaller depth");
  }
  std::memset(data_.get(), 0, static_cast<std::size_t>(bytes_));
}
void SectorBuffer::Free::operator()(char* data) const noexcept { std::free(data); }

Device::Device(std::string path, IoSyscalls& calls, bool read_only, bool require_direct)
    : path_(std::move(path)), calls_(calls) {
  try {
    open((read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC, require_direct);
  } catch (...) {
    if (fd_ >= 0) {
      ::close(fd_);
    }
    throw;
  }
}

void Device::open(int access, bool require_direct) {
  fd_ = calls_.open(path_.c_str(), access | O_DIRECT, 0);
  direct_ = fd_ >= 0;
  const DirectLimits limits = direct_ ? calls_.direct_limits(fd_) : DirectLimits{};
  if ((fd_ < 0 && errno == EINVAL) || (fd_ >= 0 && !limits.supported)) {
    direct_ = false;
    if (require_direct) {
      throw Error(ErrorKind::kState, path_ +
                                         ": its file system refuses O_DIRECT, which this engine requires: use a "
                                         "folder on ext4 or XFS on the SSD itself, or open it without require_direct");
    }
    if (fd_ >= 0) {
      ::close(fd_);
    }
    fd_ = calls_.open(path_.c_str(), access, 0);
  }
  struct stat status{};
  if (fd_ < 0 || fstat(fd_, &status) != 0) {
    const int error = errno;
    throw StorageFailure("open", path_, 0, 0, 0, error, std::strerror(error));
  }
  is_block_ = S_ISBLK(status.st_mode);
  std::uint64_t size = static_cast<std::uint64_t>(status.st_size);
  if ((!is_block_ && !S_ISREG(status.st_mode)) || (is_block_ && ioctl(fd_, BLKGETSIZE64, &size) != 0)) {
    throw StorageFailure("open", path_, 0, 0, 0, EINVAL, "neither a block device nor a regular file");
  }
  if (direct_) {
    if (std::max(limits.memory, limits.offset) > kSectorBytes) {
      throw Error(ErrorKind::kState, path_ + " demands direct transfers in multiples of " +
                                         std::to_string(std::max(limits.memory, limits.offset)) +
                                         " bytes, a store makes them in multiples of 4096: use another device, or a "
                                         "file system with smaller blocks on it");
    }
    memory_alignment_ = std::max(kLeastMemoryAlignment, limits.memory);
  }
  bytes_ = sector_down(static_cast<std::int64_t>(size));
}

Device::~Device() {
  if (locked_by_ == getpid()) {
    (void)lock(F_UNLCK);  // while the kernel tears down a ring, it may keep the descriptor open a little longer
  }
  if (claim_fd_ >= 0) {
    ::close(claim_fd_);
  }
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

void Device::throw_failure(const char* op, ssize_t result, std::int64_t offset, std::int64_t bytes,
                           std::int64_t done) const {
  const int error = result < 0 ? errno : 0;
  throw StorageFailure(op, path_, offset, bytes, done, error,
                       error != 0 ? std::strerror(error) : "the device ends here: it has shrunk or is another one");
}

void Device::read(void* data, std::int64_t bytes, std::int64_t offset) const {
  int tries = 0;
  for (std::int64_t done = 0; done < bytes;) {
    const ssize_t result =
        calls_.pread(fd_, static_cast<char*>(data) + done, static_cast<std::size_t>(bytes - done), offset + done);
    const std::int64_t whole = result > 0 ? (done + result == bytes ? result : sector_down(result)) : 0;
    const bool again = result > 0 || (result < 0 && (errno == EINTR || errno == EAGAIN));
    if (!again || (whole == 0 && ++tries > kTries)) {
      throw_failure("read", result, offset, bytes, done);
    }
    done += whole;
  }
}

void Device::write(const void* data, std::int64_t bytes, std::int64_t offset) const {
  int tries = 0;
  for (std::int64_t done = 0; done < bytes;) {
    const ssize_t result = calls_.pwrite(fd_, static_cast<const char*>(data) + done,
                                         static_cast<std::size_t>(bytes - done), offset + done);
    const std::int64_t whole = result > 0 ? sector_down(result) : 0;
    const bool again = result > 0 || (result < 0 && (errno == EINTR || errno == EAGAIN));
    if (!again || (whole == 0 && ++tries > kTries)) {
      throw_failure("write", result, offset, bytes, done);
    }
    done += whole;
  }
}

void Device::grow(std::int64_t bytes, bool allocate) {
  int error = 0;
  do {
    error = (allocate ? calls_.fallocate(fd_, 0, bytes) : ftruncate(fd_, bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (allocate && (error == EOPNOTSUPP || error == ENOSYS)) {
    append_zeros(bytes);
  } else if (error != 0) {
    throw StorageFailure("grow", path_, bytes_, bytes - bytes_, 0, error, std::strerror(error));
  }
  bytes_ = bytes;
}

// Allocates the blocks from the end of the file to `bytes` by writing them. posix_fallocate does it differently: it
// reads a byte of every block of the range and writes it back. That fails with O_DIRECT, and in the old part of the
// file it would undo transfers in flight.
void Device::append_zeros(std::int64_t bytes) const {
  const SectorBuffer zeros(std::min(bytes - bytes_, kZeroBytes));
  try {
    for (std::int64_t at = bytes_; at < bytes; at += zeros.bytes()) {
      write(zeros.data(), std::min(zeros.bytes(), bytes - at), at);
    }
  } catch (const StorageFailure& failure) {
    (void)!ftruncate(fd_, bytes_);  // gives back what was allocated
    throw StorageFailure("grow", path_, bytes_, bytes - bytes_, 0, failure.error, failure.reason);
  }
}

void Device::flush() const {
  int result = 0;
  do {
    result = calls_.fdatasync(fd_);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    const int error = errno;
    throw StorageFailure("flush", path_, 0, 0, 0, error, std::strerror(error));
  }
}

bool Device::lock(short type) const {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = kLockByte;
  range.l_len = 1;
  return fcntl(fd_, F_OFD_SETLK, &range) == 0;
}

bool Device::claim_alone() {
  if (!lock(F_WRLCK)) {
    return false;
  }
  locked_by_ = getpid();
  if (is_block_) {
    claim_fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_EXCL);
    return claim_fd_ >= 0;
  }
  return true;
}

void Device::share_claim() {
  locked_by_ = getpid();
  (void)lock(F_RDLCK);
  if (is_block_ && claim_fd_ < 0) {  // succeeds for the first user that attaches after the claim's holder has gone
    claim_fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_EXCL);
  }
}

}  // namespace memascend

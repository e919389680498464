// One member of a store: a block device, a loop device or a preallocated file, opened past the page cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "errors.h"
#include "io_syscalls.h"

namespace memascend {

constexpr std::int64_t kSectorBytes = 4096;  // unit of everything on a member; holds for 512- and 4096-byte devices
// Memory at multiples of this goes directly even where the device would take any address: smaller ones make the kernel
// split transfers, and stacked devices (loop, dm-crypt) have refused them.
constexpr std::uint32_t kLeastMemoryAlignment = 512;

[[nodiscard]] inline std::int64_t sector_down(std::int64_t value) { return value & ~(kSectorBytes - 1); }
[[nodiscard]] inline std::int64_t sector_up(std::int64_t value) { return sector_down(value + kSectorBytes - 1); }

// A transfer, flush or index that is not what it should be. `error` is an errno, 0 where the kernel reported none.
class StorageFailure : public Error {
 public:
  StorageFailure(std::string op, std::string device, std::int64_t offset, std::int64_t expected, std::int64_t got,
                 int error, std::string reason);
  const std::string op;
  const std::string device;
  const std::int64_t offset;
  const std::int64_t expected;
  const std::int64_t got;
  const int error;
  const std::string reason;
};

// Memory that O_DIRECT takes.
class SectorBuffer {
 public:
  explicit SectorBuffer(std::int64_t bytes);  // rounded up to sectors, zeroed
  [[nodiscard]] char* data() const noexcept { return data_.get(); }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }

 private:
  struct Free {
    void operator()(char* data) const noexcept;
  };
  std::int64_t bytes_;
  std::unique_ptr<char, Free> data_;
};

class Device {
 public:
  // Throws StorageFailure; Error where the device demands what a store cannot give. A file system that refuses O_DIRECT
  // is used through its page cache (`direct()` tells), or not at all (`require_direct`).
  Device(std::string path, IoSyscalls& calls, bool read_only = false, bool require_direct = false);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool is_block() const noexcept { return is_block_; }
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
  // What the device takes as it is; other memory is bounced.
  [[nodiscard]] bool takes(const void* data) const noexcept {
    return reinterpret_cast<std::uintptr_t>(data) % memory_alignment_ == 0;
  }
  [[nodiscard]] std::uint32_t memory_alignment() const noexcept { return memory_alignment_; }

  // Whole sectors, aligned memory; short transfers are continued, EINTR and EAGAIN repeated.
  void read(void* data, std::int64_t bytes, std::int64_t offset) const;
  void write(const void* data, std::int64_t bytes, std::int64_t offset) const;
  // A longer file; its new blocks exist (`allocate`), or come with the first write. Throws StorageFailure.
  void grow(std::int64_t bytes, bool allocate);
  void flush() const;  // what was written survives a power cut

  // The only user of a member claims it: against mkfs, mount and raid (O_EXCL of a block device), and against stores
  // that cannot see each other's control file. Later users share. False: someone else is there.
  [[nodiscard]] bool claim_alone();
  void share_claim();

 private:
  void open(int access, bool require_direct);
  [[noreturn]] void throw_failure(const char* op, ssize_t result, std::int64_t offset, std::int64_t bytes,
                                  std::int64_t done) const;
  [[nodiscard]] bool lock(short type) const;

  const std::string path_;
  IoSyscalls& calls_;
  int fd_ = -1;
  int claim_fd_ = -1;
  pid_t locked_by_ = 0;  // not by a forked child, which shares the descriptor
  bool is_block_ = false;
  bool direct_ = true;
  std::uint32_t memory_alignment_ = 1;
  std::int64_t bytes_ = 0;
};

}  // namespace memascend

// One member of a store: a block device, a loop device or a preallocated file, opened with O_DIRECT.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "errors.h"
#include "io_syscalls.h"

namespace memascend {

constexpr std::int64_t kSectorBytes = 4096;  // unit of all transfers on a member; fits 512- and 4096-byte devices
// Direct transfers need memory aligned to at least this, even where the device would accept any address: with smaller
// alignments the kernel splits transfers, and stacked devices (loop, dm-crypt) have refused them.
constexpr std::uint32_t kLeastMemoryAlignment = 512;

[[nodiscard]] inline std::int64_t sector_down(std::int64_t value) { return value & ~(kSectorBytes - 1); }
[[nodiscard]] inline std::int64_t sector_up(std::int64_t value) { return sector_down(value + kSectorBytes - 1); }

// A failed transfer or flush, or a damaged index. `error` is an errno, or 0 if the kernel reported none.
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

// Memory that is aligned for O_DIRECT.
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
  // Throws StorageFailure, or Error if the device demands an alignment that a store cannot provide. A file system that
  // refuses O_DIRECT is used through its page cache (`direct()` is then false), or refused with Error if
  // `require_direct` is set.
  Device(std::string path, IoSyscalls& calls, bool read_only = false, bool require_direct = false);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool is_block() const noexcept { return is_block_; }
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }
  // Whether the device can transfer this memory directly; other memory needs a bounce buffer.
  [[nodiscard]] bool takes(const void* data) const noexcept {
    return reinterpret_cast<std::uintptr_t>(data) % memory_alignment_ == 0;
  }
  [[nodiscard]] std::uint32_t memory_alignment() const noexcept { return memory_alignment_; }

  // Transfer whole sectors from or to aligned memory. Short transfers are continued, and EINTR and EAGAIN repeated.
  // Throw StorageFailure.
  void read(void* data, std::int64_t bytes, std::int64_t offset) const;
  void write(const void* data, std::int64_t bytes, std::int64_t offset) const;
  // Makes the file longer. Its new blocks are allocated now (`allocate`), together with those that the file lacks so
  // far if the file system can allocate without writing, or with the first write. Neither the contents of the file nor
  // transfers in flight are affected. Throws StorageFailure.
  void grow(std::int64_t bytes, bool allocate);
  void flush() const;  // afterwards everything written so far survives a power cut; throws StorageFailure

  // The first user of a member claims it, which keeps out mkfs, mount and RAID (O_EXCL on a block device) and stores
  // that cannot see each other's control file. Later users share the claim. Returns false if the member is in use.
  [[nodiscard]] bool claim_alone();
  void share_claim();

 private:
  void open(int access, bool require_direct);
  void append_zeros(std::int64_t bytes) const;
  [[noreturn]] void throw_failure(const char* op, ssize_t result, std::int64_t offset, std::int64_t bytes,
                                  std::int64_t done) const;
  [[nodiscard]] bool lock(short type) const;

  const std::string path_;
  IoSyscalls& calls_;
  int fd_ = -1;
  int claim_fd_ = -1;
  pid_t locked_by_ = 0;  // only this process unlocks: a forked child shares the descriptor and its lock
  bool is_block_ = false;
  bool direct_ = true;
  std::uint32_t memory_alignment_ = 1;
  std::int64_t bytes_ = 0;
};

}  // namespace memascend

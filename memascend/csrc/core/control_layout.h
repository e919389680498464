// Layout of the file of a Control, and locks on its bytes. For control.cpp and control_file.cpp only.
#pragma once

#include <fcntl.h>
#include <sys/types.h>

#include <array>
#include <cerrno>
#include <cstdint>

#include "control.h"

namespace memascend {

constexpr std::uint64_t kMagic = 0x6d656d61736374ULL;
constexpr std::uint32_t kVersion = 2;
// Bytes of the file that are locked.
constexpr off_t kOpening = 0;
constexpr off_t kPresence = 1;
constexpr off_t kFirstProcess = 100;
constexpr std::int64_t kGrowthBytes = 64 << 20;  // address space for a longer bitmap: 2 TiB in chunks of 4096 bytes

inline int set_lock(int fd, int command, short type, off_t byte) {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = byte;
  range.l_len = 1;
  int result = 0;
  do {
    result = fcntl(fd, command, &range);
  } while (result != 0 && errno == EINTR);
  return result;
}

// Calls posix_fallocate, again if a signal interrupts it, and returns its error.
inline int allocate(int fd, std::int64_t bytes) {
  int error = 0;
  do {
    error = posix_fallocate(fd, 0, bytes);
  } while (error == EINTR);
  return error;
}

struct Control::Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t members;
  std::array<std::uint8_t, 16> uuid;
  std::int64_t chunk_bytes;
  pthread_mutex_t mutex;
  std::uint32_t broken;
  std::uint32_t half;
  std::uint64_t epoch;
  std::uint64_t sequence;  // also read without the lock
  std::uint64_t tail;
  std::uint64_t superblock;
  std::uint64_t generation;  // atomic
  std::int64_t used[kMaxMembers];
  std::int64_t hint[kMaxMembers];
  std::int64_t slot_hint;
};

struct Control::Slot {
  std::int64_t first;
  std::uint32_t chunks;
  std::uint16_t member;
  std::uint8_t process;
  std::uint8_t active;
};
static_assert(kMaxMembers < 65536 && kMaxProcesses < 256);

}  // namespace memascend

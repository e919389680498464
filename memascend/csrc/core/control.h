// What the processes on one store share: the allocator, the end of the log, and a lock that survives its holder.
//
// A file in shared memory. Its contents are a cache: whoever opens the store alone, or takes the lock of a process
// that died holding it, makes them anew from the devices. Liveness is told by file locks (of open file descriptions),
// never by process numbers; the engine hands the descriptor to its rings, so that a killed process counts as alive
// until its last transfer has ended, and nobody is given the space that it may still be writing to.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include <pthread.h>
#include <sys/types.h>

namespace memascend {

constexpr int kMaxMembers = 16;
constexpr int kMaxProcesses = 64;
constexpr int kMaxReservations = 131072;  // pieces of space, of 16 bytes each in shared memory

struct Extent {
  std::uint32_t member = 0;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;  // of data; the space is rounded up to chunks
  bool operator==(const Extent&) const = default;
};

// Space for one tensor, not yet in the index. `slots` are entries in the shared table.
struct Reservation {
  std::vector<Extent> extents;
  std::vector<std::uint32_t> slots;
};

struct MemberSpace {
  std::int64_t first_byte = 0;  // of the data area
  std::int64_t chunks = 0;
  std::uint32_t weight = 1;
};

class Control {
 public:
  // Attaches, or makes the file when nobody else lives: `alone` tells, and the caller then fills it by `rebuild`,
  // and must call `opened` in any case. Throws StorageFailure, Error.
  Control(const std::string& path, const std::array<std::uint8_t, 16>& uuid, std::int64_t chunk_bytes,
          std::vector<MemberSpace> members);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  [[nodiscard]] bool alone() const noexcept { return alone_; }
  void opened();
  [[nodiscard]] int fd() const noexcept { return fd_; }

  // True: the last holder died with it. Rebuild before use. Throws Error in a forked child: its locks are the parent's.
  [[nodiscard]] bool lock();
  void unlock();

  // All of the following with the lock held.
  struct LogState {
    std::uint64_t epoch = 0;
    std::uint64_t sequence = 0;    // of the last batch
    std::uint64_t tail = 0;        // where in the active half the next goes
    std::uint64_t superblock = 0;  // generation
    std::uint32_t half = 0;
  };
  [[nodiscard]] LogState log() const;
  void set_log(const LogState& state);
  [[nodiscard]] bool broken() const;
  void set_broken(bool value);

  // Free space is what neither the index (`used`) nor a live process's reservation holds. Returns the first extent
  // that overlaps another, if any.
  struct Overlap {
    bool found = false;
    Extent extent;
  };
  Overlap rebuild(const std::vector<Extent>& used);
  // Striped by weight, whole or not at all. Empty extents with `bytes` > 0: no space.
  [[nodiscard]] Reservation reserve(std::int64_t bytes, std::int64_t stripe_bytes);
  // Other space in place of `old`, which may be part of it; `old` is released. No space: `old` is as it was.
  [[nodiscard]] Reservation exchange(const Reservation& old, std::int64_t bytes, std::int64_t stripe_bytes);
  void keep(const Reservation& reservation);     // its space now belongs to the index
  void release(const Reservation& reservation);  // free again
  void free_extent(const Extent& extent);
  void grow(std::int64_t chunks);                // of the only member, used by this process alone
  [[nodiscard]] std::int64_t max_chunks() const noexcept;
  int drop_dead_reservations();                  // returns how many
  void drop_own_reservations();                  // once, after attaching: those of a dead predecessor in our place
  [[nodiscard]] std::int64_t free_bytes() const;
  [[nodiscard]] std::int64_t free_bytes(std::uint32_t member) const;
  [[nodiscard]] std::int64_t reserved_bytes() const;

  // Without the lock.
  [[nodiscard]] std::uint64_t sequence() const noexcept;
  [[nodiscard]] std::uint64_t next_generation() noexcept;
  void generations_from(std::uint64_t first) noexcept;
  [[nodiscard]] int processes() const;

 private:
  struct Header;
  struct Slot;
  [[nodiscard]] Header& header() const noexcept { return *static_cast<Header*>(data_); }
  [[nodiscard]] Slot* slots() const noexcept;
  [[nodiscard]] std::uint64_t* bitmap(std::uint32_t member) const noexcept;
  void attach(const std::string& path, const std::array<std::uint8_t, 16>& uuid);
  void open_file(const std::string& path);
  void initialise(const std::array<std::uint8_t, 16>& uuid);
  void take_process_slot();
  [[nodiscard]] bool is_live(int process) const;
  [[nodiscard]] int free_slot();
  [[nodiscard]] std::int64_t mark(std::uint32_t member, std::int64_t first, std::int64_t count, bool used);
  [[nodiscard]] std::vector<std::pair<std::int64_t, std::int64_t>> find_runs(std::uint32_t member, std::int64_t want);
  [[nodiscard]] std::vector<std::int64_t> shares(std::int64_t chunks, bool striped) const;
  [[nodiscard]] std::int64_t chunk_count(std::int64_t bytes) const { return (bytes + chunk_bytes_ - 1) / chunk_bytes_; }

  const std::int64_t chunk_bytes_;
  std::vector<MemberSpace> members_;
  std::string path_;
  int fd_ = -1;
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;   // of the file
  std::int64_t mapped_ = 0;  // of addresses; the file may grow that far
  std::vector<std::int64_t> bitmap_offsets_;
  int process_ = -1;
  const pid_t owner_pid_;
  bool alone_ = false;
};

}  // namespace memascend

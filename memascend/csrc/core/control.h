// State that the processes on one store share: the allocator, the end of the log, and a lock that survives its holder.
//
// It is a file in shared memory whose contents are only a cache: a process that opens the store alone, or that takes
// the lock after its holder has died, rebuilds them from the devices. Whether a process is alive is decided by file
// locks (of open file descriptions), never by process numbers. The engine registers the descriptor with its rings, so
// that a killed process counts as alive until its last transfer has ended, and space that it may still be writing to
// is not given to another process.
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
constexpr int kMaxReservations = 131072;  // entries in the shared table, 16 bytes each, one per piece of space

struct Extent {
  std::uint32_t member = 0;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;  // of data; the space is rounded up to chunks
  bool operator==(const Extent&) const = default;
};

// Space for one tensor that is not in the index yet. `slots` are the numbers of its entries in the shared table.
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
  // Attaches to the file, or makes it if no other process uses the store. In that case `alone` is true and the caller
  // has to fill it with `rebuild`. The caller must call `opened` in any case. Throws StorageFailure, Error.
  Control(const std::string& path, const std::array<std::uint8_t, 16>& uuid, std::int64_t chunk_bytes,
          std::vector<MemberSpace> members);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  [[nodiscard]] bool alone() const noexcept { return alone_; }
  void opened();
  [[nodiscard]] int fd() const noexcept { return fd_; }

  // Takes the lock. Returns true if the last holder died with it: the caller has to rebuild before use. Throws Error in
  // a forked child, whose file locks belong to the parent.
  [[nodiscard]] bool lock();
  void unlock();

  // All of the following need the lock held.
  struct LogState {
    std::uint64_t epoch = 0;
    std::uint64_t sequence = 0;    // of the last batch
    std::uint64_t tail = 0;        // offset of the next batch in the active half
    std::uint64_t superblock = 0;  // generation
    std::uint32_t half = 0;
  };
  [[nodiscard]] LogState log() const;
  void set_log(const LogState& state);
  [[nodiscard]] bool broken() const;
  void set_broken(bool value);

  // Marks the space of the index (`used`) and of live processes' reservations as used, and all other space as free.
  // Returns the first extent that overlaps another, if any.
  struct Overlap {
    bool found = false;
    Extent extent;
  };
  Overlap rebuild(const std::vector<Extent>& used);
  // Reserves space for `bytes`, striped over the members by weight if there are at least `stripe_bytes`. If there is
  // not enough space, nothing is reserved and the extents are empty.
  [[nodiscard]] Reservation reserve(std::int64_t bytes, std::int64_t stripe_bytes);
  // Releases `old` and reserves new space, which may overlap it. If there is not enough space, `old` is unchanged and
  // the extents are empty.
  [[nodiscard]] Reservation exchange(const Reservation& old, std::int64_t bytes, std::int64_t stripe_bytes);
  void keep(const Reservation& reservation);     // its space now belongs to the index
  void release(const Reservation& reservation);  // its space is free again
  void free_extent(const Extent& extent);
  void grow(std::int64_t chunks);                // for a store of one member that no other process uses
  [[nodiscard]] std::int64_t max_chunks() const noexcept;
  int drop_dead_reservations();                  // frees those of dead processes and returns their number
  void drop_own_reservations();                  // once, after attaching: of a dead process that had the same slot
  [[nodiscard]] std::int64_t free_bytes() const;
  [[nodiscard]] std::int64_t free_bytes(std::uint32_t member) const;
  [[nodiscard]] std::int64_t reserved_bytes() const;

  // These do not need the lock.
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
  std::int64_t mapped_ = 0;  // bytes of address space; the file may grow that far
  std::vector<std::int64_t> bitmap_offsets_;
  int process_ = -1;
  const pid_t owner_pid_;
  bool alone_ = false;
};

}  // namespace memascend

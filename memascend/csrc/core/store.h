// Tensors by name on a set of devices: where each lies, and which of its versions is whole.
//
// A write goes to fresh space. `install` makes the new version visible in this process; `commit` flushes the data,
// then appends one checksummed batch of index records and flushes that, and only then gives the old space back. So
// whatever a crash leaves, a reader finds the last committed version of each tensor, and all changes of one commit or
// none. On each device the first two sectors are superblocks of 512 bytes, written alternately, the higher generation
// counting; the first device also holds the log in two halves: when one is full, the live records move to the other
// as one batch, and a superblock switches over.
//
// Several processes may use one store: they see each other's commits, and share the space (control.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control.h"
#include "device.h"

namespace memascend {

constexpr std::size_t kMaxKeyBytes = 4096;

struct TensorRecord {
  std::int64_t bytes = 0;
  std::string dtype;  // as the caller names it
  std::vector<std::int64_t> shape;
  std::optional<std::uint32_t> checksum;  // CRC-32C of the data
  std::uint64_t generation = 0;           // grows with every write in the store
  std::vector<Extent> extents;            // in the order of the data
};
using RecordPointer = std::shared_ptr<const TensorRecord>;

struct FormatOptions {
  std::string owner;                      // of run or model; opening asks for the same
  std::vector<std::uint32_t> weights;     // a device's share of a striped tensor; empty: all alike
  std::int64_t chunk_bytes = 64 * 1024;   // unit of space
  std::int64_t log_bytes = 0;             // each half; 0: chosen from the size
  std::int64_t scratch_pid = 0;           // of the process whose scratch file it is; 0: a store that is to be kept
};

struct Superblock {
  std::uint64_t generation = 0;
  std::array<std::uint8_t, 16> uuid{};
  std::string owner;
  std::uint32_t member = 0;
  std::uint32_t members = 0;
  std::uint32_t weight = 1;
  std::int64_t chunk_bytes = 0;
  std::int64_t log_offset = 0;
  std::int64_t log_bytes = 0;  // one half
  std::int64_t data_offset = 0;
  std::int64_t size_bytes = 0;
  std::uint32_t half = 0;
  std::uint64_t epoch = 0;
  std::uint64_t first_sequence = 0;
  std::int64_t scratch_pid = 0;
};

// What `device` says about itself: the valid superblock with the highest generation, or none.
[[nodiscard]] std::optional<Superblock> read_superblock(const Device& device);
[[nodiscard]] std::string uuid_text(const std::array<std::uint8_t, 16>& uuid);

// Writes superblocks and an empty log. Asks nothing: whether the devices may be overwritten is the caller's business.
void format_store(const std::vector<std::string>& paths, const FormatOptions& options,
                  IoSyscalls& calls = kernel_syscalls());
// Unmakes them. Refused (Error) while a process uses the store.
void destroy_store(const std::vector<std::string>& paths, IoSyscalls& calls = kernel_syscalls());

struct StoreOptions {
  std::string owner;
  std::string control_folder = "/dev/shm";
  std::int64_t stripe_bytes = 1 << 20;  // smaller tensors stay on one device
  bool any_owner = false;               // tools that only look
  bool require_direct = false;          // refuse a file system that refuses O_DIRECT
};

struct StoreSpace {
  std::int64_t data_bytes = 0;
  std::int64_t free_bytes = 0;
  std::int64_t reserved_bytes = 0;  // of writes not committed, of all processes
  std::int64_t log_bytes = 0;
  std::int64_t log_used_bytes = 0;
  int processes = 0;
};

class Store {
 public:
  // Throws StorageFailure or Error: a device is missing, foreign, damaged or in use.
  Store(const std::vector<std::string>& paths, StoreOptions options, IoSyscalls& calls = kernel_syscalls());
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  ~Store() = default;

  // Throws StorageFailure (ENOSPC) naming the bytes asked and free.
  [[nodiscard]] Reservation reserve(std::int64_t bytes);
  // The same in place of `old`, whose space it may take. Throws StorageFailure (ENOSPC): `old` is then as it was.
  [[nodiscard]] Reservation exchange(const Reservation& old, std::int64_t bytes);
  void release(const Reservation& reservation);

  [[nodiscard]] std::uint64_t next_generation() { return control_->next_generation(); }
  // The data of `record` is on the devices: this process now reads it. False: a later write came first, or the
  // tensor has been erased since; the space is free again.
  bool install(const std::string& key, TensorRecord record, const Reservation& reservation);
  // False: there is none.
  bool erase(const std::string& key);

  [[nodiscard]] RecordPointer find(const std::string& key);
  [[nodiscard]] std::vector<std::pair<std::string, RecordPointer>> list();

  // All changes of this process become durable and visible to others: all of them or, after a crash, none.
  // Returns how many there were. After a failed write or flush the store refuses further changes: reopen and verify.
  // Then the changes are not there, unless the device has kept them and refused to have them taken back.
  std::int64_t commit();
  [[nodiscard]] std::int64_t uncommitted();

  // The file behind a store of one file gets longer, to hold `data_bytes` of tensors; its new space is allocated, or
  // left to the first write. Throws Error for another store, or while other processes use it; StorageFailure (ENOSPC).
  void grow(std::int64_t data_bytes, bool allocate);

  // Rewrites the log with live records only and frees what dead processes had reserved; returns their number.
  int collect();

  // Reads the data of a record. Empty if it is whole, else what is wrong; nothing to compare counts as whole.
  [[nodiscard]] std::string verify(const TensorRecord& record);

  [[nodiscard]] const std::vector<std::unique_ptr<Device>>& devices() const noexcept { return devices_; }
  [[nodiscard]] const Superblock& superblock(std::size_t member) const { return superblocks_[member]; }
  [[nodiscard]] StoreSpace space();
  [[nodiscard]] int control_fd() const noexcept { return control_->fd(); }

 private:
  struct Change {
    RecordPointer record;  // null: erased
    Reservation reservation;
    std::uint64_t generation = 0;
  };
  using Changes = std::map<std::string, Change>;
  class ControlLock;

  void open_devices(const std::vector<std::string>& paths);
  void check_members() const;
  void open_control();
  void share_claims() const;
  void rebuild();
  void load_log();
  std::uint64_t replay(const char* log, std::int64_t bytes, std::uint64_t from);
  void refuse_hidden_batches(const char* log, std::int64_t bytes, std::uint64_t from) const;
  void apply_payload(const char* data, std::size_t bytes, std::int64_t offset);
  void catch_up();
  void write_batch(const Changes& changes);
  void compact(const Changes& changes);
  void unwrite(std::int64_t offset) const noexcept;
  void apply(Changes& changes);
  void require_sound() const;
  [[noreturn]] void throw_no_space(std::int64_t bytes) const;
  [[nodiscard]] std::string encode(const Changes& changes) const;
  [[nodiscard]] SectorBuffer frame(const std::string& payload, std::uint64_t count, std::uint64_t epoch,
                                   std::uint64_t sequence) const;
  [[nodiscard]] std::int64_t half_offset(std::uint32_t half) const;
  [[nodiscard]] bool is_place(const Extent& extent) const;
  [[nodiscard]] const Change* find_change(const std::string& key) const;

  const StoreOptions options_;
  IoSyscalls& calls_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<Superblock> superblocks_;
  std::unique_ptr<Control> control_;

  std::mutex commit_mutex_;   // one commit at a time; before the control's lock, which comes before mutex_
  std::mutex control_mutex_;  // threads of this process queue here, processes at the control's lock
  mutable std::mutex mutex_;  // the maps
  std::map<std::string, RecordPointer> committed_;
  Changes committing_;
  Changes pending_;
  std::map<std::string, std::uint64_t> newest_;  // generation of the last write or erasure that this process began
  bool damaged_ = false;
  Control::LogState seen_;  // how far committed_ follows the log
  std::atomic<std::uint64_t> seen_sequence_{0};
};

}  // namespace memascend

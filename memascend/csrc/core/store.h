// The index of tensors by name on a set of devices: the location of each, and its last complete version.
//
// A write goes to fresh space. `install` makes the new version visible in this process. `commit` flushes the data,
// then appends one checksummed batch of index records and flushes that, and only then frees the old space. Therefore a
// reader after a crash finds the last committed version of each tensor, and either all changes of a commit or none.
//
// The first two sectors of each device have one superblock of 512 bytes each. They are written alternately, and the
// one with the higher generation is valid. The first device also has the log, in two halves: when one is full, the
// live records are written to the other as one batch, and a new superblock switches over to it.
//
// Several processes may use one store: they see each other's commits and share the space (control.h).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
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
  std::string dtype;  // the caller's name for it
  std::vector<std::int64_t> shape;
  std::optional<std::uint32_t> checksum;  // CRC-32C of the data
  std::uint64_t generation = 0;           // grows with every write in the store
  std::vector<Extent> extents;            // in the order of the data
};
using RecordPointer = std::shared_ptr<const TensorRecord>;

struct FormatOptions {
  std::string owner;                      // name of a run or model; opening the store requires the same
  std::vector<std::uint32_t> weights;     // each device's share of a striped tensor; empty: equal shares
  std::int64_t chunk_bytes = 64 * 1024;   // unit of space
  std::int64_t log_bytes = 0;             // of each half; 0: derived from the size of the device
  std::int64_t scratch_pid = 0;           // process whose scratch file this is; 0 for a permanent store
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

// Returns the valid superblock with the highest generation, or nothing. Throws Error for another format version.
[[nodiscard]] std::optional<Superblock> read_superblock(const Device& device);
[[nodiscard]] std::string uuid_text(const std::array<std::uint8_t, 16>& uuid);

// Writes superblocks and an empty log. Throws Error if a device is in use, but does not check otherwise whether it may
// be overwritten; that is up to the caller.
void format_store(const std::vector<std::string>& paths, const FormatOptions& options,
                  IoSyscalls& calls = kernel_syscalls());
// Erases the superblocks. Throws Error if there is no store, or while a process uses it.
void destroy_store(const std::vector<std::string>& paths, IoSyscalls& calls = kernel_syscalls());

struct StoreOptions {
  std::string owner;
  std::string control_folder = "/dev/shm";
  std::int64_t stripe_bytes = 1 << 20;  // smaller tensors stay on one device
  bool any_owner = false;               // for tools that only inspect a store
  bool require_direct = false;          // refuse a file system that refuses O_DIRECT
};

struct Verified {
  RecordPointer record;  // null: there is no such tensor, or not any more
  std::string problem;   // empty if the data is intact
};

struct StoreSpace {
  std::int64_t data_bytes = 0;
  std::int64_t free_bytes = 0;
  std::int64_t reserved_bytes = 0;  // for writes that are not committed, of all processes
  std::int64_t log_bytes = 0;
  std::int64_t log_used_bytes = 0;
  int processes = 0;
};

class Store {
 public:
  // Throws StorageFailure or Error if a device is missing, damaged or in use, or belongs to another store or owner.
  Store(const std::vector<std::string>& paths, StoreOptions options, IoSyscalls& calls = kernel_syscalls());
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  ~Store() = default;

  // Throws StorageFailure (ENOSPC), which names the requested and the free bytes.
  [[nodiscard]] Reservation reserve(std::int64_t bytes);
  // Replaces `old` by a new reservation, which may use its space. Throws StorageFailure (ENOSPC) and then leaves
  // `old` unchanged.
  [[nodiscard]] Reservation exchange(const Reservation& old, std::int64_t bytes);
  void release(const Reservation& reservation);

  [[nodiscard]] std::uint64_t next_generation() { return control_->next_generation(); }
  // Makes a record visible in this process, after its data has been written. Returns false, and frees the space, if
  // a later write was installed first or the tensor has been erased since.
  bool install(const std::string& key, TensorRecord record, const Reservation& reservation);
  // Returns false if there is no such tensor. If a `generation` is given, only that version is erased: with another one
  // it returns false, and if another process commits a newer one before `commit`, the newer one is kept.
  bool erase(const std::string& key, std::optional<std::uint64_t> generation = std::nullopt);

  [[nodiscard]] RecordPointer find(const std::string& key);
  [[nodiscard]] std::vector<std::pair<std::string, RecordPointer>> list();

  // Makes all changes of this process durable and visible to others: all of them or, after a crash, none. Returns
  // their number. After a failed write or flush the store refuses further changes: reopen and verify it. The changes
  // are then absent, unless the device has stored them and writing over them failed as well.
  std::int64_t commit();
  [[nodiscard]] std::int64_t uncommitted();

  // Makes the file of a store of one file longer, for `data_bytes` of tensors. The new space is allocated now
  // (`allocate`) or with the first write. Throws Error for any other store, or while other processes use it, and
  // StorageFailure (ENOSPC).
  void grow(std::int64_t data_bytes, bool allocate);

  // Rewrites the log with live records only, and frees the reservations of dead processes. Returns the number of
  // these reservations.
  int collect();

  // Reads the data of a record. Returns what is wrong, or an empty string if the data is intact; a record without a
  // checksum counts as intact if it can be read.
  [[nodiscard]] std::string verify(const TensorRecord& record);
  // Verifies the current version of a tensor: if another one has replaced it while it was read, so that its space may
  // have been reused, that one is verified instead. Throws StorageFailure if that happens too often.
  [[nodiscard]] Verified verify(const std::string& key);
  [[nodiscard]] Verified verify(const std::string& key, const std::function<RecordPointer()>& find);

  [[nodiscard]] const std::vector<std::unique_ptr<Device>>& devices() const noexcept { return devices_; }
  [[nodiscard]] const Superblock& superblock(std::size_t member) const { return superblocks_[member]; }
  [[nodiscard]] StoreSpace space();
  [[nodiscard]] int control_fd() const noexcept { return control_->fd(); }

 private:
  struct Change {
    RecordPointer record;  // null: erased
    Reservation reservation;
    std::uint64_t generation = 0;
    std::optional<std::uint64_t> only;  // for an erasure: of the one committed version that it concerns
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
  void drop_outdated_erasures();
  void require_sound() const;
  [[noreturn]] void throw_no_space(std::int64_t bytes) const;
  [[nodiscard]] std::string encode(const Changes& changes) const;
  [[nodiscard]] SectorBuffer frame(const std::string& payload, std::uint64_t count, std::uint64_t epoch,
                                   std::uint64_t sequence) const;
  [[nodiscard]] std::int64_t half_offset(std::uint32_t half) const;
  [[nodiscard]] bool is_place(const Extent& extent) const;
  [[nodiscard]] const Change* find_change(const std::string& key) const;
  [[nodiscard]] RecordPointer current(const std::string& key) const;  // with mutex_

  const StoreOptions options_;
  IoSyscalls& calls_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::vector<Superblock> superblocks_;
  std::unique_ptr<Control> control_;

  std::mutex commit_mutex_;   // one commit at a time; taken before the control's lock, and that before mutex_
  std::mutex control_mutex_;  // serializes the threads of this process; the control's lock serializes processes
  mutable std::mutex mutex_;  // guards the maps
  std::map<std::string, RecordPointer> committed_;
  Changes committing_;
  Changes pending_;
  std::map<std::string, std::uint64_t> newest_;  // generation of the last write or erasure that this process began
  bool damaged_ = false;
  Control::LogState seen_;  // state of the log up to which committed_ is current
  std::atomic<std::uint64_t> seen_sequence_{0};
};

}  // namespace memascend

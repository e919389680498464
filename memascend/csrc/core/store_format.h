// Superblocks, the log's batches, and the lock. Only for the sources of the store.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "store.h"

namespace memascend {

void write_superblock(const Device& device, const Superblock& block);

struct BatchHeader {
  std::uint32_t magic;
  std::uint32_t checksum;  // of the rest of the header and the payload
  std::array<std::uint8_t, 16> uuid;
  std::uint64_t epoch;
  std::uint64_t sequence;
  std::uint64_t payload_bytes;
  std::uint64_t count;
  std::uint64_t unused;
};
static_assert(sizeof(BatchHeader) == 64);
constexpr std::uint32_t kBatchMagic = 0x424d454d;
constexpr std::size_t kUnchecked = 8;  // bytes of magic and checksum, which the checksum does not cover

// Reads serialized records; never reads past the end, whatever the bytes contain.
class Reader {
 public:
  Reader(const char* data, std::size_t bytes) : at_(data), left_(bytes) {}
  template <typename T>
  T get() {
    T value{};
    take(&value, sizeof(value));
    return value;
  }
  std::string text(std::size_t bytes) {
    std::string out(good_ && bytes <= left_ ? bytes : 0, '\0');
    take(out.data(), bytes);
    return out;
  }
  [[nodiscard]] bool good() const noexcept { return good_; }
  [[nodiscard]] bool more() const noexcept { return good_ && left_ > 0; }

 private:
  void take(void* out, std::size_t bytes) {
    if (!good_ || bytes > left_) {
      good_ = false;
      return;
    }
    std::memcpy(out, at_, bytes);
    at_ += bytes;
    left_ -= bytes;
  }
  const char* at_;
  std::size_t left_;
  bool good_ = true;
};

void put_record(std::string& out, const std::string& key, const TensorRecord* record);
// Returns the key and the record, which is null for an erasure.
[[nodiscard]] std::pair<std::string, RecordPointer> get_record(Reader& reader);
// Returns the header of the batch at `data`, where `left` bytes are available, if the batch is complete and its
// checksum is right.
[[nodiscard]] std::optional<BatchHeader> batch_at(const char* data, std::int64_t left, const Superblock& block);
[[nodiscard]] std::int64_t batch_bytes(std::uint64_t payload);

// Holds the control's lock while in scope. Rebuilds the control if the last holder died with the lock.
class Store::ControlLock {
 public:
  explicit ControlLock(Store& store) : guard_(store.control_mutex_), store_(store) {
    if (store.control_->lock()) {
      try {
        store.rebuild();
      } catch (...) {
        store.control_->set_broken(true);
        store.control_->unlock();
        throw;
      }
    }
  }
  ~ControlLock() { store_.control_->unlock(); }
  ControlLock(const ControlLock&) = delete;
  ControlLock& operator=(const ControlLock&) = delete;

 private:
  std::lock_guard<std::mutex> guard_;
  Store& store_;
};

}  // namespace memascend

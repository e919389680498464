// A tensor that nothing needs to survive: its place on the devices of a store, known in memory alone.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "store.h"

namespace memascend {

// Space on a store, released with its last user. Nothing of it enters the index: to the store it is a write
// that is never committed, so that the space of a killed process is free again as well.
class Place {
 public:
  // Throws StorageFailure (ENOSPC).
  Place(std::shared_ptr<Store> store, std::int64_t bytes);
  // In place of `old`, whose space it may take, and which then has none. Throws StorageFailure (ENOSPC): `old` is as it
  // was.
  Place(Place& old, std::int64_t bytes);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  [[nodiscard]] const std::vector<Extent>& extents() const noexcept { return reservation_.extents; }

 private:
  const std::shared_ptr<Store> store_;
  Reservation reservation_;
};

// First come, first served: any number of reads at once, a write alone. Not thread-safe.
class KeyQueue {
 public:
  // True: the request may start now. False: the `leave` of another will name it.
  [[nodiscard]] bool join(std::uint64_t request, bool write);
  // The request has ended, or been cancelled before it started. Returns those that may start now.
  [[nodiscard]] std::vector<std::uint64_t> leave(std::uint64_t request);

 private:
  struct Entry {
    std::uint64_t request;
    bool write;
    bool started;
  };
  std::deque<Entry> queue_;  // in the order of arrival, with those that have started
};

// Overwritten in place. Guarded by the engine's mutex, but for `place`; each request on it holds a reference.
struct VolatileTensor {
  // `record` says bytes, dtype and shape. Throws StorageFailure (ENOSPC).
  VolatileTensor(std::shared_ptr<Store> store, const TensorRecord& record);
  // Instead of `old`, which nobody uses. Throws StorageFailure (ENOSPC): `old` is as it was.
  VolatileTensor(VolatileTensor& old, const TensorRecord& record);
  Place place;
  TensorRecord record;  // bytes and extents never change
  bool whole = false;  // the last write ended well
  KeyQueue queue;
};

}  // namespace memascend

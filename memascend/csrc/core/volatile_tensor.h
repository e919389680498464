// A tensor that does not have to survive its engine: its space on the devices of a store is recorded only in memory.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "store.h"

namespace memascend {

// Space on a store, released by the destructor. It is not in the index: for the store it is a write that is never
// committed, so the space of a killed process becomes free again as well.
class Place {
 public:
  // Throws StorageFailure (ENOSPC).
  Place(std::shared_ptr<Store> store, std::int64_t bytes);
  // Replaces `old`, whose space it may take and which then has none. Throws StorageFailure (ENOSPC) and then leaves
  // `old` unchanged.
  Place(Place& old, std::int64_t bytes);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  [[nodiscard]] const std::vector<Extent>& extents() const noexcept { return reservation_.extents; }

 private:
  const std::shared_ptr<Store> store_;
  Reservation reservation_;
};

// Orders the requests on one key first come, first served: reads may run concurrently, a write only alone. Not
// thread-safe.
class KeyQueue {
 public:
  // Returns true if the request may start now; otherwise the `leave` of another request will return it.
  [[nodiscard]] bool join(std::uint64_t request, bool write);
  // Removes a request that has ended or was cancelled before it started. Returns the requests that may start now.
  [[nodiscard]] std::vector<std::uint64_t> leave(std::uint64_t request);

 private:
  struct Entry {
    std::uint64_t request;
    bool write;
    bool started;
  };
  std::deque<Entry> queue_;  // in the order of arrival, including those that have started
};

// A tensor that is overwritten in place. Guarded by the engine's mutex, except for `place`; each request on it has a
// reference.
struct VolatileTensor {
  // `record` gives bytes, dtype and shape. Throws StorageFailure (ENOSPC).
  VolatileTensor(std::shared_ptr<Store> store, const TensorRecord& record);
  // Replaces `old`, which must be unused. Throws StorageFailure (ENOSPC) and then leaves `old` unchanged.
  VolatileTensor(VolatileTensor& old, const TensorRecord& record);
  Place place;
  TensorRecord record;  // bytes and extents never change
  bool whole = false;  // the last write ended well
  KeyQueue queue;
};

}  // namespace memascend

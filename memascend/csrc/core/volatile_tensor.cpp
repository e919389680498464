#include "volatile_tensor.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace memascend {

Place::Place(std::shared_ptr<Store> store, std::int64_t bytes)
    : store_(std::move(store)), reservation_(store_->reserve(bytes)) {}

Place::Place(Place& old, std::int64_t bytes)
    : store_(old.store_), reservation_(store_->exchange(old.reservation_, bytes)) {
  old.reservation_ = {};
}

Place::~Place() {
  if (reservation_.slots.empty()) {
    return;
  }
  try {
    store_->release(reservation_);
  } catch (const std::exception&) {  // in a forked child, whose locks belong to the parent, or if the store is broken
  }
}

bool KeyQueue::join(std::uint64_t request, bool write) {
  const bool start =
      std::all_of(queue_.begin(), queue_.end(), [&](const Entry& other) { return !write && !other.write; });
  queue_.push_back({request, write, start});
  return start;
}

std::vector<std::uint64_t> KeyQueue::leave(std::uint64_t request) {
  std::erase_if(queue_, [&](const Entry& entry) { return entry.request == request; });
  std::vector<std::uint64_t> out;
  for (Entry& entry : queue_) {
    if (entry.write && &entry != &queue_.front()) {
      break;
    }
    if (!std::exchange(entry.started, true)) {
      out.push_back(entry.request);
    }
    if (entry.write) {
      break;
    }
  }
  return out;
}

VolatileTensor::VolatileTensor(std::shared_ptr<Store> store, const TensorRecord& wanted)
    : place(std::move(store), wanted.bytes), record(wanted) {
  record.extents = place.extents();
}

VolatileTensor::VolatileTensor(VolatileTensor& old, const TensorRecord& wanted)
    : place(old.place, wanted.bytes), record(wanted) {
  record.extents = place.extents();
}

}  // namespace memascend

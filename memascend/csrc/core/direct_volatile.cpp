// Volatile engines: their tensors are overwritten in place and recorded only in memory, and requests on one key run in
// the order of submission.
#include <algorithm>
#include <utility>

#include "direct_engine.h"
#include "direct_request.h"
#include "errors.h"

namespace memascend {

std::shared_ptr<VolatileTensor> DirectEngine::volatile_tensor(const std::string& key) const {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = volatile_.find(key);
  return found == volatile_.end() ? nullptr : found->second;
}

// Returns the tensor under `key` if it has that size, else a new one. The new one takes over the space of an old tensor
// that no request uses; an old one that is in use keeps its space until its requests have ended. Throws StorageFailure
// (ENOSPC) and then leaves the old tensor unchanged.
std::shared_ptr<VolatileTensor> DirectEngine::place_volatile(const std::string& key, const TensorRecord& record) {
  std::shared_ptr<VolatileTensor> gone;  // its space is released without mutex_
  {
    std::lock_guard<std::mutex> guard(mutex_);  // no request may begin to use the old one meanwhile
    if (const auto found = volatile_.find(key); found != volatile_.end()) {
      if (found->second->record.bytes == record.bytes) {
        return found->second;
      }
      if (found->second.use_count() == 1) {
        return found->second = std::make_shared<VolatileTensor>(*found->second, record);
      }
    }
  }
  auto fresh = std::make_shared<VolatileTensor>(store_, record);
  std::lock_guard<std::mutex> guard(mutex_);
  gone = std::exchange(volatile_[key], fresh);
  return fresh;
}

std::uint64_t DirectEngine::write_part(const std::string& key, const void* data, std::int64_t bytes,
                                       std::int64_t offset, int priority, std::shared_ptr<void> keep_alive) {
  require_own_process();
  const std::shared_ptr<VolatileTensor> tensor = volatile_tensor(key);
  if (!tensor) {
    throw Error(ErrorKind::kInvalidArgument,
                "write to a part of '" + key + "': a volatile engine has to hold the tensor: write all of it first");
  }
  const std::int64_t size = tensor->record.bytes;
  const bool inside = bytes >= 0 && offset >= 0 && offset <= size && bytes <= size - offset;
  if (!inside || offset % kSectorBytes != 0 || ((offset + bytes) % kSectorBytes != 0 && offset + bytes != size)) {
    throw Error(ErrorKind::kInvalidArgument, "write to bytes " + std::to_string(offset) + " to " +
                                                 std::to_string(offset + bytes) + " of '" + key + "', a tensor of " +
                                                 std::to_string(size) +
                                                 ": begin and end at multiples of 4096 bytes, or at the tensor's end");
  }
  auto request = std::make_shared<Request>();
  request->write = true;
  request->key = key;
  request->data = static_cast<char*>(const_cast<void*>(data));
  request->bytes = bytes;
  request->offset = offset;
  request->priority = priority;
  request->keep_alive = std::move(keep_alive);
  request->tensor = tensor;
  request->record.bytes = size;
  request->record.extents = tensor->place.extents();
  return enqueue(request);
}

RecordPointer DirectEngine::record_of(const std::shared_ptr<VolatileTensor>& tensor) const {
  std::lock_guard<std::mutex> guard(mutex_);
  return tensor ? std::make_shared<TensorRecord>(tensor->record) : nullptr;
}

RecordPointer DirectEngine::find(const std::string& key) {
  return options_.is_volatile ? record_of(volatile_tensor(key)) : store_->find(key);
}

std::vector<std::pair<std::string, RecordPointer>> DirectEngine::list() {
  if (!options_.is_volatile) {
    return store_->list();
  }
  std::vector<std::pair<std::string, RecordPointer>> out;
  std::lock_guard<std::mutex> guard(mutex_);
  out.reserve(volatile_.size());
  for (const auto& [key, tensor] : volatile_) {
    out.emplace_back(key, std::make_shared<TensorRecord>(tensor->record));
  }
  return out;
}

bool DirectEngine::erase(const std::string& key) {
  require_own_process();
  if (!options_.is_volatile) {
    return store_->erase(key);
  }
  std::shared_ptr<VolatileTensor> gone;  // its space is released without mutex_
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = volatile_.find(key);
  if (found == volatile_.end()) {
    return false;
  }
  gone = std::move(found->second);
  volatile_.erase(found);
  return true;
}
// Updates a volatile tensor after a request, and makes the requests on its key ready that may start now.
void DirectEngine::leave_queue(Request& request, bool cancelled) {
  VolatileTensor& tensor = *request.tensor;
  if (request.write && !cancelled && !request.failure) {
    const bool all = request.bytes == tensor.record.bytes;
    tensor.whole = tensor.whole || all;
    tensor.record.checksum = all ? request.record.checksum : std::nullopt;
    tensor.record.generation += 1;
    if (all) {
      tensor.record.dtype = std::move(request.record.dtype);
      tensor.record.shape = std::move(request.record.shape);
    }
  } else if (request.write && request.started_ns != 0) {
    tensor.whole = false;
  }
  const std::vector<std::uint64_t> next = tensor.queue.leave(request.id);
  for (const std::uint64_t id : next) {
    // A request that was cancelled while it waited has no blocks any more. `cancel` is about to end it.
    if (const std::shared_ptr<Request>& waiting = live_.at(id); !waiting->cancelled) {
      make_ready(waiting);
    }
  }
  if (!next.empty()) {
    wake_workers();
  }
}
// The read ran after all earlier writes, so the tensor's state is the one that they left.
void DirectEngine::check_volatile_read(const Request& request) const {
  bool whole = false;
  std::optional<std::uint32_t> checksum;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    whole = request.tensor->whole;
    checksum = request.tensor->record.checksum;
  }
  if (!whole && request.bytes > 0) {
    const Extent where = request.record.extents[0];
    throw StorageFailure("read", store_->devices()[where.member]->path(), where.offset, request.bytes, 0, 0,
                         "the last write of this tensor failed or was cancelled midway: write all of it again");
  }
  if (request.summed && checksum) {
    compare_checksum(request, *checksum);
  }
}

}  // namespace memascend

// The end of a request of the direct engine: installing what it wrote or checking what it read, and reporting it.
#include <exception>
#include <utility>

#include "clock.h"
#include "crc32c.h"
#include "direct_engine.h"
#include "direct_request.h"
#include "errors.h"

namespace memascend {
namespace {

constexpr int kRereads = 100;  // for a tensor that is overwritten while it is read
constexpr std::size_t kTraceRows = 1 << 20;

}  // namespace

void DirectEngine::fail(Request& request, RequestFailure failure) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (!request.failure) {
    request.failure = std::move(failure);
  }
  request.unfinished -= request.drop();  // the failing block still counts until the caller ends it
  ready_[request.write ? 1 : 0].erase({-request.priority, request.id});
}

// Called by one thread when all blocks have ended, without mutex_.
void DirectEngine::finish(const std::shared_ptr<Request>& request) {
  bool cancelled = false;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    cancelled = request->cancelled;
  }
  const char* op = request->write ? "write" : "read";
  try {
    if (request->write) {
      finish_write(*request, cancelled);
    } else if (!cancelled && !request->failure && !finish_read(*request)) {
      std::lock_guard<std::mutex> guard(mutex_);
      ++statistics_.reread;
      plan(*request);
      split(*request);
      make_ready(request);
      wake_workers();
      return;
    }
  } catch (const StorageFailure& error) {
    fail(*request,
         {op, request->key, error.device, error.offset, error.expected, error.got, error.error, error.reason});
  } catch (const std::exception& error) {
    fail(*request, {op, request->key, store_->devices()[0]->path(), 0, request->bytes, 0, 0, error.what()});
  }
  std::lock_guard<std::mutex> guard(mutex_);
  const bool failed = request->failure.has_value();
  statistics_.count_request(failed, cancelled);
  if (options_.trace && trace_.size() < kTraceRows) {
    trace_.push_back({request->id, request->write, request->key, request->bytes, request->priority,
                      request->submitted_ns, request->started_ns, monotonic_ns(),
                      failed ? "failed" : (cancelled ? "cancelled" : "ok")});
  }
  if (request->tensor) {
    leave_queue(*request, cancelled);
    request->tensor.reset();  // a caller that has waited for the request may give its space to another tensor
  }
  live_.erase(request->id);
  (request->write ? writing_ : reading_).end(monotonic_ns());
  completions_.end(request->id, {cancelled && !failed, std::move(request->failure), std::move(request->keep_alive)});
  if (stopping_) {
    work_ready_->notify_all();
  }
}
std::uint32_t DirectEngine::joined_checksum(const Request& request) {
  std::uint32_t sum = 0;
  for (std::size_t order = 0; order < request.checksums.size(); ++order) {
    sum = crc32c_join(sum, request.checksums[order], static_cast<std::uint64_t>(request.lengths[order]));
  }
  return sum;
}

void DirectEngine::finish_write(Request& request, bool cancelled) {
  if (cancelled || request.failure) {
    if (!request.tensor) {
      store_->release(request.reservation);
    }
    return;
  }
  if (request.summed) {
    request.record.checksum = joined_checksum(request);
  }
  if (request.tensor) {
    return;
  }
  (void)store_->install(request.key, std::move(request.record), request.reservation);
}

// Checks what was read. Returns false if the tensor has been written meanwhile, so that its old space may have been
// reused: the request then has the new record and must be read again.
bool DirectEngine::finish_read(Request& request) {
  if (request.tensor) {
    check_volatile_read(request);
    return true;
  }
  const RecordPointer now = store_->find(request.key);
  if (!now || now->bytes < request.offset + request.bytes) {
    throw StorageFailure("read", store_->devices()[0]->path(), 0, request.bytes, 0, 0,
                         "the tensor was erased or made smaller while it was read");
  }
  if (now->generation != request.record.generation) {
    if (++request.rereads > kRereads) {
      throw StorageFailure("read", store_->devices()[0]->path(), 0, request.bytes, 0, 0,
                           "the tensor is written faster than it can be read");
    }
    request.record = *now;
    request.summed = request.summed && now->checksum && now->bytes == request.bytes;
    return false;
  }
  if (request.summed) {
    compare_checksum(request, *request.record.checksum);
  }
  return true;
}

void DirectEngine::compare_checksum(const Request& request, std::uint32_t expected) const {
  if (const std::uint32_t sum = joined_checksum(request); sum != expected) {
    const Extent where = request.record.extents.empty() ? Extent{} : request.record.extents[0];
    throw StorageFailure("read", store_->devices()[where.member]->path(), where.offset, request.bytes, request.bytes, 0,
                         "checksum " + std::to_string(sum) + " where the index has " + std::to_string(expected));
  }
}
bool DirectEngine::cancel(std::uint64_t id) {
  require_own_process();
  std::shared_ptr<Request> request;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = live_.find(id);
    if (found == live_.end() || found->second->unfinished == 0) {
      return false;
    }
    request = found->second;
    request->cancelled = true;
    request->unfinished -= request->drop();
    ready_[request->write ? 1 : 0].erase({-request->priority, id});
    if (request->unfinished > 0) {
      return true;
    }
  }
  finish(request);
  return true;
}

}  // namespace memascend

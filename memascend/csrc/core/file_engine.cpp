#include "file_engine.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "clock.h"
#include "engine_threads.h"
#include "errors.h"
#include "file_worker.h"

namespace memascend {

FileEngine::FileEngine(int threads, std::int64_t block_bytes, IoSyscalls& calls, bool require_direct)
    : threads_(threads),
      block_bytes_(block_bytes),
      calls_(calls),
      require_direct_(require_direct),
      owner_pid_(getpid()),
      workers_(std::make_unique<std::vector<std::thread>>()) {
  if (threads < 1 || threads > 256) {
    throw Error(ErrorKind::kInvalidArgument, "file engine with " + std::to_string(threads) + " threads: use 1 to 256");
  }
  if (block_bytes < kDirectBytes || block_bytes % kDirectBytes != 0) {
    throw Error(ErrorKind::kInvalidArgument, "file engine with blocks of " + std::to_string(block_bytes) +
                                                 " bytes: use a positive multiple of 4096");
  }
  try {
    start_threads("file engine", *workers_, threads, calls_, [this](int) { work(); });
  } catch (...) {
    shutdown();
    throw;
  }
}

FileEngine::~FileEngine() { shutdown(); }

void FileEngine::shutdown() {
  if (owner_pid_ != getpid()) {
    (void)workers_.release();
    (void)work_ready_.release();
    completions_.abandon_waiters();
    return;
  }
  refuse();
  std::lock_guard<std::mutex> guard(shutdown_mutex_);
  for (std::thread& worker : *workers_) {
    worker.join();
  }
  workers_->clear();
}

void FileEngine::refuse() {
  require_own_process();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
  }
  work_ready_->notify_all();
}

void FileEngine::require_own_process() const {
  if (owner_pid_ != getpid()) {
    throw Error(ErrorKind::kState, "a file engine does not work in a forked child: make a new one after the fork");
  }
}

std::uint64_t FileEngine::submit(IoOp op, void* data, std::int64_t bytes, std::string path, std::int64_t offset,
                                 std::shared_ptr<void> keep_alive) {
  require_own_process();
  if (bytes < 0 || offset < 0 || bytes > std::numeric_limits<std::int64_t>::max() - offset - kDirectBytes ||
      (bytes > 0 && data == nullptr)) {
    throw Error(ErrorKind::kInvalidArgument,
                "cannot transfer " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + " of " +
                    path + ": length and offset must not be negative (nor end past 2^63), data not null");
  }
  auto request = std::make_shared<Request>();
  request->op = op;
  request->data = static_cast<char*>(data);
  request->bytes = bytes;
  request->path = std::move(path);
  request->offset = offset;
  request->keep_alive = std::move(keep_alive);
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (stopping_) {
      throw Error(ErrorKind::kState, "the file engine is closed: make a new one for " + request->path);
    }
    request->id = next_id_++;
    live_[request->id] = request;
    completions_.begin(request->id);
    (request->op == IoOp::kWrite ? writing_ : reading_).begin(monotonic_ns());
    queue_.push_back(request);
  }
  work_ready_->notify_all();
  return request->id;
}

void FileEngine::work() {
  Worker worker(*this);
  for (;;) {
    std::shared_ptr<Request> request;
    Piece piece{};
    {
      std::unique_lock<std::mutex> lock(mutex_);
      work_ready_->wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) {
        return;  // stopping, and nothing is left
      }
      request = queue_.front();
      const std::int64_t begin = request->offset + request->cursor;
      const std::int64_t to_boundary = block_bytes_ - begin % block_bytes_;
      piece = {request->data + request->cursor, begin, std::min(request->bytes - request->cursor, to_boundary)};
      request->cursor += piece.bytes;
      ++request->pieces_running;
      if (request->cursor == request->bytes) {
        request->handed_out = true;
        queue_.pop_front();
      }
    }
    worker.run(*request, piece);
    finish_piece(request);
  }
}

void FileEngine::finish_piece(const std::shared_ptr<Request>& request) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (--request->pieces_running > 0 || !request->handed_out || request->ending) {
      return;
    }
    request->ending = true;
  }
  finish(request);
}

// Called by one thread, when no other thread uses the request any more; without mutex_.
void FileEngine::finish(const std::shared_ptr<Request>& request) {
  for (const int fd : {request->direct_fd, request->buffered_fd}) {
    if (fd >= 0 && calls_.close(fd) != 0 && errno != EINTR && request->op == IoOp::kWrite && !request->failure) {
      request->failure = {"write",        "",
                          request->path,  request->offset,
                          request->bytes, request->bytes,
                          errno,          std::string("closing the file: ") + std::strerror(errno)};
    }
  }
  const bool failed = request->failure.has_value();
  {
    std::lock_guard<std::mutex> guard(statistics_mutex_);
    statistics_.count_request(failed, request->cancelled);
  }
  std::lock_guard<std::mutex> guard(mutex_);
  live_.erase(request->id);
  (request->op == IoOp::kWrite ? writing_ : reading_).end(monotonic_ns());
  completions_.end(request->id,
                   {request->cancelled && !failed, std::move(request->failure), std::move(request->keep_alive)});
}

bool FileEngine::cancel(std::uint64_t id) {
  require_own_process();
  std::shared_ptr<Request> request;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = live_.find(id);
    if (found == live_.end() || found->second->ending) {
      return false;
    }
    request = found->second;
    request->cancelled = true;
    if (!request->handed_out) {
      request->handed_out = true;
      std::erase(queue_, request);
    }
    if (request->pieces_running > 0) {
      return true;  // the thread that ends the last piece ends the request
    }
    request->ending = true;
  }
  finish(request);
  return true;
}

std::optional<RequestOutcome> FileEngine::wait_for(std::uint64_t request, double seconds) {
  require_own_process();
  std::unique_lock<std::mutex> lock(mutex_);
  return completions_.wait_for(lock, request, seconds);
}

std::optional<std::vector<EndedRequest>> FileEngine::wait(double seconds) {
  require_own_process();
  std::unique_lock<std::mutex> lock(mutex_);
  return completions_.wait(lock, seconds);
}

std::vector<EndedRequest> FileEngine::take_ended() {
  require_own_process();
  std::lock_guard<std::mutex> guard(mutex_);
  return completions_.take();
}

int FileEngine::completion_fd() {
  require_own_process();
  std::lock_guard<std::mutex> guard(mutex_);
  return completions_.fd();
}

std::int64_t FileEngine::pending() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return static_cast<std::int64_t>(live_.size());
}

std::string FileEngine::pending_path() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return live_.empty() ? "" : live_.begin()->second->path;
}

std::string FileEngine::buffered_path() const {
  std::lock_guard<std::mutex> guard(statistics_mutex_);
  return buffered_path_;
}

IoStatistics FileEngine::statistics() const {
  IoStatistics out;
  {
    std::lock_guard<std::mutex> guard(statistics_mutex_);
    out = statistics_;
  }
  std::lock_guard<std::mutex> guard(mutex_);
  out.reading_s = reading_.seconds(monotonic_ns());
  out.writing_s = writing_.seconds(monotonic_ns());
  out.finish();
  return out;
}

}  // namespace memascend

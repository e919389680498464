#include "file_engine.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>

#include "errors.h"

namespace memascend {
namespace {

// File blocks go directly in multiples of this. Not the device's 512: a page must never be written partly through the
// page cache and partly past it, or the cached page is written back over the direct part.
constexpr std::int64_t kDirectBytes = 4096;
constexpr std::uintptr_t kDirectMemoryAlignment = 512;
constexpr std::int64_t kBounceBytes = 256 * 1024;

std::int64_t round_down(std::int64_t value) { return value & ~(kDirectBytes - 1); }
std::int64_t round_up(std::int64_t value) { return round_down(value + kDirectBytes - 1); }
bool memory_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % kDirectMemoryAlignment == 0; }

int open_file(const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }

struct FreeDeleter {
  void operator()(void* pointer) const noexcept { std::free(pointer); }
};

}  // namespace

IoSystemCalls kernel_io_calls() { return {open_file, ::pread, ::pwrite, ::close}; }

struct FileEngine::Request {
  std::uint64_t id;
  IoOp op;
  char* data;
  std::int64_t bytes;
  std::string path;
  std::int64_t offset;
  std::shared_ptr<void> keep_alive;

  // Guarded by FileEngine::mutex_.
  std::int64_t cursor = 0;  // bytes handed out to workers
  bool handed_out = false;
  int pieces_running = 0;

  // Guarded by `mutex`.
  std::mutex mutex;
  int direct_fd = -1;
  int buffered_fd = -1;
  bool failed = false;
  IoFailure failure;

  std::atomic<bool> direct{true};  // false once the file system has refused O_DIRECT
};

// What a worker transfers in one go: never across a block boundary of the file.
struct FileEngine::Piece {
  char* data;
  std::int64_t offset;
  std::int64_t bytes;
};

// The transfer loops. One per thread; owns the bounce buffer.
class FileEngine::Worker {
 public:
  explicit Worker(FileEngine& engine) : engine_(engine) {}
  ~Worker() { engine_.bounce_buffer_bytes_ -= bounce_ ? kBounceBytes : 0; }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void run(Request& request, const Piece& piece) {
    {
      std::lock_guard<std::mutex> guard(request.mutex);
      if (request.failed) {
        return;
      }
    }
    if (piece.bytes == 0) {  // an empty tensor: the file must still exist, or come into being
      (void)descriptor(request, piece, 0, false);
      return;
    }
    std::int64_t done = 0;
    while (done < piece.bytes) {
      const std::int64_t moved = request.op == IoOp::kRead ? read_some(request, piece, done)
                                                           : write_some(request, piece, done);
      if (moved == kFailed) {
        return;
      }
      done += moved;
    }
    (request.op == IoOp::kRead ? engine_.bytes_read_ : engine_.bytes_written_) += done;
  }

 private:
  static constexpr std::int64_t kFailed = -1;

  // One system call's worth of reading from `done` on. Returns bytes moved (0: try again) or kFailed.
  std::int64_t read_some(Request& request, const Piece& piece, std::int64_t done) {
    if (!request.direct.load()) {
      return read_buffered(request, piece, done);
    }
    const int fd = descriptor(request, piece, done, true);
    if (fd < 0) {
      return fd == kTryBuffered ? 0 : kFailed;
    }
    char* data = piece.data + done;
    const std::int64_t offset = piece.offset + done;
    const std::int64_t left = piece.bytes - done;
    if (offset % kDirectBytes != 0 || left < kDirectBytes || !memory_aligned(data)) {
      return read_bounced(request, piece, done, fd);
    }
    const ssize_t result = engine_.calls_.pread(fd, data, static_cast<std::size_t>(round_down(left)), offset);
    return judge(request, piece, done, true, result);
  }

  std::int64_t read_bounced(Request& request, const Piece& piece, std::int64_t done, int fd) {
    const std::int64_t offset = piece.offset + done;
    const std::int64_t left = piece.bytes - done;
    const std::int64_t base = round_down(offset);
    const std::int64_t ask = std::min(kBounceBytes, round_up(offset + left) - base);
    char* bounce = bounce_buffer(request, piece, done);
    if (bounce == nullptr) {
      return kFailed;
    }
    const ssize_t result = engine_.calls_.pread(fd, bounce, static_cast<std::size_t>(ask), base);
    if (result < 0) {
      return judge(request, piece, done, true, result);
    }
    const std::int64_t skip = offset - base;
    const std::int64_t moved = std::min<std::int64_t>(left, result - skip);
    if (moved <= 0) {  // the end of the file, or a short transfer: only an unaligned read from `offset` can tell
      return read_buffered(request, piece, done);
    }
    std::memcpy(piece.data + done, bounce + skip, static_cast<std::size_t>(moved));
    engine_.bounced_bytes_ += moved;
    return moved;
  }

  std::int64_t read_buffered(Request& request, const Piece& piece, std::int64_t done) {
    const int fd = descriptor(request, piece, done, false);
    if (fd < 0) {
      return kFailed;
    }
    const ssize_t result = engine_.calls_.pread(fd, piece.data + done, static_cast<std::size_t>(piece.bytes - done),
                                                piece.offset + done);
    const std::int64_t moved = judge(request, piece, done, false, result);
    engine_.buffered_bytes_ += std::max<std::int64_t>(0, moved);
    return moved;
  }

  std::int64_t write_some(Request& request, const Piece& piece, std::int64_t done) {
    const char* data = piece.data + done;
    const std::int64_t offset = piece.offset + done;
    const std::int64_t left = piece.bytes - done;
    const bool whole = offset % kDirectBytes == 0 && left >= kDirectBytes;
    const bool direct = whole && request.direct.load();
    const int fd = descriptor(request, piece, done, direct);
    if (fd < 0) {
      return fd == kTryBuffered ? 0 : kFailed;
    }
    std::int64_t ask = left;
    if (direct) {
      ask = round_down(left);
    } else if (request.direct.load()) {  // up to the next block, so that the middle can go directly
      ask = std::min(left, kDirectBytes - offset % kDirectBytes);
    }
    const bool bounced = direct && !memory_aligned(data);
    if (bounced) {
      char* bounce = bounce_buffer(request, piece, done);
      if (bounce == nullptr) {
        return kFailed;
      }
      ask = std::min(ask, kBounceBytes);
      std::memcpy(bounce, data, static_cast<std::size_t>(ask));
      data = bounce;
    }
    const ssize_t result = engine_.calls_.pwrite(fd, data, static_cast<std::size_t>(ask), offset);
    const std::int64_t moved = judge(request, piece, done, direct, result);
    if (moved > 0) {
      engine_.bounced_bytes_ += bounced ? moved : 0;
      engine_.buffered_bytes_ += direct ? 0 : moved;
    }
    return moved;
  }

  // Turns the result of a transfer into progress, another try (0) or a failure.
  std::int64_t judge(Request& request, const Piece& piece, std::int64_t done, bool direct, std::int64_t result) {
    if (result > 0) {
      return result;
    }
    if (result == 0) {
      fail(request, piece, done, 0, request.op == IoOp::kRead ? "end of file" : "the file takes no more bytes");
      return kFailed;
    }
    if (errno == EINTR) {
      return 0;
    }
    if (errno == EINVAL && direct) {  // the file system opened the file with O_DIRECT but does not serve it
      request.direct.store(false);
      return 0;
    }
    fail(request, piece, done, errno, "");
    return kFailed;
  }

  void fail(Request& request, const Piece& piece, std::int64_t done, int error, std::string reason) {
    std::lock_guard<std::mutex> guard(request.mutex);
    if (request.failed) {
      return;
    }
    request.failed = true;
    request.failure = {request.op, request.path, piece.offset, piece.bytes, done, error,
                       error != 0 ? std::strerror(error) : std::move(reason)};
  }

  // Opens on first use. kTryBuffered: O_DIRECT was refused, choose again.
  static constexpr int kTryBuffered = -2;
  int descriptor(Request& request, const Piece& piece, std::int64_t done, bool direct) {
    int error = 0;
    {
      std::lock_guard<std::mutex> guard(request.mutex);
      int& fd = direct ? request.direct_fd : request.buffered_fd;
      if (fd >= 0) {
        return fd;
      }
      const int access = request.op == IoOp::kRead ? O_RDONLY : O_WRONLY | O_CREAT;
      do {
        fd = engine_.calls_.open(request.path.c_str(), access | O_CLOEXEC | (direct ? O_DIRECT : 0), 0644);
      } while (fd < 0 && errno == EINTR);
      if (fd >= 0) {
        return fd;
      }
      error = errno;
    }
    if (direct && error == EINVAL) {
      request.direct.store(false);
      return kTryBuffered;
    }
    fail(request, piece, done, error, "");
    return -1;
  }

  char* bounce_buffer(Request& request, const Piece& piece, std::int64_t done) {
    if (!bounce_) {
      bounce_.reset(static_cast<char*>(std::aligned_alloc(kDirectBytes, kBounceBytes)));
      if (!bounce_) {
        fail(request, piece, done, ENOMEM, "");
        return nullptr;
      }
      engine_.bounce_buffer_bytes_ += kBounceBytes;
    }
    return bounce_.get();
  }

  FileEngine& engine_;
  std::unique_ptr<char, FreeDeleter> bounce_;
};

FileEngine::FileEngine(int threads, std::int64_t block_bytes, IoSystemCalls calls)
    : threads_(threads),
      block_bytes_(block_bytes),
      calls_(calls),
      owner_pid_(getpid()),
      workers_(std::make_unique<std::vector<std::thread>>()) {
  if (threads < 1 || threads > 256) {
    throw Error(ErrorKind::kInvalidArgument,
                "file engine with " + std::to_string(threads) + " threads: use 1 to 256");
  }
  if (block_bytes < kDirectBytes || block_bytes % kDirectBytes != 0) {
    throw Error(ErrorKind::kInvalidArgument, "file engine with blocks of " + std::to_string(block_bytes) +
                                                 " bytes: use a positive multiple of 4096");
  }
  // Signals belong to the program's own threads: workers start with all of them blocked.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (int i = 0; i < threads; ++i) {
    workers_->emplace_back([this] { work(); });
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

FileEngine::~FileEngine() { shutdown(); }

void FileEngine::shutdown() {
  if (owner_pid_ != getpid()) {
    (void)workers_.release();
    (void)work_ready_.release();
    (void)all_done_.release();
    return;
  }
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
  }
  work_ready_->notify_all();
  std::lock_guard<std::mutex> guard(shutdown_mutex_);
  for (std::thread& worker : *workers_) {
    worker.join();
  }
  workers_->clear();
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
    throw Error(ErrorKind::kInvalidArgument, "cannot transfer " + std::to_string(bytes) + " bytes at offset " +
                                                 std::to_string(offset) + " of " + path +
                                                 ": length and offset must not be negative (nor end past 2^63), data not null");
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
    ++unfinished_;
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
    finish_piece(*request);
  }
}

void FileEngine::finish_piece(Request& request) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (--request.pieces_running > 0 || !request.handed_out) {
    return;
  }
  // The last piece of the request: nobody else touches it any more.
  for (const int fd : {request.direct_fd, request.buffered_fd}) {
    if (fd >= 0 && calls_.close(fd) != 0 && errno != EINTR && request.op == IoOp::kWrite && !request.failed) {
      request.failed = true;
      request.failure = {request.op, request.path, request.offset, request.bytes, request.bytes, errno,
                         std::string("closing the file: ") + std::strerror(errno)};
    }
  }
  if (request.failed) {
    failures_.push_back(std::move(request.failure));
  }
  if (request.keep_alive) {  // not dropped here: a tensor's last reference may need locks that a worker must not take
    finished_keep_alive_.push_back(std::move(request.keep_alive));
  }
  ++ops_;
  ++completed_;
  if (--unfinished_ == 0) {
    all_done_->notify_all();
  }
}

IoWaitResult FileEngine::wait() {
  require_own_process();
  std::unique_lock<std::mutex> lock(mutex_);
  all_done_->wait(lock, [this] { return unfinished_ == 0; });
  IoWaitResult result{completed_, std::move(failures_), std::move(finished_keep_alive_)};
  completed_ = 0;
  failures_.clear();
  finished_keep_alive_.clear();
  return result;
}

std::int64_t FileEngine::pending() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return unfinished_;
}

IoCounters FileEngine::counters() const noexcept {
  return {bytes_read_.load(), bytes_written_.load(), ops_.load(), bounced_bytes_.load(), buffered_bytes_.load()};
}

}  // namespace memascend

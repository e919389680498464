// Requests of a FileEngine and the loops that transfer them. For file_engine.cpp only.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "clock.h"
#include "file_engine.h"

namespace memascend {

// Unit of direct transfers. It is a page and not the device's 512 bytes, because a page must not be written partly
// through the page cache and partly directly: writing back the cached page would overwrite the direct part.
constexpr std::int64_t kDirectBytes = 4096;
constexpr std::uint32_t kLeastMemoryAlignment = 512;  // as in device.h
constexpr std::int64_t kBounceBytes = 256 * 1024;

inline std::int64_t round_down(std::int64_t value) { return value & ~(kDirectBytes - 1); }
inline std::int64_t round_up(std::int64_t value) { return round_down(value + kDirectBytes - 1); }

inline const char* name_of(IoOp op) { return op == IoOp::kRead ? "read" : "write"; }

struct FreeDeleter {
  void operator()(void* pointer) const noexcept { std::free(pointer); }
};

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
  bool handed_out = false;  // all bytes were handed out, or the rest was dropped
  int pieces_running = 0;
  bool cancelled = false;
  bool ending = false;      // a thread is ending it

  // Guarded by `mutex`.
  std::mutex mutex;
  int direct_fd = -1;
  int buffered_fd = -1;
  std::optional<RequestFailure> failure;

  std::atomic<bool> direct{true};  // false once the file system has refused O_DIRECT
  std::atomic<std::uint32_t> memory_alignment{kLeastMemoryAlignment};  // of direct transfers
  [[nodiscard]] bool takes(const void* memory) const {
    return reinterpret_cast<std::uintptr_t>(memory) % memory_alignment.load() == 0;
  }
};

// Bytes that a worker handles at a time; never across a block boundary of the file.
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
      if (request.failure) {
        return;
      }
    }
    if (piece.bytes == 0) {  // an empty tensor: the file must still exist (read) or be made (write)
      (void)descriptor(request, piece, 0, false);
      return;
    }
    std::int64_t done = 0;
    while (done < piece.bytes) {
      const std::int64_t moved =
          request.op == IoOp::kRead ? read_some(request, piece, done) : write_some(request, piece, done);
      if (moved == kFailed) {
        return;
      }
      done += moved;
    }
    std::lock_guard<std::mutex> guard(engine_.statistics_mutex_);
    (request.op == IoOp::kRead ? engine_.statistics_.bytes_read : engine_.statistics_.bytes_written) += done;
  }

 private:
  static constexpr std::int64_t kFailed = -1;

  // Makes one read call from `done` on. Returns the bytes moved (0: try again) or kFailed.
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
    if (offset % kDirectBytes != 0 || left < kDirectBytes || !request.takes(data)) {
      return read_bounced(request, piece, done, fd);
    }
    const ssize_t result = transfer(request.op, fd, data, round_down(left), offset);
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
    const ssize_t result = transfer(request.op, fd, bounce, ask, base);
    if (result < 0) {
      return judge(request, piece, done, true, result);
    }
    const std::int64_t skip = offset - base;
    const std::int64_t moved = std::min<std::int64_t>(left, result - skip);
    if (moved <= 0) {  // the end of the file or a short transfer; only an unaligned read from `offset` shows which
      return read_buffered(request, piece, done);
    }
    std::memcpy(piece.data + done, bounce + skip, static_cast<std::size_t>(moved));
    count_copied(moved, 0);
    return moved;
  }

  std::int64_t read_buffered(Request& request, const Piece& piece, std::int64_t done) {
    const int fd = descriptor(request, piece, done, false);
    if (fd < 0) {
      return kFailed;
    }
    const ssize_t result = transfer(request.op, fd, piece.data + done, piece.bytes - done, piece.offset + done);
    const std::int64_t moved = judge(request, piece, done, false, result);
    count_copied(0, std::max<std::int64_t>(0, moved));
    return moved;
  }

  std::int64_t write_some(Request& request, const Piece& piece, std::int64_t done) {
    char* data = piece.data + done;
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
    } else if (request.direct.load()) {  // up to the next block, so that whole blocks can be written directly
      ask = std::min(left, kDirectBytes - offset % kDirectBytes);
    }
    const bool bounced = direct && !request.takes(data);
    if (bounced) {
      char* bounce = bounce_buffer(request, piece, done);
      if (bounce == nullptr) {
        return kFailed;
      }
      ask = std::min(ask, kBounceBytes);
      std::memcpy(bounce, data, static_cast<std::size_t>(ask));
      data = bounce;
    }
    const ssize_t result = transfer(request.op, fd, data, ask, offset);
    const std::int64_t moved = judge(request, piece, done, direct, result);
    if (moved > 0) {
      count_copied(bounced ? moved : 0, direct ? 0 : moved);
    }
    return moved;
  }

  // Makes one system call and counts it. Returns -1 and sets errno as the call does.
  ssize_t transfer(IoOp op, int fd, char* data, std::int64_t bytes, std::int64_t offset) {
    const std::int64_t begin = monotonic_ns();
    const int depth = ++engine_.in_kernel_;
    const ssize_t result = op == IoOp::kRead ? engine_.calls_.pread(fd, data, static_cast<std::size_t>(bytes), offset)
                                             : engine_.calls_.pwrite(fd, data, static_cast<std::size_t>(bytes), offset);
    const int error = errno;
    --engine_.in_kernel_;
    {
      std::lock_guard<std::mutex> guard(engine_.statistics_mutex_);
      IoStatistics& counted = engine_.statistics_;
      counted.count_command(depth);
      (op == IoOp::kRead ? counted.read_latency : counted.write_latency).add((monotonic_ns() - begin) / 1000);
      counted.short_transfers += result >= 0 && result < bytes ? 1 : 0;
      counted.repeated += result < 0 && (error == EINTR || error == EAGAIN) ? 1 : 0;
    }
    errno = error;
    return result;
  }

  void count_copied(std::int64_t bounced, std::int64_t buffered) {
    std::lock_guard<std::mutex> guard(engine_.statistics_mutex_);
    engine_.statistics_.bounced_bytes += bounced;
    engine_.statistics_.buffered_bytes += buffered;
  }

  // Turns the result of a transfer into progress, another try (0) or a failure.
  std::int64_t judge(Request& request, const Piece& piece, std::int64_t done, bool direct, std::int64_t result) {
    if (result > 0) {
      tries_ = 0;
      return result;
    }
    if (result == 0) {
      fail(request, piece, done, 0, request.op == IoOp::kRead ? "end of file" : "the file takes no more bytes");
      return kFailed;
    }
    if (errno == EINTR || (errno == EAGAIN && ++tries_ <= kTries)) {
      return 0;
    }
    if (errno == EINVAL && direct) {
      if (request.memory_alignment.exchange(kDirectBytes) < kDirectBytes) {
        return 0;  // perhaps the device needs more alignment than the kernel says: use the bounce buffer
      }
      return use_page_cache(request, piece, done) ? 0 : kFailed;  // the open accepted O_DIRECT, the transfer did not
    }
    fail(request, piece, done, errno, "");
    return kFailed;
  }

  void fail(Request& request, const Piece& piece, std::int64_t done, int error, std::string reason) {
    std::lock_guard<std::mutex> guard(request.mutex);
    if (!request.failure) {
      request.failure = {
          name_of(request.op), "",   request.path, piece.offset,
          piece.bytes,         done, error,        error != 0 ? std::strerror(error) : std::move(reason)};
    }
  }

  // Called when O_DIRECT was refused. Returns false if the engine requires it; the request has then failed.
  bool use_page_cache(Request& request, const Piece& piece, std::int64_t done) {
    if (engine_.require_direct_) {
      fail(request, piece, done, 0,
           "its file system refuses O_DIRECT, which this engine requires: use a folder on ext4 or XFS on the SSD "
           "itself, or make the engine without require_direct");
      return false;
    }
    request.direct.store(false);
    std::lock_guard<std::mutex> guard(engine_.statistics_mutex_);
    if (engine_.buffered_path_.empty()) {
      engine_.buffered_path_ = request.path;
    }
    return true;
  }

  // Files are never written through a symbolic link, except for the names of the process's own descriptors.
  static int write_access(const std::string& path) {
    constexpr std::string_view kDescriptors = "/proc/self/fd/";
    return path.compare(0, kDescriptors.size(), kDescriptors) == 0 ? O_WRONLY : O_WRONLY | O_CREAT | O_NOFOLLOW;
  }

  // Returns the descriptor, opening the file on first use; kTryBuffered if O_DIRECT was refused and the page cache is
  // to be used; another negative number if the request has failed.
  static constexpr int kTryBuffered = -2;
  int descriptor(Request& request, const Piece& piece, std::int64_t done, bool direct) {
    int error = 0;
    {
      std::lock_guard<std::mutex> guard(request.mutex);
      int& fd = direct ? request.direct_fd : request.buffered_fd;
      if (fd >= 0) {
        return fd;
      }
      const int access = request.op == IoOp::kRead ? O_RDONLY : write_access(request.path);
      do {
        fd = engine_.calls_.open(request.path.c_str(), access | O_CLOEXEC | (direct ? O_DIRECT : 0), 0600);
      } while (fd < 0 && errno == EINTR);
      if (fd >= 0 && (!direct || can_go_directly(request, fd))) {
        return fd;
      }
      error = fd >= 0 ? EINVAL : errno;
      if (fd >= 0) {
        (void)engine_.calls_.close(std::exchange(fd, -1));
      }
    }
    if (direct && error == EINVAL) {
      return use_page_cache(request, piece, done) ? kTryBuffered : -1;
    }
    fail(request, piece, done, error, "");
    return -1;
  }

  bool can_go_directly(Request& request, int fd) {
    const DirectLimits limits = engine_.calls_.direct_limits(fd);
    if (!limits.supported || std::max(limits.memory, limits.offset) > kDirectBytes) {
      return false;
    }
    request.memory_alignment.store(std::max(kLeastMemoryAlignment, limits.memory));
    return true;
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

  static constexpr int kTries = 1000;  // for a call that the kernel temporarily refuses

  FileEngine& engine_;
  std::unique_ptr<char, FreeDeleter> bounce_;
  int tries_ = 0;
};

}  // namespace memascend

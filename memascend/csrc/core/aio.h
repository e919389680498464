// Asynchronous transfers by raw system calls: io_uring, or libaio where that is not to be had. One thread each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "io_syscalls.h"

namespace memascend {

struct AioEvent {
  std::uint64_t token = 0;
  int result = 0;  // bytes, or a negative errno
};

enum class AioKind { kUring, kLibaio };
[[nodiscard]] const char* aio_kind_name(AioKind kind) noexcept;

// Used by the thread that made it, except for `wake`. Commands are taken in order and complete in any.
class AioBackend {
 public:
  AioBackend() = default;
  AioBackend(const AioBackend&) = delete;
  AioBackend& operator=(const AioBackend&) = delete;
  virtual ~AioBackend() = default;

  // Accepts a command; it goes to the kernel with the next `run`. At most `depth` may be unfinished.
  virtual void queue(const AioCommand& command) = 0;

  // Hands over what is queued and takes what has completed, at most `room`. With `block` it returns only with an
  // event, after `wake`, or when the kernel asks to try again (EAGAIN, EINTR: no events). A command that the kernel
  // refuses comes back as an event; a call that fails for another reason fails every command that it had not taken.
  virtual int run(AioEvent* events, int room, bool block) = 0;

  // Makes a blocked `run` return. Any thread.
  virtual void wake() noexcept = 0;

  // Buffer `index` < kBuffers becomes [data, data + bytes), at most 1 GiB. False: not here, use plain transfers.
  virtual bool register_buffer(int index, void* data, std::size_t bytes) = 0;
  // Transfers in flight keep the memory pinned until they end; what is queued goes as a plain transfer.
  virtual void unregister_buffer(int index) = 0;

  static constexpr int kBuffers = 256;
  static constexpr std::size_t kBufferBytes = std::size_t{1} << 30;
};

// `files` are descriptors; with io_uring they are registered, so that the ring holds them open until its last
// transfer has ended, also after a kill. Throws Error(kState) with the fix if the kernel refuses.
[[nodiscard]] std::unique_ptr<AioBackend> make_uring(int depth, const std::vector<int>& files, IoSyscalls& calls);
[[nodiscard]] std::unique_ptr<AioBackend> make_libaio(int depth, const std::vector<int>& files, IoSyscalls& calls);
[[nodiscard]] std::unique_ptr<AioBackend> make_backend(AioKind kind, int depth, const std::vector<int>& files,
                                                       IoSyscalls& calls);

// Empty if the kernel offers it, else why not.
[[nodiscard]] std::string aio_missing(AioKind kind, IoSyscalls& calls);

// "auto" (io_uring if it is there), "io_uring" or "libaio". Throws Error.
[[nodiscard]] AioKind choose_aio(const std::string& name, IoSyscalls& calls);

}  // namespace memascend

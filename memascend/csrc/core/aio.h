// Asynchronous transfers by raw system calls: io_uring, or libaio where io_uring is unavailable. Each backend object
// belongs to one thread.
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

// Not thread-safe: only the thread that made it may use it, except for `wake`. Commands are submitted in order and
// complete in any order.
class AioBackend {
 public:
  AioBackend() = default;
  AioBackend(const AioBackend&) = delete;
  AioBackend& operator=(const AioBackend&) = delete;
  virtual ~AioBackend() = default;

  // Accepts a command, which goes to the kernel with the next `run`. At most `depth` commands may be unfinished.
  virtual void queue(const AioCommand& command) = 0;

  // Submits queued commands and returns the number of completions written to `events`, at most `capacity`. With `block`
  // it returns only with an event, after `wake`, or without events when the kernel asks to try again (EAGAIN, EINTR). A
  // command that the kernel refuses comes back as an event. If the call fails for another reason, every command that
  // the kernel had not taken yet fails with that error.
  virtual int run(AioEvent* events, int capacity, bool block) = 0;

  // Makes a blocked `run` return. May be called by any thread.
  virtual void wake() noexcept = 0;

  // Registers [data, data + bytes), at most 1 GiB, as buffer `index` < kBuffers. Returns false if that is not possible
  // here; plain transfers then still work.
  virtual bool register_buffer(int index, void* data, std::size_t bytes) = 0;
  // Transfers in flight keep the memory pinned until they end; queued commands on it become plain transfers.
  virtual void unregister_buffer(int index) = 0;

  static constexpr int kBuffers = 256;
  static constexpr std::size_t kBufferBytes = std::size_t{1} << 30;
};

// Make a backend. `files` are descriptors. With io_uring they are registered, so that the ring keeps them open until
// its last transfer has ended, even if the process is killed. Throw Error(kState), which names the fix, if the kernel
// refuses.
[[nodiscard]] std::unique_ptr<AioBackend> make_uring(int depth, const std::vector<int>& files, IoSyscalls& calls);
[[nodiscard]] std::unique_ptr<AioBackend> make_libaio(int depth, const std::vector<int>& files, IoSyscalls& calls);
[[nodiscard]] std::unique_ptr<AioBackend> make_backend(AioKind kind, int depth, const std::vector<int>& files,
                                                       IoSyscalls& calls);

// Returns why the kernel does not offer this backend, or an empty string if it does.
[[nodiscard]] std::string aio_missing(AioKind kind, IoSyscalls& calls);

// Returns the backend for "auto" (io_uring if it is available), "io_uring" or "libaio". Throws Error for another name,
// or if io_uring is named and unavailable.
[[nodiscard]] AioKind choose_aio(const std::string& name, IoSyscalls& calls);

}  // namespace memascend

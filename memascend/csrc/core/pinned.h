// Page-locked host memory, and the registry of live blocks.
//
// Each block is a separate anonymous private mapping: it starts on a page, shares no page with other heap objects
// (mlock works by page), has no allocator header, and is returned to the kernel as soon as it is released.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "fork_guard.h"
#include "placement.h"

namespace memascend {

inline constexpr std::int64_t kPageBytes = 4096;
inline constexpr std::int64_t kHugePageBytes = std::int64_t{2} << 20;

// kTransparent: the mapping starts at a huge page boundary and the kernel is asked to use huge pages (MADV_HUGEPAGE). A
// remainder at the end stays on small pages, so the size is as exact as with kSmall. kReserved: pages that the
// administrator has reserved (MAP_HUGETLB); sizes are whole huge pages.
enum class PageKind { kSmall, kTransparent, kReserved };

struct PinnedBlock {
  std::uint64_t id = 0;
  std::uintptr_t address = 0;
  std::int64_t requested_bytes = 0;  // as the caller asked for
  std::int64_t reserved_bytes = 0;   // mapped and resident: a multiple of the page size
  PageKind pages = PageKind::kSmall;
  bool locked = false;  // cannot be swapped out: mlock succeeded, or these are reserved huge pages
  bool registered = false;  // known to the CUDA driver
  std::int64_t born_ns = 0;
  pid_t owner_pid = 0;
};

struct PinnedEvent {
  bool is_free = false;
  PinnedBlock block;
  std::int64_t t_ns = 0;
};

// Undoes a CUDA registration. Returns false if that fails (the interpreter has ended): the block is then leaked,
// because it is an error to unmap memory that the driver still has registered, and the process is ending anyway.
using UnregisterHook = bool (*)(void* address);

// Thread-safe. The process uses one registry (`instance`, never destroyed, since tensors may outlive static
// destruction); tests make their own.
class PinnedRegistry {
 public:
  static PinnedRegistry& instance();

  // Maps `reserved_bytes`, applies the placement, locks the pages (or touches each one if locking is refused and not
  // required) and registers the block. Throws Error: kInvalidArgument for invalid sizes; kOutOfMemory if the memory
  // cannot be mapped, for the memlock limit, and if there are too few reserved huge pages. The caller must check that
  // RAM and control groups have enough free memory (memascend/memory/cgroup.py), or the kernel kills the process.
  [[nodiscard]] PinnedBlock allocate(std::int64_t requested_bytes, std::int64_t reserved_bytes, bool lock,
                                     bool require_lock, PageKind pages = PageKind::kSmall,
                                     const Placement& placement = {});

  // Frees the block at `address`. Returns false if no live block starts there (a second release, a foreign address).
  bool release(std::uintptr_t address) noexcept;

  // Returns whether [address, address + bytes) is inside one live block.
  [[nodiscard]] bool contains(std::uintptr_t address, std::int64_t bytes) const;

  [[nodiscard]] std::vector<PinnedBlock> live() const;
  [[nodiscard]] std::vector<PinnedEvent> drain_events();

  // Records that the CUDA driver knows the block: it is unregistered before it is unmapped, and forked children do not
  // inherit it. Throws Error(kInvalidArgument) if there is no such block.
  void mark_registered(std::uint64_t id);
  void set_unregister_hook(UnregisterHook hook) noexcept;

  // Fork safety: the registry is locked during fork(), so that the child finds it consistent.
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  void log(bool is_free, const PinnedBlock& block, std::int64_t t_ns);

  mutable std::mutex mutex_;
  std::map<std::uintptr_t, PinnedBlock> blocks_;
  std::map<std::uintptr_t, std::unique_ptr<ForkGuard>> guards_;  // of blocks registered with the driver
  std::vector<PinnedEvent> events_;
  std::uint64_t next_id_ = 1;
  UnregisterHook unregister_hook_ = nullptr;
};

// Makes whole pages resident, on the nodes that the current memory policy selects.
void touch_pages(void* address, std::int64_t bytes);

// Returns the soft RLIMIT_MEMLOCK in bytes, or -1 if it is unlimited.
[[nodiscard]] std::int64_t memlock_limit_bytes();

}  // namespace memascend

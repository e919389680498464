// Page-locked host memory, and the account of which blocks are live.
//
// Blocks are anonymous private mappings of their own: they start on a page, share no page with other heap objects
// (mlock works by page), carry no allocator header, and go back to the kernel the moment they are released.
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

// kTransparent: the mapping starts on a huge page and the kernel is asked to use them (MADV_HUGEPAGE); what is less
// than one at the end stays on small pages, so the size is as exact as with kSmall. kReserved: pages that the
// administrator has set aside (MAP_HUGETLB); sizes are whole huge pages.
enum class PageKind { kSmall, kTransparent, kReserved };

struct PinnedBlock {
  std::uint64_t id = 0;
  std::uintptr_t address = 0;
  std::int64_t requested_bytes = 0;  // what the caller asked for
  std::int64_t reserved_bytes = 0;   // what is mapped and resident: a multiple of the page
  PageKind pages = PageKind::kSmall;
  bool locked = false;  // cannot be swapped out: mlock succeeded, or reserved huge pages, which never are
  bool registered = false;  // known to the CUDA driver
  std::int64_t born_ns = 0;
  pid_t owner_pid = 0;
};

struct PinnedEvent {
  bool is_free = false;
  PinnedBlock block;
  std::int64_t t_ns = 0;
};

// Undoes a CUDA registration. Returns false if it could not (interpreter gone): the block is then leaked, because
// unmapping memory that the driver still has registered is an error, and the process is ending anyway.
using UnregisterHook = bool (*)(void* address);

// Thread-safe. One registry serves the process (`instance`, never destroyed: tensors may outlive static
// destruction); tests make their own.
class PinnedRegistry {
 public:
  static PinnedRegistry& instance();

  // Maps `reserved_bytes`, sets where they are to lie, locks them (or touches every page if locking is refused and not
  // required) and books the block. Throws Error: kInvalidArgument for sizes, kOutOfMemory for what cannot be mapped,
  // the memlock limit and reserved huge pages. Whether RAM and control groups have room is the caller's to ask
  // (memascend/memory/cgroup.py): beyond that the kernel kills.
  [[nodiscard]] PinnedBlock allocate(std::int64_t requested_bytes, std::int64_t reserved_bytes, bool lock,
                                     bool require_lock, PageKind pages = PageKind::kSmall,
                                     const Placement& placement = {});

  // Frees a block by its first address; false if no live block starts there (a second release, a foreign address).
  bool release(std::uintptr_t address) noexcept;

  // True if [address, address + bytes) lies inside one live block.
  [[nodiscard]] bool contains(std::uintptr_t address, std::int64_t bytes) const;

  [[nodiscard]] std::vector<PinnedBlock> live() const;
  [[nodiscard]] std::vector<PinnedEvent> drain_events();

  // The driver knows the block: it is unregistered before it is unmapped, and forked children do not get it.
  void mark_registered(std::uint64_t id);
  void set_unregister_hook(UnregisterHook hook) noexcept;

  // Fork safety: the registry's lock is held across fork() so that the child finds it consistent.
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  void log(bool is_free, const PinnedBlock& block, std::int64_t t_ns);

  mutable std::mutex mutex_;
  std::map<std::uintptr_t, PinnedBlock> blocks_;
  std::map<std::uintptr_t, std::unique_ptr<ForkGuard>> guards_;  // of blocks that are registered
  std::vector<PinnedEvent> events_;
  std::uint64_t next_id_ = 1;
  UnregisterHook unregister_hook_ = nullptr;
};

// Makes whole pages resident, where the policy says that holds at this moment.
void touch_pages(void* address, std::int64_t bytes);

// Soft RLIMIT_MEMLOCK in bytes; -1 if unlimited.
[[nodiscard]] std::int64_t memlock_limit_bytes();

}  // namespace memascend

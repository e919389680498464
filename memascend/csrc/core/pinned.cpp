#include "pinned.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include "clock.h"
#include "errors.h"
#include "text_file.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

namespace memascend {
namespace {

// MAP_HUGE_2MB of linux/mman.h: the binary logarithm of the size in the upper bits of the flags.
constexpr int kHugePageFlag = 21 << 26;

// Returns the value in bytes of a line "Name:  123 kB" of a /proc file, or -1 if the file or the line does not exist.
std::int64_t proc_kib_line(const char* path, const std::string& name) {
  const std::string text = "\n" + text_of(path);
  const std::size_t at = text.find("\n" + name);
  return at == std::string::npos ? -1 : std::strtoll(text.c_str() + at + 1 + name.size(), nullptr, 10) * 1024;
}

std::string mib(std::int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

void check_sizes(std::int64_t requested, std::int64_t reserved, PageKind pages) {
  if (requested <= 0) {
    throw Error(ErrorKind::kInvalidArgument,
                "pinned allocation of " + std::to_string(requested) + " bytes: ask for at least one byte");
  }
  const std::int64_t page = pages == PageKind::kReserved ? kHugePageBytes : kPageBytes;
  if (reserved < requested || reserved % page != 0) {
    throw Error(ErrorKind::kInvalidArgument, "pinned allocation reserves " + std::to_string(reserved) + " bytes for " +
                                                 std::to_string(requested) + " requested: reserve whole " +
                                                 std::to_string(page) + "-byte pages, at least the request");
  }
}

std::string no_reserved_pages(std::int64_t reserved) {
  const std::int64_t page = proc_kib_line("/proc/meminfo", "Hugepagesize:");
  const auto pages_in = [](const char* name) {  // lines of the same form with counts instead of kB
    return std::to_string(std::max<std::int64_t>(0, proc_kib_line("/proc/meminfo", name) / 1024));
  };
  return "cannot map " + mib(reserved) + " of reserved huge pages (" + pages_in("HugePages_Free:") + " of " +
         pages_in("HugePages_Total:") + " pages of " + mib(std::max<std::int64_t>(0, page)) + " are free, " +
         std::to_string(reserved / kHugePageBytes) +
         " of 2 MiB are needed): set more aside (sysctl vm.nr_hugepages), or use transparent huge pages";
}

// Makes an anonymous private mapping that starts at a huge page boundary: maps more and unmaps both ends. Returns null
// if the kernel refuses.
void* map_on_huge_page(std::size_t length) {
  const std::size_t more = length + static_cast<std::size_t>(kHugePageBytes) - kPageBytes;
  void* mapped = mmap(nullptr, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    return nullptr;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(mapped);
  const std::uintptr_t start = (begin + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  if (start > begin) {
    munmap(mapped, start - begin);
  }
  if (start + length < begin + more) {
    munmap(reinterpret_cast<void*>(start + length), begin + more - start - length);
  }
  // This is only advice: a kernel without transparent huge pages uses small ones.
  (void)madvise(reinterpret_cast<void*>(start), length, MADV_HUGEPAGE);
  return reinterpret_cast<void*>(start);
}

// Maps `length` bytes of zeroed memory.
void* map_pages(std::int64_t length, PageKind pages) {
  const auto bytes = static_cast<std::size_t>(length);
  if (pages == PageKind::kReserved) {
    void* mapped =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | kHugePageFlag, -1, 0);
    if (mapped == MAP_FAILED) {
      throw Error(ErrorKind::kOutOfMemory, no_reserved_pages(length));
    }
    return mapped;
  }
  void* mapped = nullptr;
  if (pages == PageKind::kTransparent) {
    mapped = map_on_huge_page(bytes);
  } else if (void* small = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
             small != MAP_FAILED) {
    mapped = small;
  }
  if (mapped == nullptr) {
    throw Error(ErrorKind::kOutOfMemory, "cannot map " + mib(length) + " for a pinned buffer (" + std::strerror(errno) +
                                             "): end other programs or use a smaller model");
  }
  return mapped;
}

std::string lock_refused(std::int64_t reserved, int error) {
  const std::int64_t limit = memlock_limit_bytes();
  const std::int64_t held = std::max<std::int64_t>(0, proc_kib_line("/proc/self/status", "VmLck:"));
  return "cannot lock " + mib(reserved) + " of memory (" + std::strerror(error) + "; " + mib(held) +
         " locked already, limit " + (limit < 0 ? std::string("none") : mib(limit)) +
         "): raise the limit (ulimit -l, or memlock in limits.conf), or allow unlocked pages with require_lock=False";
}

void fork_prepare() { PinnedRegistry::instance().lock_for_fork(); }
void fork_done() { PinnedRegistry::instance().unlock_after_fork(); }

}  // namespace

void touch_pages(void* address, std::int64_t bytes) {
  if (madvise(address, static_cast<std::size_t>(bytes), MADV_POPULATE_WRITE) == 0) {
    return;
  }
  auto* page = static_cast<volatile char*>(address);
  for (std::int64_t offset = 0; offset < bytes; offset += kPageBytes) {
    page[offset] = 0;
  }
}

std::int64_t memlock_limit_bytes() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return -1;
  }
  return static_cast<std::int64_t>(limit.rlim_cur);
}

PinnedRegistry& PinnedRegistry::instance() {
  static PinnedRegistry* registry = [] {
    pthread_atfork(fork_prepare, fork_done, fork_done);
    return new PinnedRegistry();
  }();
  return *registry;
}

PinnedBlock PinnedRegistry::allocate(std::int64_t requested_bytes, std::int64_t reserved_bytes, bool lock,
                                     bool require_lock, PageKind pages, const Placement& placement) {
  check_sizes(requested_bytes, reserved_bytes, pages);
  const auto length = static_cast<std::size_t>(reserved_bytes);
  void* address = map_pages(reserved_bytes, pages);
  try {
    place_pages(address, reserved_bytes, placement, pages != PageKind::kSmall);
  } catch (...) {
    munmap(address, length);
    throw;
  }
  // Reserved huge pages are never swapped out and do not count towards the limit, so they need no mlock.
  const bool reserved = pages == PageKind::kReserved;
  const bool locked = reserved || (lock && mlock(address, length) == 0);
  if (lock && !locked && require_lock) {
    const int error = errno;
    munmap(address, length);
    throw Error(ErrorKind::kOutOfMemory, lock_refused(reserved_bytes, error));
  }
  if (!locked || reserved) {
    touch_pages(address, reserved_bytes);
  }
  std::lock_guard<std::mutex> guard(mutex_);
  const PinnedBlock block{next_id_++,      reinterpret_cast<std::uintptr_t>(address),
                          requested_bytes, reserved_bytes,
                          pages,           locked,
                          false,           monotonic_ns(),
                          getpid()};
  blocks_.emplace(block.address, block);
  log(false, block, block.born_ns);
  return block;
}

bool PinnedRegistry::release(std::uintptr_t address) noexcept {
  PinnedBlock block;
  UnregisterHook hook = nullptr;
  std::unique_ptr<ForkGuard> fork_guard;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) {
      return false;
    }
    block = found->second;
    blocks_.erase(found);
    if (const auto held = guards_.find(address); held != guards_.end()) {
      fork_guard = std::move(held->second);
      guards_.erase(held);
    }
    hook = unregister_hook_;
  }
  void* pointer = reinterpret_cast<void*>(address);
  // A forked child inherits neither the registration with the driver, which only the parent can undo, nor guarded
  // pages: whatever it has mapped at their addresses is its own.
  const bool ours = block.owner_pid == getpid();
  if (ours && block.registered && !(hook != nullptr && hook(pointer))) {
    std::lock_guard<std::mutex> guard(mutex_);  // the driver still knows the pages, so they stay mapped
    guards_[address] = std::move(fork_guard);
    return true;
  }
  fork_guard.reset();
  if (ours || !ForkGuard::withheld_from_us(pointer, block.reserved_bytes)) {
    munmap(pointer, static_cast<std::size_t>(block.reserved_bytes));  // unlocks too
  }
  std::lock_guard<std::mutex> guard(mutex_);
  log(true, block, monotonic_ns());
  return true;
}

bool PinnedRegistry::contains(std::uintptr_t address, std::int64_t bytes) const {
  std::lock_guard<std::mutex> guard(mutex_);
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin() || bytes < 0) {
    return false;
  }
  const PinnedBlock& block = std::prev(after)->second;
  const std::uintptr_t end = block.address + static_cast<std::uintptr_t>(block.reserved_bytes);
  return address < end && static_cast<std::uintptr_t>(bytes) <= end - address;
}

std::vector<PinnedBlock> PinnedRegistry::live() const {
  std::lock_guard<std::mutex> guard(mutex_);
  std::vector<PinnedBlock> blocks;
  blocks.reserve(blocks_.size());
  for (const auto& [address, block] : blocks_) {
    blocks.push_back(block);
  }
  return blocks;
}

std::vector<PinnedEvent> PinnedRegistry::drain_events() {
  std::vector<PinnedEvent> drained;
  std::lock_guard<std::mutex> guard(mutex_);
  drained.swap(events_);
  return drained;
}

void PinnedRegistry::mark_registered(std::uint64_t id) {
  const auto of_id = [id](const auto& item) { return item.second.id == id; };
  PinnedBlock block;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto found = std::find_if(blocks_.begin(), blocks_.end(), of_id);
    if (found == blocks_.end()) {
      throw Error(ErrorKind::kInvalidArgument, "no live pinned block has id " + std::to_string(id));
    }
    found->second.registered = true;
    block = found->second;
  }
  // Made without holding the lock: before a fork both locks are taken, and the opposite order here could deadlock.
  auto fork_guard = std::make_unique<ForkGuard>(reinterpret_cast<void*>(block.address), block.reserved_bytes);
  std::lock_guard<std::mutex> guard(mutex_);
  guards_[block.address] = std::move(fork_guard);
}

void PinnedRegistry::set_unregister_hook(UnregisterHook hook) noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  unregister_hook_ = hook;
}

void PinnedRegistry::log(bool is_free, const PinnedBlock& block, std::int64_t t_ns) {
  events_.push_back(PinnedEvent{is_free, block, t_ns});
}

}  // namespace memascend

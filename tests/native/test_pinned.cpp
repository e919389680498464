#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "check.h"
#include "core/errors.h"
#include "core/pinned.h"

using namespace memascend;
using check::contains;
using check::message_of;

namespace {

std::vector<void*> unregistered;
bool hook_result = true;
bool record_unregister(void* address) {
  unregistered.push_back(address);
  return hook_result;
}

}  // namespace

TEST(pinned_block_is_page_aligned_zeroed_and_booked) {
  PinnedRegistry registry;
  const PinnedBlock block = registry.allocate(5000, 8192, true, false);
  CHECK(block.address % 4096 == 0);
  CHECK(block.requested_bytes == 5000 && block.reserved_bytes == 8192);
  const auto* bytes = reinterpret_cast<const char*>(block.address);
  CHECK(bytes[0] == 0 && bytes[8191] == 0);
  CHECK(registry.live().size() == 1);
  CHECK(registry.release(block.address));
  CHECK(registry.live().empty());
}

TEST(pinned_second_release_and_foreign_address_are_refused) {
  PinnedRegistry registry;
  const PinnedBlock block = registry.allocate(1, 4096, false, false);
  CHECK(!registry.release(block.address + 64));
  CHECK(registry.release(block.address));
  CHECK(!registry.release(block.address));
}

TEST(pinned_contains_knows_both_ends) {
  PinnedRegistry registry;
  const PinnedBlock block = registry.allocate(4096, 4096, false, false);
  CHECK(registry.contains(block.address, 4096));
  CHECK(registry.contains(block.address + 4095, 1));
  CHECK(!registry.contains(block.address + 4095, 2));
  CHECK(!registry.contains(block.address + 4096, 0));
  CHECK(!registry.contains(block.address - 1, 1));
  CHECK(!registry.contains(block.address, -1));
  CHECK(registry.release(block.address));
  CHECK(!registry.contains(block.address, 1));
}

TEST(pinned_events_pair_up_and_drain_once) {
  PinnedRegistry registry;
  const PinnedBlock block = registry.allocate(10, 4096, false, false);
  CHECK(registry.release(block.address));
  const auto events = registry.drain_events();
  CHECK(events.size() == 2);
  CHECK(!events[0].is_free && events[1].is_free);
  CHECK(events[0].block.id == block.id && events[1].block.id == block.id);
  CHECK(events[0].t_ns == block.born_ns && events[1].t_ns >= block.born_ns);
  CHECK(registry.drain_events().empty());
}

TEST(pinned_bad_sizes_say_what_to_do) {
  PinnedRegistry registry;
  const auto allocate = [&](std::int64_t requested, std::int64_t reserved) {
    return message_of<Error>([&] { (void)registry.allocate(requested, reserved, false, false); });
  };
  CHECK(contains(allocate(0, 4096), "at least one byte"));
  CHECK(contains(allocate(-5, 4096), "at least one byte"));
  CHECK(contains(allocate(5000, 4096), "whole 4096-byte pages"));
  CHECK(contains(allocate(100, 5000), "whole 4096-byte pages"));
  CHECK(contains(allocate(1, std::int64_t{1} << 50), "cannot map"));  // beyond the address space
  CHECK(registry.live().empty() && registry.drain_events().empty());
}

#if !UNDER_SANITIZER
TEST(pinned_over_the_memlock_limit_touches_or_refuses) {
  rlimit before{};
  CHECK(getrlimit(RLIMIT_MEMLOCK, &before) == 0);
  const pid_t child = fork();  // the limit applies only without CAP_IPC_LOCK, which root gives up in a child
  if (child == 0) {
    rlimit none{0, before.rlim_max};
    setrlimit(RLIMIT_MEMLOCK, &none);
    if (geteuid() == 0 && setuid(65534) != 0) {
      _exit(9);
    }
    PinnedRegistry registry;
    const PinnedBlock block = registry.allocate(1 << 20, 1 << 20, true, false);
    if (block.locked) {
      _exit(1);
    }
    const std::string message = message_of<Error>([&] { (void)registry.allocate(1 << 20, 1 << 20, true, true); });
    _exit(contains(message, "ulimit -l") && registry.live().size() == 1 ? 0 : 2);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK_NOTE(WIFEXITED(status) && WEXITSTATUS(status) == 0, std::to_string(WEXITSTATUS(status)));
}
#endif

TEST(pinned_registered_block_is_unregistered_before_it_is_unmapped) {
  PinnedRegistry registry;
  unregistered.clear();
  hook_result = true;
  registry.set_unregister_hook(record_unregister);
  const PinnedBlock known = registry.allocate(1, 4096, false, false);
  const PinnedBlock plain = registry.allocate(1, 4096, false, false);
  registry.mark_registered(known.id);
  CHECK(registry.release(plain.address) && unregistered.empty());
  CHECK(registry.release(known.address));
  CHECK(unregistered.size() == 1 && unregistered[0] == reinterpret_cast<void*>(known.address));
  CHECK(contains(message_of<Error>([&] { registry.mark_registered(known.id); }), "no live pinned block"));
}

TEST(pinned_block_that_cannot_be_unregistered_stays_mapped) {
  PinnedRegistry registry;
  hook_result = false;
  registry.set_unregister_hook(record_unregister);
  const PinnedBlock block = registry.allocate(1, 4096, false, false);
  registry.mark_registered(block.id);
  (void)registry.drain_events();
  CHECK(registry.release(block.address));
  *reinterpret_cast<volatile char*>(block.address) = 1;  // would fault if it were unmapped
  CHECK(registry.drain_events().empty());                // and no free is logged
}

TEST(pinned_forked_child_does_not_unregister) {
  PinnedRegistry& registry = PinnedRegistry::instance();
  hook_result = true;
  unregistered.clear();
  registry.set_unregister_hook(record_unregister);
  const PinnedBlock block = registry.allocate(1, 4096, false, false);
  registry.mark_registered(block.id);
  const pid_t child = fork();
  if (child == 0) {
    _exit(registry.release(block.address) && unregistered.empty() ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(registry.release(block.address) && unregistered.size() == 1);
}

TEST(pinned_transparent_huge_pages_start_on_one_and_reserve_no_more) {
  PinnedRegistry registry;
  constexpr std::int64_t kBytes = 5 * kHugePageBytes + 3 * kPageBytes;
  for (const bool lock : {true, false}) {
    const PinnedBlock block = registry.allocate(kBytes - 7, kBytes, lock, false, PageKind::kTransparent);
    CHECK(block.address % kHugePageBytes == 0);
    CHECK(block.reserved_bytes == kBytes && block.pages == PageKind::kTransparent);
    auto* bytes = reinterpret_cast<volatile char*>(block.address);
    CHECK(bytes[0] == 0 && bytes[kBytes - 1] == 0);
    bytes[kBytes - 1] = 1;
    CHECK(registry.release(block.address));
  }
  CHECK(registry.live().empty());
}

TEST(pinned_transparent_huge_pages_give_both_ends_back) {
  PinnedRegistry registry;
  const PinnedBlock block = registry.allocate(kPageBytes, kPageBytes, false, false, PageKind::kTransparent);
  // Other mappings directly before and after the block succeed only if no part of our larger mapping is left there.
  for (const std::uintptr_t neighbour : {block.address - kPageBytes, block.address + kPageBytes}) {
    void* got = mmap(reinterpret_cast<void*>(neighbour), kPageBytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK(got == reinterpret_cast<void*>(neighbour));
    munmap(got, kPageBytes);
  }
  CHECK(registry.release(block.address));
}

TEST(pinned_reserved_huge_pages_are_locked_or_refused_with_the_fix) {
  PinnedRegistry registry;
  const auto refusal = [&](std::int64_t bytes) {
    return message_of<Error>([&] { (void)registry.allocate(1, bytes, false, false, PageKind::kReserved); });
  };
  CHECK(contains(refusal(kPageBytes), "whole 2097152-byte pages"));
  const std::int64_t ram = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  std::int64_t most = kHugePageBytes;  // a quarter to half of the RAM: more than is ever reserved
  while (most * 4 <= ram) {
    most *= 2;
  }
  const std::string message = refusal(most);
  CHECK_NOTE(contains(message, "sysctl vm.nr_hugepages") && contains(message, "transparent"), message);
  CHECK(registry.live().empty());
  try {
    const PinnedBlock block = registry.allocate(1, kHugePageBytes, true, true, PageKind::kReserved);
    CHECK(block.locked && block.address % kHugePageBytes == 0);
    *reinterpret_cast<volatile char*>(block.address + kHugePageBytes - 1) = 1;
    CHECK(registry.release(block.address));
  } catch (const Error& error) {  // no huge pages are reserved on this machine
    CHECK(error.kind() == ErrorKind::kOutOfMemory);
  }
}

TEST(pinned_registry_serves_threads) {
  PinnedRegistry registry;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&registry, t] {
      for (int i = 0; i < 100; ++i) {
        const PinnedBlock block = registry.allocate(1 + i, 4096, false, false);
        std::memset(reinterpret_cast<void*>(block.address), t, 4096);
        (void)registry.contains(block.address, 1);
        registry.release(block.address);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(registry.live().empty());
  CHECK(registry.drain_events().size() == 800);
}

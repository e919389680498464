#include "fork_guard.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "pinned.h"

namespace memascend {
namespace {

struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  pid_t process = 0;
};

// All guards of the process; in a child also those that its parent had at the fork. Never destroyed, since tensors may
// outlive static destruction.
struct Ranges {
  std::mutex mutex;
  std::map<std::uint64_t, Range> by_id;
  std::uint64_t next_id = 1;
};

Ranges& ranges() {
  static Ranges* all = [] {
    pthread_atfork([] { ranges().mutex.lock(); }, [] { ranges().mutex.unlock(); }, [] { ranges().mutex.unlock(); });
    return new Ranges();
  }();
  return *all;
}

// Best effort: if the kernel rejects the advice (the memory is no longer mapped, or never was), nothing changes.
void advise(std::uintptr_t begin, std::uintptr_t end, int advice) {
  if (begin < end) {
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, advice);
  }
}

}  // namespace

ForkGuard::ForkGuard(void* data, std::int64_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(data);
  const auto last = first + static_cast<std::uintptr_t>(std::max<std::int64_t>(0, bytes));
  const auto page = static_cast<std::uintptr_t>(kPageBytes);
  const Range range{(first + page - 1) / page * page, last / page * page, getpid()};
  if (range.begin >= range.end) {
    return;
  }
  Ranges& all = ranges();
  std::lock_guard<std::mutex> guard(all.mutex);
  id_ = all.next_id++;
  all.by_id.emplace(id_, range);
  advise(range.begin, range.end, MADV_DONTFORK);
}

ForkGuard::~ForkGuard() {
  if (id_ == 0) {
    return;
  }
  Ranges& all = ranges();
  std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.by_id.find(id_);
  const Range range = found->second;
  if (range.process != getpid()) {
    return;  // the parent's guard: it stays registered, since this process still lacks the pages
  }
  all.by_id.erase(found);
  std::vector<Range> others;
  for (const auto& [id, other] : all.by_id) {
    if (other.process == range.process && other.begin < range.end && range.begin < other.end) {
      others.push_back(other);
    }
  }
  std::sort(others.begin(), others.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::uintptr_t from = range.begin;
  for (const Range& other : others) {
    advise(from, std::min(other.begin, range.end), MADV_DOFORK);
    from = std::max(from, other.end);
  }
  advise(from, range.end, MADV_DOFORK);
}

bool ForkGuard::withheld_from_us(const void* data, std::int64_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const auto end = begin + static_cast<std::uintptr_t>(std::max<std::int64_t>(0, bytes));
  Ranges& all = ranges();
  std::lock_guard<std::mutex> guard(all.mutex);
  return std::any_of(all.by_id.begin(), all.by_id.end(), [&](const auto& item) {
    const Range& range = item.second;
    return range.process != getpid() && range.begin < end && begin < range.end;
  });
}

}  // namespace memascend

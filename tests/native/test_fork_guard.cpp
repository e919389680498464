#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <sstream>
#include <string>

#include "check.h"
#include "core/fork_guard.h"
#include "core/pinned.h"

using namespace memascend;

namespace {

// Returns one letter per page: d if forked children do not inherit it (VmFlags "dc" of /proc/self/smaps), else c.
std::string pages_of(const char* data, int count) {
  std::string out(static_cast<std::size_t>(count), '?');
  std::ifstream smaps("/proc/self/smaps");
  std::uintptr_t begin = 0, end = 0;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long from = 0, to = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) {
      begin = from, end = to;
    } else if (line.starts_with("VmFlags:")) {
      const char letter = (line + " ").find(" dc ") != std::string::npos ? 'd' : 'c';
      for (int page = 0; page < count; ++page) {
        const auto address = reinterpret_cast<std::uintptr_t>(data + page * kPageBytes);
        if (begin <= address && address < end) {
          out[static_cast<std::size_t>(page)] = letter;
        }
      }
    }
  }
  return out;
}

struct Pages {
  explicit Pages(int count)
      : bytes(static_cast<std::size_t>(count * kPageBytes)),
        data(static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    data[0] = 1;
  }
  ~Pages() { munmap(data, bytes); }
  std::size_t bytes;
  char* data;
};

// Runs `body` in a forked child. Returns the child's exit status, or minus the signal that ended it.
template <typename Body>
int in_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) {
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace

TEST(fork_guard_takes_whole_pages_and_gives_them_back) {
  const Pages pages(4);
  {
    const ForkGuard all(pages.data, 4 * kPageBytes);
    CHECK(pages_of(pages.data, 4) == "dddd");
  }
  CHECK(pages_of(pages.data, 4) == "cccc");
  {
    const ForkGuard inner(pages.data + 100, 3 * kPageBytes);  // covers its first and its last page only partly
    CHECK(pages_of(pages.data, 4) == "cddc");
    const ForkGuard less_than_a_page(pages.data, 100), none(pages.data, 0);
    CHECK(pages_of(pages.data, 4) == "cddc");
  }
  CHECK(pages_of(pages.data, 4) == "cccc");
}

TEST(a_page_goes_to_children_again_when_its_last_guard_has_gone) {
  const Pages pages(6);
  auto left = std::make_unique<ForkGuard>(pages.data, 3 * kPageBytes);
  auto right = std::make_unique<ForkGuard>(pages.data + 2 * kPageBytes, 3 * kPageBytes);
  auto same = std::make_unique<ForkGuard>(pages.data + 2 * kPageBytes, 3 * kPageBytes);
  CHECK(pages_of(pages.data, 6) == "dddddc");
  left.reset();
  CHECK(pages_of(pages.data, 6) == "ccdddc");
  right.reset();
  CHECK(pages_of(pages.data, 6) == "ccdddc");
  auto all = std::make_unique<ForkGuard>(pages.data, 6 * kPageBytes);
  same.reset();
  CHECK(pages_of(pages.data, 6) == "dddddd");
  auto hole = std::make_unique<ForkGuard>(pages.data + kPageBytes, kPageBytes);
  all.reset();
  CHECK(pages_of(pages.data, 6) == "cdcccc");
  hole.reset();
  CHECK(pages_of(pages.data, 6) == "cccccc");
}

TEST(a_child_knows_what_it_did_not_get_and_leaves_what_is_there_now) {
  const Pages pages(2);
  auto guard = std::make_unique<ForkGuard>(pages.data, kPageBytes);
  CHECK(!ForkGuard::withheld_from_us(pages.data, kPageBytes));
  CHECK(in_child([&] {
          if (!ForkGuard::withheld_from_us(pages.data, 1) || ForkGuard::withheld_from_us(pages.data + kPageBytes, 1)) {
            return 1;
          }
          const Pages own(1);  // a page of the child's, with its own guard
          const ForkGuard of_own(own.data, kPageBytes);
          guard.reset();  // the parent's guard: this has no effect
          return pages_of(own.data, 1) == "d" && ForkGuard::withheld_from_us(pages.data, 1) ? 0 : 2;
        }) == 0);
  CHECK(pages_of(pages.data, 2) == "dc");
}

TEST(a_registered_block_is_kept_from_children_until_it_is_freed) {
  PinnedRegistry registry;
  registry.set_unregister_hook([](void*) { return true; });
  const PinnedBlock known = registry.allocate(1, kPageBytes, false, false);
  const PinnedBlock plain = registry.allocate(1, kPageBytes, false, false);
  registry.mark_registered(known.id);
  auto* data = reinterpret_cast<char*>(known.address);
  CHECK(pages_of(data, 1) == "d" && pages_of(reinterpret_cast<char*>(plain.address), 1) == "c");
  CHECK(in_child([&] {
          // The child maps its own memory at the block's address, which a release must not unmap.
          void* own =
              mmap(data, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
          if (own != data) {
            return 1;
          }
          data[0] = 7;
          const bool released = registry.release(known.address) && registry.release(plain.address);
          return released && data[0] == 7 && msync(reinterpret_cast<void*>(plain.address), 1, MS_ASYNC) != 0 ? 0 : 2;
        }) == 0);
  CHECK(registry.release(known.address) && registry.release(plain.address));
}

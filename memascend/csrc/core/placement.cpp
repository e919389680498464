#include "placement.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "errors.h"
#include "pinned.h"

namespace memascend {
namespace {

// linux/mempolicy.h; the last two are newer than some distributions' headers.
constexpr int kPolicyPreferred = 1, kPolicyBind = 2, kPolicyInterleave = 3, kPolicyPreferredMany = 5,
              kPolicyWeightedInterleave = 6;
constexpr unsigned kFlagStrict = 1, kFlagMove = 2;
// Pages per system call: 16 Ki of 4 KiB, with 192 KiB of addresses and answers.
constexpr std::int64_t kPagesAsked = std::int64_t{1} << 14;

int policy_of(PlacementMode mode) {
  switch (mode) {
    case PlacementMode::kBind:
      return kPolicyBind;
    case PlacementMode::kPreferred:
      return kPolicyPreferred;
    case PlacementMode::kPreferredMany:
      return kPolicyPreferredMany;
    case PlacementMode::kInterleaved:
    case PlacementMode::kStriped:  // set after its pages are resident: pages back from swap are spread, no page moves
      return kPolicyInterleave;
    case PlacementMode::kWeighted:
      return kPolicyWeightedInterleave;
    case PlacementMode::kLocal:
      break;
  }
  return 0;
}

std::string names(const std::vector<int>& nodes) {
  std::string out;
  for (const int node : nodes) {
    out += (out.empty() ? "" : ", ") + std::to_string(node);
  }
  return out;
}

[[noreturn]] void throw_refusal(const Placement& placement, int error) {
  std::string fix = "name nodes that have memory and that this process may use (numactl --show)";
  if (error == EINVAL && placement.mode == PlacementMode::kWeighted) {
    fix = "weighted interleaving needs Linux 6.9: interleave evenly, or use a newer kernel";
  } else if (error == EINVAL && placement.mode == PlacementMode::kPreferredMany) {
    fix = "preferring several nodes needs Linux 5.15, and " + fix;
  } else if (error == EPERM || error == ENOSYS) {
    fix = "allow the system call mbind (in Docker: --cap-add SYS_NICE), or leave the placement out";
  }
  throw Error(ErrorKind::kInvalidArgument, "the kernel does not place memory on node " + names(placement.nodes) + " (" +
                                               std::strerror(error) + "): " + fix);
}

[[noreturn]] void throw_not_moved(const Placement& placement) {
  throw Error(ErrorKind::kState, "not all pages could be moved to node " + names(placement.nodes) +
                                     ": they are registered with CUDA or io_uring, or the nodes are full; move "
                                     "memory before it is registered, and see memascend doctor for what is free");
}

constexpr auto kBits = static_cast<int>(sizeof(unsigned long) * CHAR_BIT);

std::vector<unsigned long> mask_of(const std::vector<int>& nodes) {
  const int most = *std::max_element(nodes.begin(), nodes.end());
  std::vector<unsigned long> mask(static_cast<std::size_t>(most / kBits + 1), 0);
  for (const int node : nodes) {
    mask[static_cast<std::size_t>(node / kBits)] |= 1ul << (node % kBits);
  }
  return mask;
}

// The kernel ignores the last of the bits that it is given, hence one more.
unsigned long bits_of(const std::vector<unsigned long>& mask) { return mask.size() * kBits + 1; }

// Returns 0 or the error. Without NUMA in the kernel everything is on node 0.
int bind_pages(void* address, std::int64_t bytes, const Placement& placement, unsigned flags) {
  const auto mask = mask_of(placement.nodes);
  if (syscall(SYS_mbind, address, static_cast<unsigned long>(bytes), policy_of(placement.mode), mask.data(),
              bits_of(mask), flags) == 0) {
    return 0;
  }
  const bool no_numa = errno == ENOSYS && placement.nodes == std::vector<int>{0};
  return no_numa ? 0 : errno;
}

void check_nodes(const Placement& placement) {
  const bool bad = std::any_of(placement.nodes.begin(), placement.nodes.end(), [](int n) { return n < 0 || n > 4095; });
  if (placement.nodes.empty() || bad) {
    throw Error(ErrorKind::kInvalidArgument, "a placement names at least one node, by its number from 0");
  }
  const bool none = std::any_of(placement.weights.begin(), placement.weights.end(), [](auto w) { return w < 0; }) ||
                    std::accumulate(placement.weights.begin(), placement.weights.end(), std::int64_t{0}) <= 0;
  if (placement.mode == PlacementMode::kStriped && (placement.weights.size() != placement.nodes.size() || none)) {
    throw Error(ErrorKind::kInvalidArgument, "striped memory needs a weight of 0 or more for each node, one above 0");
  }
}

// Saves the calling thread's own policy and restores it at the end of a scope.
class ThreadPolicy {
 public:
  ThreadPolicy() { held_ = syscall(SYS_get_mempolicy, &mode_, mask_.data(), bits_of(mask_) - 1, nullptr, 0) == 0; }
  ~ThreadPolicy() {
    if (held_) {
      (void)syscall(SYS_set_mempolicy, mode_, mode_ == 0 ? nullptr : mask_.data(), mode_ == 0 ? 0 : bits_of(mask_));
    }
  }
  ThreadPolicy(const ThreadPolicy&) = delete;
  ThreadPolicy& operator=(const ThreadPolicy&) = delete;

  // Returns 0 or the error.
  [[nodiscard]] int prefer(int node) const {
    const auto mask = mask_of({node});
    return syscall(SYS_set_mempolicy, kPolicyPreferred, mask.data(), bits_of(mask)) == 0 ? 0 : errno;
  }

 private:
  int mode_ = 0;
  std::vector<unsigned long> mask_ = std::vector<unsigned long>(4096 / kBits, 0);
  bool held_ = false;
};

// Touches stripe after stripe, each under a policy of the thread, which does not split the mapping. Then sets one
// policy for the whole range, so that automatic NUMA balancing does not move its pages.
void stripe_pages(void* address, std::int64_t bytes, const Placement& placement) {
  const ThreadPolicy thread;
  auto* at = static_cast<char*>(address);
  for (const Stripe& stripe : stripes_of(bytes / kPageBytes, placement.weights)) {
    const int error = thread.prefer(placement.nodes[stripe.node]);
    if (error != 0 && !(error == ENOSYS && placement.nodes == std::vector<int>{0})) {
      throw_refusal(placement, error);
    }
    touch_pages(at, stripe.pages * kPageBytes);
    at += stripe.pages * kPageBytes;
  }
  if (const int error = bind_pages(address, bytes, placement, 0); error != 0) {
    throw_refusal(placement, error);
  }
}

// Does what `move_pages_to` says for striped memory, page by page.
void move_to_stripes(void* address, std::int64_t bytes, const Placement& placement) {
  // Memory smaller than a huge page contains none, so its shares are exact.
  const bool may_be_huge = bytes >= kHugePageBytes;
  const std::int64_t huge = kHugePageBytes / kPageBytes;
  std::vector<void*> pages;
  std::vector<int> nodes, status;
  auto* at = static_cast<char*>(address);
  const auto flush = [&] {
    status.assign(pages.size(), 0);
    const long failed = syscall(SYS_move_pages, 0, pages.size(), pages.data(), nodes.data(), status.data(), kFlagMove);
    if (failed < 0 && !(errno == ENOSYS && placement.nodes == std::vector<int>{0})) {
      throw_refusal(placement, errno);
    }
    pages.clear();
    nodes.clear();
  };
  std::map<int, std::int64_t> wanted;
  for (const Stripe& stripe : stripes_of(bytes / kPageBytes, placement.weights, may_be_huge ? huge : 0)) {
    wanted[placement.nodes[stripe.node]] += stripe.pages;
    for (std::int64_t page = 0; page < stripe.pages; ++page, at += kPageBytes) {
      pages.push_back(at);
      nodes.push_back(placement.nodes[stripe.node]);
      if (static_cast<std::int64_t>(pages.size()) == kPagesAsked) {
        flush();
      }
    }
  }
  flush();
  if (const int error = bind_pages(address, bytes, placement, 0); error != 0) {
    throw_refusal(placement, error);
  }
  // The status codes do not distinguish a pinned page from one that has moved with its huge page, so check where the
  // pages are now.
  const auto found = pages_by_node(address, bytes);
  const std::int64_t untouched = found.contains(-1) ? found.at(-1) : 0;
  for (const auto& [node, count] : wanted) {
    const std::int64_t there = found.contains(node) ? found.at(node) : 0;
    if (there + untouched + (may_be_huge ? huge : 0) < count) {
      throw_not_moved(placement);
    }
  }
}

}  // namespace

std::vector<Stripe> stripes_of(std::int64_t pages, const std::vector<std::int64_t>& weights, std::int64_t unit) {
  constexpr std::int64_t kLargest = kHugePageBytes / kPageBytes;
  const auto sum = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
  std::vector<std::int64_t> left(weights.size());
  std::vector<std::pair<double, std::size_t>> remainders;
  std::int64_t given = 0;
  for (std::size_t node = 0; node < weights.size(); ++node) {
    const double exact = static_cast<double>(pages) * static_cast<double>(weights[node]) / static_cast<double>(sum);
    left[node] = static_cast<std::int64_t>(exact);
    given += left[node];
    remainders.emplace_back(static_cast<double>(left[node]) - exact, node);
  }
  std::sort(remainders.begin(), remainders.end());
  for (std::size_t next = 0; given < pages; ++given, ++next) {
    ++left[remainders[next % remainders.size()].second];
  }
  const std::vector<std::int64_t> share = left;
  const bool given_unit = unit > 0;
  unit = given_unit ? unit : 1;
  while (!given_unit && unit * 2 <= std::min(kLargest, pages / 16)) {
    unit *= 2;
  }
  std::vector<Stripe> stripes;
  for (std::int64_t done = 0; done < pages;) {
    // The node that is furthest behind its share is next; among equals the first one.
    std::size_t next = 0;
    double most = -1;
    for (std::size_t node = 0; node < left.size(); ++node) {
      const double part = left[node] == 0 ? -1 : static_cast<double>(left[node]) / static_cast<double>(share[node]);
      if (part > most) {
        most = part;
        next = node;
      }
    }
    const std::int64_t taken = std::min(unit, left[next]);
    left[next] -= taken;
    done += taken;
    if (!stripes.empty() && stripes.back().node == next) {
      stripes.back().pages += taken;
    } else {
      stripes.push_back({next, taken});
    }
  }
  return stripes;
}

void place_pages(void* address, std::int64_t bytes, const Placement& placement, bool huge_pages) {
  if (placement.mode == PlacementMode::kLocal) {
    return;
  }
  check_nodes(placement);
  const bool striped = placement.mode == PlacementMode::kStriped;
  const bool in_turn = placement.mode == PlacementMode::kInterleaved || placement.mode == PlacementMode::kWeighted;
  if ((in_turn || striped) && !huge_pages) {
    (void)madvise(address, static_cast<std::size_t>(bytes), MADV_NOHUGEPAGE);
  }
  if (striped) {
    stripe_pages(address, bytes, placement);
  } else if (const int error = bind_pages(address, bytes, placement, 0); error != 0) {
    throw_refusal(placement, error);
  }
}

void move_pages_to(void* address, std::int64_t bytes, const Placement& placement) {
  check_nodes(placement);
  if (placement.mode == PlacementMode::kStriped) {
    move_to_stripes(address, bytes, placement);
    return;
  }
  const int error = bind_pages(address, bytes, placement, kFlagMove | kFlagStrict);
  if (error == EIO || error == ENOMEM) {
    throw_not_moved(placement);
  }
  if (error != 0) {
    throw_refusal(placement, error);
  }
}

std::vector<int> nodes_of_pages(const std::vector<void*>& pages) {
  std::vector<int> answers(pages.size(), -1);
  // The cast is safe: the kernel does not write to this array.
  auto* const asked = const_cast<void**>(pages.data());
  if (syscall(SYS_move_pages, 0, pages.size(), asked, nullptr, answers.data(), 0) < 0) {
    answers.clear();
  }
  return answers;
}

std::map<int, std::int64_t> pages_by_node(const void* address, std::int64_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(address) / kPageBytes;
  const auto last = (reinterpret_cast<std::uintptr_t>(address) + static_cast<std::uintptr_t>(bytes) - 1) / kPageBytes;
  const auto pages = static_cast<std::int64_t>(last - first + 1);
  std::map<int, std::int64_t> counts;
  std::vector<void*> asked;
  for (std::int64_t at = 0; at < pages; at += kPagesAsked) {
    const auto count = static_cast<std::size_t>(std::min(kPagesAsked, pages - at));
    asked.resize(count);
    for (std::size_t page = 0; page < count; ++page) {
      asked[page] = reinterpret_cast<void*>((first + static_cast<std::uintptr_t>(at) + page) * kPageBytes);
    }
    const std::vector<int> answers = nodes_of_pages(asked);
    if (answers.empty()) {
      throw Error(ErrorKind::kState,
                  "the kernel does not say on which node pages lie (move_pages: " + std::string(std::strerror(errno)) +
                      "): in Docker allow it with --cap-add SYS_NICE");
    }
    for (const int node : answers) {
      ++counts[std::max(node, -1)];  // a page that is not resident has an error: EFAULT before Linux 6.6, then ENOENT
    }
  }
  return counts;
}

}  // namespace memascend

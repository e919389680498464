#include "placement.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string>

#include "errors.h"
#include "pinned.h"

namespace memascend {
namespace {

// linux/mempolicy.h; the last two are newer than some distributions' headers.
constexpr int kPolicyPreferred = 1, kPolicyBind = 2, kPolicyInterleave = 3, kPolicyPreferredMany = 5,
              kPolicyWeightedInterleave = 6;
constexpr unsigned kFlagStrict = 1, kFlagMove = 2;
// Pages that one question is about: 16 Ki of 4 KiB, 192 KiB of questions and answers.
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

// 0, or the error. Without NUMA in the kernel everything is on node 0.
int bind_pages(void* address, std::int64_t bytes, const Placement& placement, unsigned flags) {
  constexpr auto kBits = static_cast<int>(sizeof(unsigned long) * CHAR_BIT);
  const int most = *std::max_element(placement.nodes.begin(), placement.nodes.end());
  std::vector<unsigned long> mask(static_cast<std::size_t>(most / kBits + 1), 0);
  for (const int node : placement.nodes) {
    mask[static_cast<std::size_t>(node / kBits)] |= 1ul << (node % kBits);
  }
  const unsigned long bits = mask.size() * kBits + 1;  // the kernel leaves out the last
  if (syscall(SYS_mbind, address, static_cast<unsigned long>(bytes), policy_of(placement.mode), mask.data(), bits,
              flags) == 0) {
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
}

}  // namespace

void place_pages(void* address, std::int64_t bytes, const Placement& placement, bool huge_pages) {
  if (placement.mode == PlacementMode::kLocal) {
    return;
  }
  check_nodes(placement);
  if (const int error = bind_pages(address, bytes, placement, 0); error != 0) {
    throw_refusal(placement, error);
  }
  const bool in_turn = placement.mode == PlacementMode::kInterleaved || placement.mode == PlacementMode::kWeighted;
  if (in_turn && !huge_pages) {
    (void)madvise(address, static_cast<std::size_t>(bytes), MADV_NOHUGEPAGE);
  }
}

void move_pages_to(void* address, std::int64_t bytes, const Placement& placement) {
  check_nodes(placement);
  const int error = bind_pages(address, bytes, placement, kFlagMove | kFlagStrict);
  if (error == EIO || error == ENOMEM) {
    throw Error(ErrorKind::kState, "not all pages could be moved to node " + names(placement.nodes) +
                                       ": they are registered with CUDA or io_uring, or the nodes are full; move "
                                       "memory before it is registered, and see memascend doctor for what is free");
  }
  if (error != 0) {
    throw_refusal(placement, error);
  }
}

std::map<int, std::int64_t> pages_by_node(const void* address, std::int64_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(address) / kPageBytes;
  const auto last = (reinterpret_cast<std::uintptr_t>(address) + static_cast<std::uintptr_t>(bytes) - 1) / kPageBytes;
  const auto pages = static_cast<std::int64_t>(last - first + 1);
  std::map<int, std::int64_t> counts;
  std::vector<void*> asked;
  std::vector<int> answers;
  for (std::int64_t at = 0; at < pages; at += kPagesAsked) {
    const auto count = static_cast<std::size_t>(std::min(kPagesAsked, pages - at));
    asked.resize(count);
    answers.assign(count, -1);
    for (std::size_t page = 0; page < count; ++page) {
      asked[page] = reinterpret_cast<void*>((first + static_cast<std::uintptr_t>(at) + page) * kPageBytes);
    }
    if (syscall(SYS_move_pages, 0, count, asked.data(), nullptr, answers.data(), 0) < 0) {
      throw Error(ErrorKind::kState, "the kernel does not say on which node pages lie (move_pages: " +
                                         std::string(std::strerror(errno)) +
                                         "): in Docker allow it with --cap-add SYS_NICE");
    }
    for (const int node : answers) {
      ++counts[std::max(node, -1)];  // an error for each page that is not there: EFAULT before Linux 6.6, then ENOENT
    }
  }
  return counts;
}

}  // namespace memascend

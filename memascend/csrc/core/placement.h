// NUMA placement of the pages of a mapping: set before the first touch, queried, and changed. Only by system calls:
// libnuma is not needed at run time.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace memascend {

// kBind: on these nodes or not at all (the kernel kills the process if they are full). kPreferred, kPreferredMany
// (Linux 5.15): on these nodes as long as they have free memory. kInterleaved: round-robin. kWeighted: round-robin by
// the kernel's own weights (Linux 6.9). kStriped: round-robin by `weights`, which apply to this memory only; pages are
// touched stripe by stripe, which works on any kernel.
enum class PlacementMode { kLocal, kBind, kPreferred, kPreferredMany, kInterleaved, kWeighted, kStriped };

struct Placement {
  PlacementMode mode = PlacementMode::kLocal;  // the kernel's default: the node of the thread that touches the page
  std::vector<int> nodes;
  std::vector<std::int64_t> weights;  // kStriped: one per node, of any magnitude; shares are exact to the page
};

// Consecutive pages on one node; `node` is an index into Placement::nodes.
struct Stripe {
  std::size_t node;
  std::int64_t pages;
};

// Returns the stripes of kStriped. Each node's share is rounded by the largest remainder method and spread as evenly as
// stripes of at most `unit` pages allow (0: 2 MiB, but at most a sixteenth of the whole).
[[nodiscard]] std::vector<Stripe> stripes_of(std::int64_t pages, const std::vector<std::int64_t>& weights,
                                             std::int64_t unit = 0);

// Sets the policy of [address, address + bytes), which are whole pages that have not been touched yet; striped memory
// is touched here. For interleaved and striped memory, huge pages are turned off, since they would make 2 MiB the unit,
// unless `huge_pages` are wanted. On a kernel without NUMA every policy on node 0 holds anyway. Throws
// Error(kInvalidArgument) if the kernel refuses the policy.
void place_pages(void* address, std::int64_t bytes, const Placement& placement, bool huge_pages);

// Moves pages that are not where the policy requires, and sets the policy for those still untouched. A page on any one
// of several allowed nodes stays there. Striped memory with huge pages moves by whole huge pages, and a node may end up
// with one too few. Throws Error: kInvalidArgument for the policy, kState for pages that cannot be moved because a
// device or a ring has pinned them or the nodes are full.
void move_pages_to(void* address, std::int64_t bytes, const Placement& placement);

// Returns the node of each page, negative for a page that is not resident. Returns nothing if the kernel does not
// report it (`errno` says why).
[[nodiscard]] std::vector<int> nodes_of_pages(const std::vector<void*>& pages);

// Returns the number of pages on each node; those that are not resident are counted under -1. Throws Error(kState) if
// the kernel does not report it.
[[nodiscard]] std::map<int, std::int64_t> pages_by_node(const void* address, std::int64_t bytes);

}  // namespace memascend

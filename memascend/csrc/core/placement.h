// Where the pages of a mapping lie: NUMA policies set before the first touch, asked about, and changed. System calls
// alone: no libnuma at run time.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace memascend {

// kBind: on these nodes or not at all (the kernel kills for want of room). kPreferred, kPreferredMany (Linux 5.15):
// there as long as there is room. kInterleaved: in turn. kWeighted: in turn, by the kernel's own weights (Linux 6.9).
// kStriped: in turn by `weights`, which belong to this memory alone: pages are touched stripe by stripe, on any kernel.
enum class PlacementMode { kLocal, kBind, kPreferred, kPreferredMany, kInterleaved, kWeighted, kStriped };

struct Placement {
  PlacementMode mode = PlacementMode::kLocal;  // the kernel's default: the node of the thread that touches
  std::vector<int> nodes;
  std::vector<std::int64_t> weights;  // kStriped: one per node, any size; a node has its share of the pages to the page
};

// Pages that lie on one node and follow one another; `node` is an index into Placement::nodes.
struct Stripe {
  std::size_t node;
  std::int64_t pages;
};

// How kStriped divides: each node's share rounded by largest remainder, spread as evenly as stripes of at most `unit`
// pages allow (0: 2 MiB, or less than a sixteenth of the whole).
[[nodiscard]] std::vector<Stripe> stripes_of(std::int64_t pages, const std::vector<std::int64_t>& weights,
                                             std::int64_t unit = 0);

// Sets the policy of [address, address + bytes), whole pages that nobody has touched yet; striped ones are touched
// here. Interleaved and striped memory is asked to have no huge pages, which would make 2 MiB the unit, unless
// `huge_pages` are wanted. On a kernel without NUMA any policy on node 0 is what happens anyway. Throws
// Error(kInvalidArgument) for what the kernel refuses.
void place_pages(void* address, std::int64_t bytes, const Placement& placement, bool huge_pages);

// Moves pages that lie elsewhere to where the policy says, and sets it for those still untouched. Pages on one of
// several nodes stay there; striped memory that has huge pages moves by these, and a node may have one too few. Throws
// Error: kInvalidArgument for the policy, kState for pages that cannot move, because a device or a ring has them pinned
// or the nodes are full.
void move_pages_to(void* address, std::int64_t bytes, const Placement& placement);

// The node of each page, negative for one that is not resident; empty if the kernel does not say (`errno` has why).
[[nodiscard]] std::vector<int> nodes_of_pages(const std::vector<void*>& pages);

// Pages by node; those that are not resident are counted under -1. Throws Error(kState) if the kernel does not say.
[[nodiscard]] std::map<int, std::int64_t> pages_by_node(const void* address, std::int64_t bytes);

}  // namespace memascend

// Where the pages of a mapping lie: NUMA policies set before the first touch, asked about, and changed. System calls
// alone: no libnuma at run time.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace memascend {

// kBind: on these nodes or not at all (the kernel kills for want of room). kPreferred, kPreferredMany (Linux 5.15): there
// as long as there is room. kInterleaved: in turn. kWeighted: in turn, by the kernel's own weights (Linux 6.9).
enum class PlacementMode { kLocal, kBind, kPreferred, kPreferredMany, kInterleaved, kWeighted };

struct Placement {
  PlacementMode mode = PlacementMode::kLocal;  // the kernel's default: the node of the thread that touches
  std::vector<int> nodes;
};

// Sets the policy of [address, address + bytes), whole pages that nobody has touched yet. Interleaved memory is asked to
// have no huge pages, which would make 2 MiB the unit, unless `huge_pages` are wanted. On a kernel without NUMA any
// policy on node 0 is what happens anyway. Throws Error(kInvalidArgument) for what the kernel refuses.
void place_pages(void* address, std::int64_t bytes, const Placement& placement, bool huge_pages);

// Moves pages that lie elsewhere to where the policy says, and sets it for those still untouched. Pages on one of
// several nodes stay there. Throws Error: kInvalidArgument for the policy, kState for pages that cannot move, because
// a device or a ring has them pinned or the nodes are full.
void move_pages_to(void* address, std::int64_t bytes, const Placement& placement);

// Pages by node; those that are not resident are counted under -1. Throws Error(kState) if the kernel does not say.
[[nodiscard]] std::map<int, std::int64_t> pages_by_node(const void* address, std::int64_t bytes);

}  // namespace memascend

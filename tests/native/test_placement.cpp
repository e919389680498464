#include <sys/mman.h>

#include <cstring>

#include "check.h"
#include "core/errors.h"
#include "core/pinned.h"
#include "core/placement.h"

using namespace memascend;
using check::contains;
using check::message_of;

namespace {

const std::vector<PlacementMode> kModes = {PlacementMode::kBind, PlacementMode::kPreferred, PlacementMode::kPreferredMany,
                                           PlacementMode::kInterleaved};

using Pages = std::map<int, std::int64_t>;

}  // namespace

TEST(placement_on_node_0_holds_for_every_page_of_a_block) {
  PinnedRegistry registry;
  for (const PlacementMode mode : kModes) {
    for (const PageKind pages : {PageKind::kSmall, PageKind::kTransparent}) {
      const PinnedBlock block = registry.allocate(1, 40 * kPageBytes, false, false, pages, {mode, {0}});
      auto* data = reinterpret_cast<char*>(block.address);
      CHECK((pages_by_node(data, block.reserved_bytes) == Pages{{0, 40}}));
      CHECK((pages_by_node(data + kPageBytes - 1, 2) == Pages{{0, 2}}));
      std::memset(data, 7, 40 * kPageBytes);
      move_pages_to(data, block.reserved_bytes, {mode, {0}});
      CHECK(data[12345] == 7);
      CHECK(registry.release(block.address));
    }
  }
}

TEST(placement_that_the_kernel_refuses_names_the_nodes_and_leaves_no_block) {
  PinnedRegistry registry;
  const auto refusal = [&](const Placement& placement) {
    return message_of<Error>(
        [&] { (void)registry.allocate(1, kPageBytes, false, false, PageKind::kSmall, placement); });
  };
  CHECK(contains(refusal({PlacementMode::kBind, {900, 901}}), "node 900, 901"));
  CHECK(contains(refusal({PlacementMode::kPreferred, {}}), "at least one node"));
  CHECK(contains(refusal({PlacementMode::kInterleaved, {-1}}), "at least one node"));
  CHECK(registry.live().empty() && registry.drain_events().empty());
}

TEST(placement_counts_pages_that_nobody_has_touched_apart) {
  const std::size_t bytes = 20000 * kPageBytes;  // more than one question
  auto* data = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  data[0] = data[17000 * kPageBytes] = 1;
  CHECK((pages_by_node(data, static_cast<std::int64_t>(bytes)) == Pages{{-1, 19998}, {0, 2}}));
  munmap(data, bytes);
}

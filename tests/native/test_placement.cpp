#include <sys/mman.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "check.h"
#include "core/errors.h"
#include "core/pinned.h"
#include "core/placement.h"

using namespace memascend;
using check::contains;
using check::message_of;

namespace {

const std::vector<PlacementMode> kModes = {PlacementMode::kBind, PlacementMode::kPreferred,
                                           PlacementMode::kPreferredMany, PlacementMode::kInterleaved};

using Pages = std::map<int, std::int64_t>;

}  // namespace

TEST(placement_on_node_0_holds_for_every_page_of_a_block) {
  PinnedRegistry registry;
  for (const PlacementMode mode : kModes) {
    for (const PageKind pages : {PageKind::kSmall, PageKind::kTransparent}) {
      const PinnedBlock block = registry.allocate(1, 40 * kPageBytes, false, false, pages, {mode, {0}, {}});
      auto* data = reinterpret_cast<char*>(block.address);
      CHECK((pages_by_node(data, block.reserved_bytes) == Pages{{0, 40}}));
      CHECK((pages_by_node(data + kPageBytes - 1, 2) == Pages{{0, 2}}));
      std::memset(data, 7, 40 * kPageBytes);
      move_pages_to(data, block.reserved_bytes, {mode, {0}, {}});
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
  CHECK(contains(refusal({PlacementMode::kBind, {900, 901}, {}}), "node 900, 901"));
  CHECK(contains(refusal({PlacementMode::kPreferred, {}, {}}), "at least one node"));
  CHECK(contains(refusal({PlacementMode::kInterleaved, {-1}, {}}), "at least one node"));
  CHECK(registry.live().empty() && registry.drain_events().empty());
}

TEST(placement_counts_untouched_pages_separately) {
  const std::size_t bytes = 20000 * kPageBytes;  // needs more than one system call
  auto* data = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  data[0] = data[17000 * kPageBytes] = 1;
  CHECK((pages_by_node(data, static_cast<std::int64_t>(bytes)) == Pages{{-1, 19998}, {0, 2}}));
  munmap(data, bytes);
}

TEST(placement_stripes_give_each_node_its_share_to_the_page) {
  for (const std::int64_t pages : {1, 2, 7, 40, 1536, 100003}) {
    for (const std::vector<std::int64_t>& weights :
         {std::vector<std::int64_t>{3, 1}, {1, 1, 1}, {0, 5}, {std::int64_t{1} << 40, 7, std::int64_t{1} << 39}}) {
      const auto sum = static_cast<double>(std::accumulate(weights.begin(), weights.end(), std::int64_t{0}));
      std::vector<std::int64_t> given(weights.size(), 0);
      for (const Stripe& stripe : stripes_of(pages, weights)) {
        CHECK(stripe.pages > 0);
        given[stripe.node] += stripe.pages;
      }
      CHECK(std::accumulate(given.begin(), given.end(), std::int64_t{0}) == pages);
      for (std::size_t node = 0; node < weights.size(); ++node) {
        const double share = static_cast<double>(pages) * static_cast<double>(weights[node]) / sum;
        CHECK(std::abs(static_cast<double>(given[node]) - share) < 1);
      }
    }
  }
}

// Any part that a thread works on contains each node's share, so no thread gets all pages of the slow node.
TEST(placement_stripes_are_spread_evenly) {
  std::int64_t at = 0, first = 0;
  for (const Stripe& stripe : stripes_of(64 * 512, {3, 1})) {
    CHECK(stripe.pages <= 3 * 512);
    at += stripe.pages;
    first += stripe.node == 0 ? stripe.pages : 0;
    CHECK(std::abs(static_cast<double>(first) - 0.75 * static_cast<double>(at)) <= 512);
  }
}

TEST(placement_striped_on_node_0_is_touched_and_moved) {
  PinnedRegistry registry;
  const PinnedBlock block =
      registry.allocate(1, 40 * kPageBytes, false, false, PageKind::kSmall, {PlacementMode::kStriped, {0}, {3}});
  auto* data = reinterpret_cast<char*>(block.address);
  CHECK((pages_by_node(data, block.reserved_bytes) == Pages{{0, 40}}));
  move_pages_to(data, block.reserved_bytes, {PlacementMode::kStriped, {0}, {1}});
  CHECK(registry.release(block.address));
  const auto refusal = [&](const Placement& placement) {
    return message_of<Error>(
        [&] { (void)registry.allocate(1, kPageBytes, false, false, PageKind::kSmall, placement); });
  };
  CHECK(contains(refusal({PlacementMode::kStriped, {0}, {}}), "a weight of 0 or more for each node"));
  CHECK(contains(refusal({PlacementMode::kStriped, {0}, {0}}), "one above 0"));
  CHECK(contains(refusal({PlacementMode::kStriped, {900}, {1}}), "node 900"));
}

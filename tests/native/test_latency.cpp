#include <vector>

#include "check.h"
#include "core/errors.h"
#include "core/latency.h"

using namespace memascend;
using check::contains;
using check::message_of;

TEST(latency_visits_every_line_of_one_cycle) {
  alignas(64) static std::int64_t memory[8 * 1000];
  // After as many hops as there are lines the walk is back at line 0, which the final store makes point to itself.
  CHECK(load_latency_ns(memory, sizeof(memory), 1000, 7) > 0);
  CHECK(memory[0] == 0);
  std::vector<bool> seen(1000, false);
  for (int line = 1; line < 1000; ++line) {
    const auto next = static_cast<std::size_t>(memory[8 * line]);
    CHECK(next < 1000 && !seen[next]);
    seen[next] = true;
  }
}

TEST(latency_refuses_what_has_no_two_lines) {
  alignas(64) static std::int64_t memory[16];
  const auto words = message_of<Error>([&] { (void)load_latency_ns(memory, 64, 10, 0); });
  CHECK(contains(words, "two lines of 64 bytes"));
}

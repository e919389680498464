// How long memory takes to answer one load that depends on the one before.
#pragma once

#include <cstdint>

namespace memascend {

// Nanoseconds a load of `hops` loads over [address, address + bytes), whose lines are linked in a random cycle: each
// address comes from the load before, so nothing runs ahead. What was there is overwritten. The address is aligned to
// 64 bytes; `seed` chooses the cycle. Throws Error(kInvalidArgument) for fewer than two lines or no hop.
[[nodiscard]] double load_latency_ns(void* address, std::int64_t bytes, std::int64_t hops, std::uint64_t seed);

}  // namespace memascend

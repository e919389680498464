// Memory latency: the time of one load that depends on the load before it.
#pragma once

#include <cstdint>

namespace memascend {

// Returns nanoseconds per load, measured over `hops` loads. The cache lines of [address, address + bytes) are linked in
// a random cycle, so that each address comes from the load before and the processor cannot run ahead. The memory is
// overwritten. The address must be aligned to 64 bytes; `seed` chooses the cycle. Throws Error(kInvalidArgument) for
// an unaligned address, fewer than two lines, or no hop.
[[nodiscard]] double load_latency_ns(void* address, std::int64_t bytes, std::int64_t hops, std::uint64_t seed);

}  // namespace memascend

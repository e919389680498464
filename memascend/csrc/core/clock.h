// CLOCK_MONOTONIC in nanoseconds: the clock of Python's time.monotonic_ns(), so that events and samples line up.
#pragma once

#include <cstdint>
#include <ctime>

namespace memascend {

inline std::int64_t monotonic_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

}  // namespace memascend

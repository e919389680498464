#include "latency.h"

#include <random>
#include <utility>

#include "clock.h"
#include "errors.h"

namespace memascend {
namespace {

constexpr std::int64_t kLineBytes = 64;

struct alignas(kLineBytes) Line {
  std::int64_t next;
};

}  // namespace

double load_latency_ns(void* address, std::int64_t bytes, std::int64_t hops, std::uint64_t seed) {
  const std::int64_t count = bytes / kLineBytes;
  if (count < 2 || hops < 1 || reinterpret_cast<std::uintptr_t>(address) % kLineBytes != 0) {
    throw Error(ErrorKind::kInvalidArgument, "latency: two lines of 64 bytes, aligned, and one hop are the least");
  }
  auto* lines = static_cast<Line*>(address);
  for (std::int64_t line = 0; line < count; ++line) {
    lines[line].next = line;
  }
  // Sattolo's shuffle: one cycle through all lines.
  std::mt19937_64 random(seed);
  for (std::int64_t line = count - 1; line > 0; --line) {
    std::swap(lines[line].next, lines[static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(line))].next);
  }
  std::int64_t at = 0;
  const std::int64_t start = monotonic_ns();
  for (std::int64_t hop = 0; hop < hops; ++hop) {
    at = lines[at].next;
  }
  const std::int64_t elapsed = monotonic_ns() - start;
  lines[0].next = at;  // uses the result, so that the compiler keeps the loads
  return static_cast<double>(elapsed) / static_cast<double>(hops);
}

}  // namespace memascend

// One small pool for all kernels. The caller works too. Each thread has a share of the chunks, and helps the others
// when it is done, so that a helper that wakes late, or a core that somebody else is using, costs little. Helpers are
// OpenMP's (torch has started them already) where this is compiled with it, and threads of our own elsewhere and after
// a fork.
#pragma once

#include <cstdint>
#include <functional>

#include "numa_threads.h"

namespace memascend {

// Calls body(i) once for every i in [0, chunks), on the caller and at most `threads - 1` helpers, and returns when all
// calls have returned. A body that returns false stops the rest: chunks not yet claimed are not run. Bodies must not
// throw. The order and the thread of a chunk are not defined. Where the pool is already in use (by another thread, or
// because a body calls this again) the caller works alone. Safe after fork: the child starts helpers of its own. With
// a `plan` (of as many chunks and threads) each thread begins with chunks near its node, on whose processors it is
// kept as long as this takes.
void parallel_chunks(std::int64_t chunks, int threads, const std::function<bool(std::int64_t)>& body,
                     const NumaPlan* plan = nullptr);

}  // namespace memascend

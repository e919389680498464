// One small thread pool for all kernels. The caller works too. Each thread has a share of the chunks, and helps the
// others when it is done, so that a helper that wakes up late, or a core that another process is using, costs little.
// Helpers are OpenMP's threads (which torch has started already) where this is compiled with OpenMP, and our own
// threads elsewhere and after a fork.
#pragma once

#include <cstdint>
#include <functional>

#include "numa_threads.h"

namespace memascend {

// Calls body(i) once for every i in [0, chunks), on the caller and at most `threads - 1` helpers, and returns when all
// calls have returned. If a body returns false, chunks that have not been claimed yet are not run. Bodies must not
// throw. The order of chunks and the thread of each are unspecified. If the pool is already in use (by another thread,
// or because a body calls this again) the caller works alone. Safe after fork: the child starts its own helpers. With a
// `plan` (for the same numbers of chunks and threads) each thread begins with chunks near its node, and is kept on that
// node's processors during the call.
void parallel_chunks(std::int64_t chunks, int threads, const std::function<bool(std::int64_t)>& body,
                     const NumaPlan* plan = nullptr);

}  // namespace memascend

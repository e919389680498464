// The threads of an engine: as many as asked for or none, and no signal of the program's is delivered to them.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "io_syscalls.h"

namespace memascend {

// Appends `count` threads, each running `body(number)`. Throws Error when the system refuses one; those that were
// started are then in `threads`, and the caller stops and joins them.
void start_threads(const std::string& engine, std::vector<std::thread>& threads, int count, IoSyscalls& calls,
                   const std::function<void(int)>& body);

}  // namespace memascend

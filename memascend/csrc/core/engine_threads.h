// Threads of an engine. Signals to the program are not delivered to them.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "io_syscalls.h"

namespace memascend {

// Appends `count` threads, each running `body(number)`. Throws Error if the system refuses one; those that were started
// are then in `threads`, and the caller must stop and join them.
void start_threads(const std::string& engine, std::vector<std::thread>& threads, int count, IoSyscalls& calls,
                   const std::function<void(int)>& body);

}  // namespace memascend

#include "engine_threads.h"

#include <pthread.h>
#include <signal.h>

#include <cstddef>
#include <system_error>

#include "errors.h"

namespace memascend {
namespace {

// Blocks all signals while in scope. Threads inherit the signal mask of the thread that starts them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

void start_threads(const std::string& engine, std::vector<std::thread>& threads, int count, IoSyscalls& calls,
                   const std::function<void(int)>& body) {
  const SignalsBlocked blocked;
  threads.reserve(static_cast<std::size_t>(count));
  for (int number = 0; number < count; ++number) {
    try {
      threads.push_back(calls.start_thread([body, number] { body(number); }));
    } catch (const std::system_error& error) {
      throw Error(ErrorKind::kState, engine + ": the system refuses thread " + std::to_string(number + 1) + " of " +
                                         std::to_string(count) + ": " + error.code().message() +
                                         ": use fewer, or raise the limit on threads (ulimit -u, pids of the cgroup)");
    }
  }
}

}  // namespace memascend

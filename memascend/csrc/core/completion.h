// How requests end, the same for every engine: each outcome is reported once.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace memascend {

struct RequestFailure {
  std::string op;   // read or write
  std::string key;  // of the tensor; empty where the path says it all
  std::string path;  // file or device
  std::int64_t offset = 0;  // of the piece that failed, in the file or on the device
  std::int64_t expected = 0;
  std::int64_t got = 0;
  int error = 0;  // errno; 0: the reason says it
  std::string reason;
};

struct RequestOutcome {
  bool cancelled = false;
  std::optional<RequestFailure> failure;
  std::shared_ptr<void> keep_alive;  // owner of the buffer; released by the caller, not by a worker
};
using EndedRequest = std::pair<std::uint64_t, RequestOutcome>;

// What every wait for a request calls some times a second, with no lock held; what it throws ends the wait. For the
// whole process; nullptr: nothing.
void set_poll_while_waiting(void (*poll)()) noexcept;

// The requests of an engine that have not ended, and the outcomes that have not been reported. An outcome goes to
// whoever asks first (`wait_for`, `wait` or `take`), except that one which a thread waits for by number is that
// thread's. All of it with the engine's mutex held; the waits take it as a lock, and release it while they block.
class Completions {
 public:
  Completions() = default;
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;
  ~Completions();

  void begin(std::uint64_t request) { live_.insert(request); }
  void end(std::uint64_t request, RequestOutcome outcome);
  [[nodiscard]] std::size_t live() const noexcept { return live_.size(); }

  // Blocks until the request has ended. Empty: the time (seconds, < 0: no limit) is up; nothing was reported.
  // Throws Error for a number that is unknown or reported already.
  [[nodiscard]] std::optional<RequestOutcome> wait_for(std::unique_lock<std::mutex>& lock, std::uint64_t request,
                                                       double seconds);
  // Blocks until none is live; all outcomes that are left. Empty: the time is up.
  [[nodiscard]] std::optional<std::vector<EndedRequest>> wait(std::unique_lock<std::mutex>& lock, double seconds);
  // The outcomes there are now, without blocking.
  [[nodiscard]] std::vector<EndedRequest> take();

  // An eventfd (nonblocking, closed on exec) that is readable while there are outcomes to report, and is signalled for
  // each request that ends. Made by the first call: an engine that nobody polls makes no system calls for it. Closed
  // with this object. Throws Error.
  [[nodiscard]] int fd();

  // In a forked child, where destroying the condition would wait for the parent's threads.
  void abandon_waiters() noexcept { (void)ended_.release(); }

 private:
  void drain_if_empty();

  std::unique_ptr<std::condition_variable> ended_ = std::make_unique<std::condition_variable>();
  std::set<std::uint64_t> live_;
  std::map<std::uint64_t, RequestOutcome> outcomes_;
  std::multiset<std::uint64_t> awaited_;  // by number
  int fd_ = -1;
};

}  // namespace memascend

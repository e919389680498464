// Outcomes of requests and how they are reported, shared by both engines. Each outcome is reported once.
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
  std::string key;  // of the tensor; empty where the path identifies it
  std::string path;  // file or device
  std::int64_t offset = 0;  // of the piece that failed, in the file or on the device
  std::int64_t expected = 0;
  std::int64_t got = 0;
  int error = 0;  // errno; 0 if the kernel reported no error and only `reason` says what happened
  std::string reason;
};

struct RequestOutcome {
  bool cancelled = false;
  std::optional<RequestFailure> failure;
  std::shared_ptr<void> keep_alive;  // owner of the buffer; released by the caller, not by a worker
};
using EndedRequest = std::pair<std::uint64_t, RequestOutcome>;

// Sets a function that every wait for a request calls a few times per second, with no lock held; an exception from it
// ends the wait. It applies to the whole process; nullptr turns it off.
void set_poll_while_waiting(void (*poll)()) noexcept;

// The requests of an engine that have not ended, and the outcomes that have not been reported. An outcome goes to the
// first caller that asks (`wait_for`, `wait` or `take`), unless a thread waits for that request by number: then it goes
// to that thread. All functions need the engine's mutex held; the waits take it as a lock and release it while they
// block.
class Completions {
 public:
  Completions() = default;
  Completions(const Completions&) = delete;
  Completions& operator=(const Completions&) = delete;
  ~Completions();

  void begin(std::uint64_t request) { live_.insert(request); }
  void end(std::uint64_t request, RequestOutcome outcome);
  [[nodiscard]] std::size_t live() const noexcept { return live_.size(); }

  // Blocks until the request has ended, at most `seconds` (negative: no limit). Returns its outcome, or nothing if the
  // time is up. Throws Error for a number that is unknown or whose outcome has been reported already.
  [[nodiscard]] std::optional<RequestOutcome> wait_for(std::unique_lock<std::mutex>& lock, std::uint64_t request,
                                                       double seconds);
  // Blocks until no request is live. Returns all outcomes that have not been reported, or nothing if the time is up.
  [[nodiscard]] std::optional<std::vector<EndedRequest>> wait(std::unique_lock<std::mutex>& lock, double seconds);
  // Returns the outcomes that are available now, without blocking.
  [[nodiscard]] std::vector<EndedRequest> take();

  // Returns an eventfd (nonblocking, closed on exec) that is readable while there are outcomes to report, and is
  // signalled for each request that ends. The first call makes it, so an engine that is never polled makes no system
  // calls for it. This object owns and closes it. Throws Error if the system has no descriptor left.
  [[nodiscard]] int fd();

  // For a forked child, where destroying the condition would wait for the parent's threads.
  void abandon_waiters() noexcept { (void)ended_.release(); }

 private:
  void drain_if_empty();

  std::unique_ptr<std::condition_variable> ended_ = std::make_unique<std::condition_variable>();
  std::set<std::uint64_t> live_;
  std::map<std::uint64_t, RequestOutcome> outcomes_;
  std::multiset<std::uint64_t> awaited_;  // requests that a thread waits for by number
  int fd_ = -1;
};

}  // namespace memascend

#include "completion.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "errors.h"

namespace memascend {
namespace {

constexpr std::chrono::milliseconds kPollEvery{200};
std::atomic<void (*)()> poll_while_waiting{nullptr};

// Returns false if the time is up. Passes on exceptions of `poll_while_waiting`.
template <typename Done>
bool wait_on(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, double seconds, Done done) {
  using Clock = std::chrono::steady_clock;
  const bool limited = seconds >= 0;
  const auto limit = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e6)));
  const auto end = Clock::now() + (limited ? limit : Clock::duration::zero());
  while (!done()) {
    const auto now = Clock::now();
    if (limited && now >= end) {
      return false;
    }
    auto next = now + kPollEvery;
    if (limited && end < next) {
      next = end;
    }
    if (condition.wait_until(lock, next, done)) {
      return true;
    }
    if (auto* const poll = poll_while_waiting.load(); poll != nullptr) {
      lock.unlock();
      try {
        poll();
      } catch (...) {
        lock.lock();
        throw;
      }
      lock.lock();
    }
  }
  return true;
}

void signal(int fd, std::uint64_t count) { (void)!::write(fd, &count, sizeof(count)); }

}  // namespace

void set_poll_while_waiting(void (*poll)()) noexcept { poll_while_waiting = poll; }

Completions::~Completions() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

void Completions::end(std::uint64_t request, RequestOutcome outcome) {
  outcomes_[request] = std::move(outcome);
  live_.erase(request);
  if (fd_ >= 0) {
    signal(fd_, 1);
  }
  ended_->notify_all();
}

std::optional<RequestOutcome> Completions::wait_for(std::unique_lock<std::mutex>& lock, std::uint64_t request,
                                                    double seconds) {
  const auto claim = awaited_.insert(request);
  bool ended = false;
  try {
    ended = wait_on(*ended_, lock, seconds, [&] { return !live_.contains(request); });
  } catch (...) {
    awaited_.erase(claim);
    throw;
  }
  awaited_.erase(claim);
  if (!ended) {
    return std::nullopt;
  }
  const auto found = outcomes_.find(request);
  if (found == outcomes_.end()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "request " + std::to_string(request) + " is unknown, or its outcome has been reported: each is reported once");
  }
  RequestOutcome out = std::move(found->second);
  outcomes_.erase(found);
  drain_if_empty();
  return out;
}

std::optional<std::vector<EndedRequest>> Completions::wait(std::unique_lock<std::mutex>& lock, double seconds) {
  if (!wait_on(*ended_, lock, seconds, [&] { return live_.empty(); })) {
    return std::nullopt;
  }
  return take();
}

std::vector<EndedRequest> Completions::take() {
  std::vector<EndedRequest> out;
  for (auto at = outcomes_.begin(); at != outcomes_.end();) {
    if (awaited_.contains(at->first)) {
      ++at;
      continue;
    }
    out.emplace_back(at->first, std::move(at->second));
    at = outcomes_.erase(at);
  }
  drain_if_empty();
  return out;
}

int Completions::fd() {
  if (fd_ < 0) {
    fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd_ < 0) {
      throw Error(ErrorKind::kState, std::string("completion_fd: no event descriptor: ") + std::strerror(errno) +
                                         ": raise the limit on open files (ulimit -n)");
    }
    if (!outcomes_.empty()) {
      signal(fd_, outcomes_.size());
    }
  }
  return fd_;
}

void Completions::drain_if_empty() {
  if (fd_ >= 0 && outcomes_.empty()) {
    std::uint64_t count = 0;
    (void)!::read(fd_, &count, sizeof(count));
  }
}

}  // namespace memascend

#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "simd_x86.h"

namespace memascend {
namespace {

// A helper polls this many times for the next job before it sleeps: about 20 us, the cost of a wake-up by the kernel.
constexpr int kSpins = 1500;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// One thread's share of the chunks. They are claimed from the front, by that thread and by others that have finished
// their own share.
struct alignas(64) Share {
  std::atomic<std::int64_t> next{0};
  std::int64_t end = 0;
  const CpuNode* node = nullptr;  // the node of its data, if there is a plan
  bool owned = false;             // a thread has begun with it
};

// Every thread streams through its own share: two threads that alternate chunks of one share get a fifth less
// bandwidth (measured on 120 MB).
class Job {
 public:
  Job(const std::function<bool(std::int64_t)>& body, std::int64_t chunks, int threads)
      : body_(body), shares_(static_cast<std::size_t>(threads)) {
    divide(0, 0, chunks, threads, nullptr);
  }

  // A node that has chunks but no thread becomes one share, which the threads of other nodes take from.
  Job(const std::function<bool(std::int64_t)>& body, const NumaPlan& plan)
      : body_(body), order_(plan.order.data()), shares_(count_shares(plan)) {
    std::size_t first = 0;
    for (const NodeShare& share : plan.shares) {
      const int parts = std::max(1, share.threads);
      divide(first, share.begin, share.end, parts, &share.node);
      for (int i = share.threads; i < parts; ++i) {
        shares_[first + static_cast<std::size_t>(i)].owned = true;
      }
      first += static_cast<std::size_t>(parts);
    }
  }

  void work() {
    if (order_ == nullptr) {
      const std::size_t own = joined_.fetch_add(1, std::memory_order_relaxed);
      for (std::size_t i = 0; i < shares_.size(); ++i) {
        work_on(shares_[(own + i) % shares_.size()]);
      }
      return;
    }
    const std::size_t own = take_share();
    if (own == shares_.size()) {
      return;  // there are more threads than planned
    }
    const CpuNode* node = shares_[own].node;
    const OnNode stays(*node);
    const bool arrived = runs_on(*node);  // false if the thread's own affinity forbids it
    std::int64_t near = 0;
    std::int64_t far = 0;
    for (const bool at_home : {true, false}) {
      for (std::size_t i = 0; i < shares_.size(); ++i) {
        Share& share = shares_[(own + i) % shares_.size()];
        if ((share.node == node) == at_home) {
          (at_home && arrived ? near : far) += work_on(share);
        }
      }
    }
    count_chunks(near, far);
  }

 private:
  static std::size_t count_shares(const NumaPlan& plan) {
    std::size_t count = 0;
    for (const NodeShare& share : plan.shares) {
      count += static_cast<std::size_t>(std::max(1, share.threads));
    }
    return count;
  }

  void divide(std::size_t first, std::int64_t begin, std::int64_t end, int parts, const CpuNode* node) {
    for (int i = 0; i < parts; ++i) {
      Share& share = shares_[first + static_cast<std::size_t>(i)];
      share.next = begin + (end - begin) * i / parts;
      share.end = begin + (end - begin) * (i + 1) / parts;
      share.node = node;
    }
  }

  // Returns the index of a share that no thread has begun with, preferably of the node that this thread runs on; the
  // number of shares if there is none.
  std::size_t take_share() {
    std::lock_guard<std::mutex> guard(taking_);
    std::size_t found = shares_.size();
    for (std::size_t i = 0; i < shares_.size(); ++i) {
      if (!shares_[i].owned && (found == shares_.size() || runs_on(*shares_[i].node))) {
        found = i;
        if (runs_on(*shares_[i].node)) {
          break;
        }
      }
    }
    if (found < shares_.size()) {
      shares_[found].owned = true;
    }
    return found;
  }

  // Returns the number of chunks of this share that the thread has run.
  std::int64_t work_on(Share& share) {
    std::int64_t run = 0;
    while (!stopped_.load(std::memory_order_relaxed)) {
      const std::int64_t chunk = share.next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= share.end) {
        break;
      }
      ++run;
      if (!body_(order_ == nullptr ? chunk : order_[chunk])) {
        stopped_.store(true, std::memory_order_relaxed);
      }
    }
    return run;
  }

  const std::function<bool(std::int64_t)>& body_;
  const std::int64_t* order_ = nullptr;  // chunks in the order of the shares, if there is a plan
  std::vector<Share> shares_;
  std::mutex taking_;
  std::atomic<std::size_t> joined_{0};
  std::atomic<bool> stopped_{false};
};

class Pool {
 public:
  // Returns false, without having run anything, if the pool is in use.
  bool run(Job& job, int helpers) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock()) {
      return false;
    }
    {
      std::lock_guard<std::mutex> guard(mutex_);
      start_helpers(helpers);
      job_ = &job;
      places_ = helpers;
      posted_.fetch_add(1, std::memory_order_relaxed);
    }
    wake_.notify_all();
    job.work();
    std::unique_lock<std::mutex> lock(mutex_);
    job_ = nullptr;  // from here on no helper joins
    idle_.wait(lock, [&] { return active_ == 0; });
    return true;
  }

 private:
  // Helpers are detached: they sleep until the process ends, when nothing could join them.
  void start_helpers(int wanted) {
    for (; started_ < wanted; ++started_) {
      std::thread([this] { help(); }).detach();
    }
  }

  [[noreturn]] void help() {
    for (std::uint64_t seen = 0;;) {
      for (int i = 0; i < kSpins && posted_.load(std::memory_order_relaxed) == seen; ++i) {
        relax();
      }
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return posted_.load(std::memory_order_relaxed) != seen; });
      seen = posted_.load(std::memory_order_relaxed);
      if (job_ == nullptr || places_ == 0) {
        continue;
      }
      Job& job = *job_;
      --places_;
      ++active_;
      lock.unlock();
      job.work();
      lock.lock();
      if (--active_ == 0) {
        idle_.notify_one();
      }
    }
  }

  std::mutex turn_;  // locked by the caller whose job runs
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::atomic<std::uint64_t> posted_{0};  // changed under mutex_; read without it while spinning
  Job* job_ = nullptr;
  int places_ = 0;  // number of helpers that may still join the job
  int active_ = 0;
  int started_ = 0;
};

// Never destroyed, since its helpers never end; replaced in a forked child, which does not have them.
std::atomic<Pool*> current{nullptr};

Pool& pool() {
  static const bool once = [] {
    current = new Pool();
    pthread_atfork(nullptr, nullptr, [] { current = new Pool(); });
    return true;
  }();
  (void)once;
  return *current;
}

// If this is compiled with OpenMP, torch's workers are used (there is one libgomp in the process). With helpers of our
// own, torch's workers would spin on the cores that the helpers need, which was measured to halve the bandwidth. A
// forked child has none of these workers, and libgomp would wait for them forever.
bool openmp_is_usable() {
#if defined(_OPENMP)
  static std::atomic<bool> forked{false};
  static const bool once = pthread_atfork(nullptr, nullptr, [] { forked = true; }) == 0;
  return once && !forked;
#else
  return false;
#endif
}

}  // namespace

void parallel_chunks(std::int64_t chunks, int threads, const std::function<bool(std::int64_t)>& body,
                     const NumaPlan* plan) {
  if (chunks <= 0) {
    return;
  }
  const auto workers = static_cast<int>(std::clamp<std::int64_t>(chunks, 1, std::max(1, threads)));
  std::optional<Job> job;
  if (plan == nullptr) {
    job.emplace(body, chunks, workers);
  } else {
    job.emplace(body, *plan);
  }
  if (workers == 1) {
    job->work();
  } else if (openmp_is_usable()) {
#pragma omp parallel num_threads(workers)
    job->work();
  } else if (!pool().run(*job, workers - 1)) {
    job->work();
  }
}

}  // namespace memascend

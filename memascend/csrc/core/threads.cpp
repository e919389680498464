#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "simd_x86.h"

namespace memascend {
namespace {

// A helper looks this often for the next job before it sleeps: some 20 us, what a wake-up by the kernel costs.
constexpr int kSpins = 1500;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

struct Job {
  const std::function<bool(std::int64_t)>* body;
  std::int64_t chunks;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> stopped{false};

  void work() {
    while (!stopped.load(std::memory_order_relaxed)) {
      const std::int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= chunks) {
        return;
      }
      if (!(*body)(chunk)) {
        stopped.store(true, std::memory_order_relaxed);
      }
    }
  }
};

class Pool {
 public:
  // False if the pool is in use: then nothing was run.
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
    job_ = nullptr;  // from here on nobody joins
    idle_.wait(lock, [&] { return active_ == 0; });
    return true;
  }

 private:
  // Detached: they sleep until the process ends, and nobody could join them then.
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

  std::mutex turn_;  // held by the caller whose job runs
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::atomic<std::uint64_t> posted_{0};  // changed under mutex_; read without it while spinning
  Job* job_ = nullptr;
  int places_ = 0;  // helpers that the job still takes
  int active_ = 0;
  int started_ = 0;
};

// Never destroyed, since its helpers never end; replaced in a forked child, where they do not exist.
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

}  // namespace

void parallel_chunks(std::int64_t chunks, int threads, const std::function<bool(std::int64_t)>& body) {
  if (chunks <= 0) {
    return;
  }
  Job job{&body, chunks};
  const auto helpers = static_cast<int>(std::min<std::int64_t>(threads, chunks)) - 1;
  if (helpers < 1 || !pool().run(job, helpers)) {
    job.work();
  }
}

}  // namespace memascend

// Behaviour that both engines share: threads without signals, a refused thread, and outcomes that are reported once.
#include <poll.h>
#include <pthread.h>
#include <signal.h>

#include <system_error>

#include "check.h"
#include "core/file_engine.h"
#include "storage_fixture.h"

using namespace storage_fixture;
using check::contains;
using check::message_of;

namespace {

// Refuses thread number `refused` (from 0), and records which signals each of the others accepts.
class Threads : public IoSyscalls {
 public:
  explicit Threads(int refused = -1) : refused_(refused) {}
  std::thread start_thread(std::function<void()> body) override {
    if (started++ == refused_) {
      throw std::system_error(EAGAIN, std::generic_category());
    }
    return std::thread([this, body = std::move(body)] {
      sigset_t blocked;
      pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
      open_to_signals += sigismember(&blocked, SIGTERM) != 1 || sigismember(&blocked, SIGINT) != 1 ? 1 : 0;
      body();
    });
  }
  std::atomic<int> started{0};
  std::atomic<int> open_to_signals{0};

 private:
  const int refused_;
};

bool readable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return poll(&entry, 1, 0) == 1;
}

}  // namespace

TEST(engine_threads_take_no_signals) {
  const Bench bench;
  Threads calls;
  {
    const FileEngine files(3, 4096, calls);
    const DirectEngine direct(bench.open(), options_for("auto", 2), calls);
  }
  CHECK(calls.started == 5 && calls.open_to_signals == 0);
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  CHECK(sigismember(&blocked, SIGTERM) == 0);  // the caller's mask is unchanged
}

TEST(a_thread_that_the_system_refuses_is_an_error_and_the_others_end) {
  const Bench bench;
  for (const int refused : {0, 2}) {
    Threads calls(refused);
    const std::string files = message_of<Error>([&] { const FileEngine engine(3, 4096, calls); });
    CHECK_NOTE(contains(files, "thread " + std::to_string(refused + 1) + " of 3") && contains(files, "ulimit -u"),
               files);
    Threads again(refused);
    const std::string direct =
        message_of<Error>([&] { const DirectEngine engine(bench.open(), options_for("auto", 3), again); });
    CHECK_NOTE(contains(direct, "thread " + std::to_string(refused + 1) + " of 3"), direct);
  }
}

TEST(completions_are_reported_once_to_whoever_asks_first) {
  Completions completions;
  std::mutex mutex;
  std::unique_lock<std::mutex> lock(mutex);
  for (const std::uint64_t request : {1, 2, 3, 4}) {
    completions.begin(request);
  }
  completions.end(2, {});
  const int fd = completions.fd();
  CHECK(readable(fd));  // also for requests that ended before the descriptor was made
  CHECK(completions.take().size() == 1 && !readable(fd) && completions.take().empty());
  CHECK(contains(message_of<Error>([&] { (void)completions.wait_for(lock, 2, 0); }), "has been reported"));
  completions.end(1, {true, std::nullopt, nullptr});
  completions.end(3, {});
  CHECK(readable(fd));
  CHECK(completions.wait_for(lock, 1, -1)->cancelled && readable(fd));
  CHECK(!completions.wait(lock, 0.001) && !completions.wait_for(lock, 4, 0.001) && completions.live() == 1);
  completions.end(4, {});
  CHECK(completions.wait(lock, -1)->size() == 2 && !readable(fd));
}

TEST(an_outcome_that_a_thread_waits_for_is_not_taken_from_it) {
  Completions completions;
  std::mutex mutex;
  completions.begin(1);
  completions.begin(2);
  std::atomic<bool> waiting{false};
  std::thread waiter([&] {
    std::unique_lock<std::mutex> lock(mutex);
    waiting = true;  // the lock is released only once the wait has begun
    CHECK(completions.wait_for(lock, 1, -1).has_value());
  });
  while (!waiting) {
    std::this_thread::yield();
  }
  {
    std::lock_guard<std::mutex> guard(mutex);
    completions.end(1, {});
    completions.end(2, {});
    const auto taken = completions.take();
    CHECK(taken.size() == 1 && taken[0].first == 2);
  }
  waiter.join();
}

TEST(registering_a_buffer_while_the_engine_ends_does_not_wait_for_ever) {
  const Bench bench;
  const std::shared_ptr<Store> store = bench.open();
  for (int round = 0; round < 100; ++round) {
    DirectEngine engine(store, options_for("auto", 2));
    SectorBuffer memory(1 << 16);
    std::atomic<int> begun{0};
    std::thread registers([&] {
      for (int again = 0; again < 1000; ++again) {
        ++begun;
        if (!engine.register_buffer(memory.data(), memory.bytes(), std::make_shared<int>(1))) {
          break;  // libaio, or the engine has ended
        }
        (void)engine.unregister_buffer(memory.data());
      }
    });
    while (begun < 1 + round % 7) {
      std::this_thread::yield();
      if (engine.backend() == AioKind::kLibaio) {
        break;
      }
    }
    engine.shutdown();
    registers.join();
  }
}

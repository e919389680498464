#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "core/threads.h"

using namespace memascend;

namespace {

bool each_chunk_once(std::int64_t chunks, int threads) {
  std::vector<std::atomic<int>> calls(static_cast<std::size_t>(chunks));
  parallel_chunks(chunks, threads, [&](std::int64_t i) {
    ++calls[static_cast<std::size_t>(i)];
    return true;
  });
  for (const auto& count : calls) {
    if (count != 1) {
      return false;
    }
  }
  return true;
}

}  // namespace

TEST(threads_run_every_chunk_once) {
  for (const int threads : {1, 2, 3, 8}) {
    for (const std::int64_t chunks : {0, 1, 2, 7, 1000}) {
      for (int repeat = 0; repeat < 20; ++repeat) {
        CHECK(each_chunk_once(chunks, threads));
      }
    }
  }
}

TEST(threads_results_are_seen_by_the_caller_without_atomics) {
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<int> results(64, -1);
    parallel_chunks(64, 4, [&](std::int64_t i) {
      results[static_cast<std::size_t>(i)] = static_cast<int>(i) + repeat;
      return true;
    });
    for (int i = 0; i < 64; ++i) {
      CHECK(results[static_cast<std::size_t>(i)] == i + repeat);
    }
  }
}

TEST(threads_stop_when_a_chunk_says_so) {
  std::atomic<int> calls{0};
  parallel_chunks(1'000'000, 3, [&](std::int64_t) {
    ++calls;
    return false;
  });
  CHECK(calls >= 1 && calls <= 3);
}

TEST(threads_serve_several_callers_and_nested_calls) {
  std::vector<std::thread> callers;
  std::atomic<int> good{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 50; ++repeat) {
        std::atomic<int> inner{0};
        parallel_chunks(8, 3, [&](std::int64_t) {
          parallel_chunks(4, 3, [&](std::int64_t) {
            ++inner;
            return true;
          });
          return true;
        });
        good += inner == 32;
      }
    });
  }
  for (auto& caller : callers) {
    caller.join();
  }
  CHECK(good == 200);
}

#if !defined(__SANITIZE_THREAD__)  // TSan does not support starting threads after a fork
TEST(threads_work_in_a_forked_child) {
  CHECK(each_chunk_once(100, 3));
  const pid_t child = fork();
  if (child == 0) {
    _exit(each_chunk_once(100, 3) && each_chunk_once(100, 2) ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(each_chunk_once(100, 3));
}
#endif

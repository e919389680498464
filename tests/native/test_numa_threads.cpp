#include <sched.h>

#include <atomic>
#include <vector>

#include "check.h"
#include "core/numa_threads.h"
#include "core/threads.h"

using namespace memascend;

namespace {

cpu_set_t own_cpus() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CHECK(sched_getaffinity(0, sizeof mask, &mask) == 0);
  return mask;
}

// A plan for two nodes, one with the even chunks and one with the odd ones. Both may use all processors, or the first
// only one.
NumaPlan plan_of(std::int64_t chunks, int first_threads, int second_threads, bool one_cpu) {
  const cpu_set_t all = own_cpus();
  CpuNode first{0, all};
  if (one_cpu) {
    int cpu = 0;
    while (CPU_ISSET(cpu, &all) == 0) {
      ++cpu;
    }
    CPU_ZERO(&first.cpus);
    CPU_SET(cpu, &first.cpus);
  }
  NumaPlan plan;
  for (const std::int64_t rest : {0, 1}) {
    const auto begin = static_cast<std::int64_t>(plan.order.size());
    for (std::int64_t chunk = rest; chunk < chunks; chunk += 2) {
      plan.order.push_back(chunk);
    }
    const auto end = static_cast<std::int64_t>(plan.order.size());
    plan.shares.push_back(
        {rest == 0 ? first : CpuNode{1, all}, rest == 0 ? first_threads : second_threads, begin, end});
  }
  return plan;
}

}  // namespace

TEST(numa_threads_are_divided_by_chunks_and_no_node_has_more_than_its_processors_while_another_has_one) {
  CHECK((divide_threads(8, {300, 100}, {8, 8}) == std::vector<int>{6, 2}));
  CHECK((divide_threads(16, {400, 0}, {8, 8}) == std::vector<int>{8, 8}));
  CHECK((divide_threads(20, {100, 100}, {8, 8}) == std::vector<int>{10, 10}));
  CHECK((divide_threads(3, {100, 0, 100}, {4, 0, 4}) == std::vector<int>{2, 0, 1}));
  CHECK((divide_threads(1, {1, 99}, {4, 4}) == std::vector<int>{0, 1}));
  CHECK((divide_threads(2, {0, 0}, {0, 0}) == std::vector<int>{0, 0}));
}

TEST(numa_memory_without_processors_counts_to_the_nearest_node_and_to_none_of_equals) {
  CHECK(nearest_node({0, 3}, {10, 20, 24, 40}) == 0);
  CHECK(nearest_node({0, 3}, {24, 28, 10, 15}) == 1);
  CHECK(nearest_node({0, 3}, {20, 10, 20, 20}) == -1);
  CHECK(nearest_node({1, 2, 3}, {0, 20, 20, 15}) == 2);
}

TEST(numa_plan_runs_every_chunk_once_whatever_threads_come) {
  for (const auto& [first, second] : {std::pair(1, 1), std::pair(2, 1), std::pair(0, 2), std::pair(2, 0)}) {
    for (const int threads : {1, first + second, first + second + 3}) {
      for (const bool one_cpu : {false, true}) {
        const NumaPlan plan = plan_of(999, first, second, one_cpu);
        std::vector<std::atomic<int>> calls(999);
        const ChunkCounts before = numa_chunk_counts();
        parallel_chunks(
            999, threads,
            [&](std::int64_t i) {
              ++calls[static_cast<std::size_t>(i)];
              return true;
            },
            &plan);
        for (const auto& count : calls) {
          CHECK(count == 1);
        }
        const ChunkCounts after = numa_chunk_counts();
        CHECK(after.near + after.elsewhere - before.near - before.elsewhere == 999);
      }
    }
  }
}

TEST(numa_plan_keeps_a_thread_on_its_node_and_lets_it_go_afterwards) {
  const cpu_set_t before = own_cpus();
  const NumaPlan plan = plan_of(64, 1, 0, true);
  parallel_chunks(
      64, 1,
      [&](std::int64_t) {
        CHECK(runs_on(plan.shares[0].node));
        const cpu_set_t narrowed = own_cpus();
        CHECK(CPU_COUNT(&narrowed) == 1);
        return true;
      },
      &plan);
  const cpu_set_t after = own_cpus();
  CHECK(CPU_EQUAL(&before, &after) != 0);
}

TEST(numa_plan_stops_when_a_chunk_says_so) {
  const NumaPlan plan = plan_of(1000, 1, 1, false);
  std::atomic<int> calls{0};
  parallel_chunks(
      1000, 2,
      [&](std::int64_t) {
        ++calls;
        return false;
      },
      &plan);
  CHECK(calls >= 1 && calls <= 2);
}

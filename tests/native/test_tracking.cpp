#include <sys/wait.h>
#include <unistd.h>
#include <cstring>
#include <fstream>
#include <thread>

#include "check.h"
#include "core/errors.h"
#include "core/tracking.h"

using namespace memascend;

namespace {

// Returns whether the mapping that contains `pointer` is shared ("rw-s" in /proc/self/maps).
bool is_shared_mapping(const void* pointer) {
  std::ifstream maps("/proc/self/maps");
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    char flags[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, flags) == 3 && begin <= address && address < end) {
      return flags[3] == 's';
    }
  }
  return false;
}

}  // namespace

TEST(tracking_serves_the_device_role_from_shared_mappings_only) {
  TrackingHeap heap;
  void* host = heap.allocate(kTrackedFromBytes);
  heap.set_role(Role::kDevice);
  void* device = heap.allocate(kTrackedFromBytes);
  void* small = heap.allocate(kTrackedFromBytes - 1);
  CHECK(!is_shared_mapping(host) && is_shared_mapping(device) && !is_shared_mapping(small));
  heap.set_role(Role::kHost);  // frees must not depend on the current role
  heap.deallocate(device);
  CHECK(!is_shared_mapping(device));
  heap.deallocate(small);
  heap.set_role(Role::kDevice);
  heap.deallocate(host);
  CHECK(heap.live().empty());
}

TEST(tracking_gives_a_freed_device_block_to_the_next_of_its_size_and_keeps_none_for_the_host) {
  TrackingHeap heap;
  heap.set_role(Role::kDevice);
  void* first = heap.allocate(100'000);
  heap.deallocate(first);
  CHECK(heap.live().empty() && is_shared_mapping(first));
  void* other_size = heap.allocate(200'000);
  void* second = heap.allocate(100'000);
  CHECK(second == first && other_size != first);
  CHECK(heap.totals().peak_bytes[1] == 300'000);  // blocks kept for reuse are not live
  heap.deallocate(second);
  heap.deallocate(other_size);
  heap.set_role(Role::kHost);
  CHECK(!is_shared_mapping(first) && !is_shared_mapping(other_size));
  heap.set_role(Role::kDevice);
  void* too_large = heap.allocate(kReusableBytes + 1);
  heap.deallocate(too_large);
  CHECK(!is_shared_mapping(too_large));
  heap.set_role(Role::kHost);
}

TEST(tracking_logs_large_blocks_with_role_and_time) {
  TrackingHeap heap;
  void* small = heap.allocate(64);
  void* large = heap.allocate(100'000);
  heap.deallocate(large);
  heap.deallocate(small);
  const auto events = heap.drain_events();
  CHECK(events.size() == 2);
  CHECK(!events[0].is_free && events[0].block.bytes == 100'000 && events[0].block.role == Role::kHost);
  CHECK(events[1].is_free && events[1].block.id == events[0].block.id && events[1].t_ns >= events[0].t_ns);
  CHECK(heap.drain_events().empty());
}

TEST(tracking_totals_follow_live_bytes_and_keep_the_peak) {
  TrackingHeap heap;
  void* first = heap.allocate(1 << 20);
  void* second = heap.allocate(1 << 20);
  heap.deallocate(first);
  CHECK(heap.totals().live_bytes[0] == 1 << 20 && heap.totals().peak_bytes[0] == 2 << 20);
  heap.reset_peaks();
  CHECK(heap.totals().peak_bytes[0] == 1 << 20);
  CHECK(heap.live().size() == 1 && heap.live()[0].address == reinterpret_cast<std::uintptr_t>(second));
  heap.deallocate(second);
  CHECK(heap.totals().live_bytes[0] == 0);
}

TEST(tracking_blocks_are_aligned_and_zero_is_null) {
  TrackingHeap heap;
  CHECK(heap.allocate(0) == nullptr);
  heap.deallocate(nullptr);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{100}, std::size_t{40'000}}) {
    void* pointer = heap.allocate(bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(pointer) % kTensorAlignment == 0);
    heap.deallocate(pointer);
  }
}

TEST(tracking_impossible_size_is_an_error) {
  TrackingHeap heap;
  heap.set_role(Role::kDevice);
  CHECK(check::contains(check::message_of<Error>([&] { (void)heap.allocate(std::size_t{1} << 60); }), "smaller model"));
  CHECK(heap.live().empty());
}

TEST(tracking_heap_serves_threads_and_role_changes) {
  TrackingHeap heap;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&heap, t] {
      for (int i = 0; i < 200; ++i) {
        heap.set_role((i + t) % 2 ? Role::kDevice : Role::kHost);
        const std::size_t bytes = i % 3 ? 50'000 : 500;
        void* pointer = heap.allocate(bytes);
        std::memset(pointer, t, bytes);
        heap.deallocate(pointer);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  CHECK(heap.live().empty());
  CHECK(heap.totals().live_bytes[0] == 0 && heap.totals().live_bytes[1] == 0);
}

TEST(tracking_heap_works_in_a_forked_child) {
  TrackingHeap& heap = TrackingHeap::instance();
  void* before = heap.allocate(100'000);
  const pid_t child = fork();
  if (child == 0) {
    void* inside = heap.allocate(100'000);
    std::memset(inside, 1, 100'000);
    heap.deallocate(inside);
    heap.deallocate(before);
    _exit(heap.live().empty() ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(heap.live().size() == 1);
  heap.deallocate(before);
}

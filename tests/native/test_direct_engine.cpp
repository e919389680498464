#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "check.h"
#include "core/aio.h"
#include "core/fault_layer.h"
#include "storage_fixture.h"

using namespace storage_fixture;
using check::contains;
using check::message_of;

namespace {

// An engine with fault injection, and a tensor "old" that was committed before the faults begin.
struct Faulted {
  explicit Faulted(const std::string& backend, int workers = 1)
      : store(bench.open(calls)), engine(std::make_unique<DirectEngine>(store, options_for(backend, workers), calls)) {
    (void)ended(*engine, put(*engine, "old", old));
    (void)store->commit();
  }
  Bench bench{2};
  FaultyCalls calls;
  std::shared_ptr<Store> store;
  std::vector<char> old = pattern(50000, 1);
  std::unique_ptr<DirectEngine> engine;
};

constexpr std::int64_t kSizes[] = {0, 1, 511, 4095, 4096, 4097, 16384, 65536, 70001, 300000};

}  // namespace

TEST(tensors_of_any_length_at_any_address_come_back_whole) {
  for (const std::string& backend : backends()) {
    for (const int devices : {1, 3}) {
      const Bench bench(devices);
      DirectEngine engine(bench.open(), options_for(backend));
      std::vector<std::vector<char>> data;
      for (const std::int64_t size : kSizes) {
        for (const std::int64_t skip : {0, 1, 512}) {
          std::vector<char> with_head = pattern(static_cast<std::size_t>(size + skip), static_cast<unsigned>(size));
          const std::string key = std::to_string(size) + "/" + std::to_string(skip);
          TensorRecord record = record_of(static_cast<std::size_t>(size));
          (void)engine.write(key, with_head.data() + skip, record, 0);
          data.push_back(std::move(with_head));
        }
      }
      const auto outcomes = engine.wait(-1);
      CHECK(outcomes && outcomes->size() == data.size());
      std::size_t index = 0;
      for (const std::int64_t size : kSizes) {
        for (const std::int64_t skip : {0, 1, 512}) {
          const std::vector<char> expected(data[index].begin() + skip, data[index].end());
          CHECK(get(engine, std::to_string(size) + "/" + std::to_string(skip)) == expected);
          ++index;
        }
      }
    }
  }
}

TEST(a_part_of_a_tensor_is_read_from_any_byte_on) {
  const Bench bench(2);
  DirectEngine engine(bench.open(), options_for("auto"));
  const std::vector<char> data = pattern(100000, 9);
  (void)ended(engine, put(engine, "t", data));
  for (const std::size_t from : {0u, 1u, 4096u, 50001u, 99999u}) {
    for (const std::size_t bytes : {0u, 1u, 4096u, 33333u}) {
      const std::size_t here = std::min(bytes, data.size() - from);
      std::vector<char> out(here);
      (void)ended(engine,
                  engine.read("t", out.data(), static_cast<std::int64_t>(here), static_cast<std::int64_t>(from), 0));
      CHECK(std::equal(out.begin(), out.end(), data.begin() + static_cast<std::ptrdiff_t>(from)));
    }
  }
  std::vector<char> out(2);
  CHECK(contains(message_of<Error>([&] { (void)engine.read("t", out.data(), 2, 99999, 0); }), "of a tensor of 100000"));
  CHECK(contains(message_of<Error>([&] { (void)engine.read("no", out.data(), 1, 0, 0); }), "no such tensor"));
}

TEST(short_transfers_are_continued_to_the_last_byte) {
  for (const std::string& backend : backends()) {
    Faulted at(backend);
    std::atomic<int> turn{0};
    at.calls.on_command = [&](AioCommand& command) {  // transfers fewer bytes
      if (command.bytes > 4096 && ++turn % 3 != 0) {
        command.bytes = static_cast<std::uint32_t>(sector_up(command.bytes / 2));
      }
      return 0;
    };
    at.calls.on_completion = [&](std::uint64_t, int result) {  // and reports lengths that are not whole sectors
      return result > 4096 && ++turn % 5 == 0 ? result - 100 : result;
    };
    const std::vector<char> data = pattern(200001, 2);
    CHECK(!ended(*at.engine, put(*at.engine, "new", data)).failure);
    CHECK(get(*at.engine, "new") == data);
    CHECK(at.engine->statistics().short_transfers > 0);
  }
}

TEST(interrupted_and_refused_commands_are_repeated) {
  for (const std::string& backend : backends()) {
    Faulted at(backend);
    std::atomic<int> turn{0};
    at.calls.on_completion = [&](std::uint64_t, int result) {
      const int now = ++turn;
      return now % 3 == 0 ? -EINTR : now % 7 == 0 ? -EAGAIN : result;
    };
    const std::vector<char> data = pattern(200001, 2);
    CHECK(!ended(*at.engine, put(*at.engine, "new", data)).failure);
    CHECK(get(*at.engine, "new") == data);
    CHECK(at.engine->statistics().repeated > 0);
  }
}

TEST(a_command_that_is_refused_for_ever_fails_in_the_end) {
  for (const std::string& backend : backends()) {
    Faulted at(backend);
    at.calls.on_completion = [](std::uint64_t, int) { return -EAGAIN; };
    const auto outcome = ended(*at.engine, put(*at.engine, "new", pattern(100, 2)));
    CHECK(outcome.failure && outcome.failure->error == EAGAIN);
  }
}

TEST(interrupted_calls_and_partial_submissions_lose_nothing) {
  for (const std::string& backend : backends()) {
    Faulted at(backend);
    std::atomic<int> turn{0};
    at.calls.on_raw = [&](long number, long& count) {
      if (number == __NR_io_submit && count > 1) {
        count = 1;
      }
      const int now = ++turn;
      const bool transfer = number == __NR_io_submit || number == __NR_io_getevents || number == __NR_io_uring_enter;
      errno = now % 2 == 0 ? EINTR : EAGAIN;
      return transfer && now % 3 == 0;
    };
    const std::vector<char> data = pattern(300001, 2);
    CHECK(!ended(*at.engine, put(*at.engine, "new", data)).failure);
    CHECK(get(*at.engine, "new") == data);
  }
}

TEST(a_failed_command_names_operation_device_offset_and_lengths_and_keeps_the_old_tensor) {
  for (const std::string& backend : backends()) {
    for (const int error : {EIO, ENOSPC, ENODEV, EROFS}) {
      Faulted at(backend);
      at.calls.on_completion = [&](std::uint64_t, int) { return -error; };
      const auto outcome = ended(*at.engine, put(*at.engine, "old", pattern(50000, 2)));
      CHECK(outcome.failure && outcome.failure->error == error && outcome.failure->op == "write");
      CHECK(outcome.failure && contains(outcome.failure->path, "/device") && outcome.failure->offset >= 1 << 20);
      CHECK(outcome.failure && outcome.failure->expected > 0 && outcome.failure->got == 0);
      std::vector<char> out(at.old.size());
      const auto read = ended(*at.engine, at.engine->read("old", out.data(), 50000, 0, 0));
      CHECK(read.failure && read.failure->error == error && read.failure->op == "read");
      at.calls.on_completion = nullptr;
      CHECK(get(*at.engine, "old") == at.old);
      CHECK(at.store->space().reserved_bytes == 0);
    }
  }
}

TEST(a_device_that_vanishes_in_the_middle_fails_what_is_left_and_nothing_hangs) {
  for (const std::string& backend : backends()) {
    Faulted at(backend, 2);
    std::atomic<int> left{5};
    at.calls.on_command = [&](AioCommand&) { return left-- > 0 ? 0 : -ENODEV; };
    (void)put(*at.engine, "a", pattern(200000, 2));
    (void)put(*at.engine, "b", pattern(200000, 3));
    const auto outcomes = at.engine->wait(60);
    CHECK(outcomes && outcomes->size() == 2);
    for (const auto& [request, outcome] : *outcomes) {
      CHECK(outcome.failure && outcome.failure->error == ENODEV);
    }
  }
}

TEST(a_call_that_fails_outright_fails_the_request_and_the_engine_goes_on) {
  for (const std::string& backend : backends()) {
    Faulted at(backend);
    std::atomic<bool> broken{true};
    at.calls.on_raw = [&](long number, long& count) {
      errno = EBADF;
      const bool submits = number == __NR_io_submit || (number == __NR_io_uring_enter && count > 0);
      return submits && broken.load();
    };
    const auto outcome = ended(*at.engine, put(*at.engine, "new", pattern(5000, 2)));
    CHECK(outcome.failure && outcome.failure->error == EBADF);
    broken = false;
    CHECK(!ended(*at.engine, put(*at.engine, "new", pattern(5000, 2))).failure);
  }
}

TEST(a_device_that_has_shrunk_is_distinguished_from_an_error) {
  for (const std::string& backend : backends()) {
    Faulted at(backend);
    for (const std::string& path : at.bench.paths) {
      CHECK(::truncate(path.c_str(), (1 << 20) + 4096) == 0);
    }
    std::vector<char> out(at.old.size());
    const auto outcome = ended(*at.engine, at.engine->read("old", out.data(), 50000, 0, 0));
    CHECK(outcome.failure && outcome.failure->error == 0 && contains(outcome.failure->reason, "device ends here"));
  }
}

TEST(damaged_data_is_not_handed_out) {
  Faulted at("auto");
  const RecordPointer record = at.store->find("old");
  const Extent where = record->extents[0];
  {
    const Device device(at.bench.paths[where.member], kernel_syscalls());
    SectorBuffer sector(4096);
    device.read(sector.data(), 4096, where.offset);
    sector.data()[77] = static_cast<char>(sector.data()[77] ^ 1);
    device.write(sector.data(), 4096, where.offset);
  }
  std::vector<char> out(at.old.size());
  const auto outcome = ended(*at.engine, at.engine->read("old", out.data(), 50000, 0, 0));
  CHECK(outcome.failure && contains(outcome.failure->reason, "checksum"));
  CHECK(contains(at.store->verify(*record), "checksum"));
}

TEST(a_slow_device_is_waited_for_and_a_time_limit_reports_nothing_early) {
  for (const std::string& backend : backends()) {
    Faulted at(backend);
    at.calls.on_command = [](AioCommand&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      return 0;
    };
    const std::uint64_t request = put(*at.engine, "new", pattern(5000, 2));
    CHECK(!at.engine->wait_for(request, 0.001));
    CHECK(!at.engine->wait(0.001));
    CHECK(!ended(*at.engine, request).failure);
    CHECK(contains(message_of<Error>([&] { (void)at.engine->wait_for(request, 0); }), "has been reported"));
  }
}

TEST(what_has_the_higher_priority_goes_first) {
  Bench bench;
  FaultyCalls calls;
  std::mutex mutex;
  std::vector<std::uint32_t> order;
  std::atomic<bool> hold{true};
  calls.on_command = [&](AioCommand& command) {
    while (hold) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::lock_guard<std::mutex> guard(mutex);
    order.push_back(command.bytes);
    return 0;
  };
  DirectEngine engine(bench.open(), options_for("auto", 1, 1), calls);
  const std::vector<char> low = pattern(16384 * 8, 1);
  const std::vector<char> high = pattern(4096 * 3, 2);
  (void)put(engine, "low", low, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until its first block is in flight
  (void)put(engine, "high", high, 5);
  hold = false;
  (void)engine.wait(-1);
  CHECK(order.size() == 9 && order[0] == 16384 && order[1] == 4096 * 3);
}

TEST(reads_and_writes_of_one_priority_share_the_ring) {
  for (const std::string& backend : backends()) {
    Bench bench;
    FaultyCalls calls;
    std::mutex mutex;
    std::string order;
    std::atomic<bool> hold{false};
    calls.on_command = [&](AioCommand& command) {
      while (hold) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      std::lock_guard<std::mutex> guard(mutex);
      order.push_back(command.write ? 'w' : 'r');
      return 0;
    };
    DirectEngine engine(bench.open(), options_for(backend, 1, 4), calls);
    const std::vector<char> there = pattern(16384 * 12, 1);
    const std::vector<char> more = pattern(16384 * 12, 2);
    CHECK(!ended(engine, put(engine, "there", there)).failure);
    order.clear();
    hold = true;
    std::vector<char> out(there.size());
    (void)engine.read("there", out.data(), static_cast<std::int64_t>(out.size()), 0, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until its first block is in flight
    (void)put(engine, "more", more);
    hold = false;
    (void)engine.wait(-1);
    CHECK(out == there && order.size() == 24);
    // A single queue would hand out all twelve blocks of the read first. With two, at most a full ring (four) of them
    // precedes the write.
    CHECK(order.find('w') <= 4);
  }
}

TEST(a_cancelled_write_changes_nothing_and_gives_its_space_back) {
  for (const std::string& backend : backends()) {
    Faulted at(backend);
    const std::int64_t before = at.store->space().free_bytes;
    std::atomic<bool> hold{true};
    at.calls.on_command = [&](AioCommand&) {
      while (hold) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return 0;
    };
    const std::uint64_t first = put(*at.engine, "old", pattern(400000, 5));
    const std::uint64_t second = put(*at.engine, "other", pattern(400000, 6));
    CHECK(at.engine->cancel(first) && at.engine->cancel(second));
    hold = false;
    CHECK(ended(*at.engine, first).cancelled && ended(*at.engine, second).cancelled);
    CHECK(!at.engine->cancel(first));
    CHECK(get(*at.engine, "old") == at.old && !at.store->find("other"));
    CHECK(at.store->space().free_bytes == before);
    CHECK(at.engine->statistics().cancelled == 2);
  }
}

TEST(an_engine_destroyed_in_flight_ends_what_was_submitted) {
  for (const std::string& backend : backends()) {
    const Bench bench(2);
    const std::vector<char> data = pattern(900000, 4);
    const std::shared_ptr<Store> store = bench.open();
    {
      DirectEngine engine(store, options_for(backend));
      (void)put(engine, "t", data);
    }
    DirectEngine engine(store, options_for(backend));
    CHECK(get(engine, "t") == data);
  }
}

TEST(registered_memory_is_used_and_views_of_it_too) {
  const Bench bench;
  DirectEngine engine(bench.open(), options_for("auto"));
  auto memory = std::make_shared<SectorBuffer>(1 << 20);
  const bool registered = engine.register_buffer(memory->data(), memory->bytes(), memory);
  CHECK(registered == (engine.backend() == AioKind::kUring));
  const std::vector<char> data = pattern(100000, 8);
  std::copy(data.begin(), data.end(), memory->data() + 4096);
  (void)ended(engine, engine.write("t", memory->data() + 4096, record_of(data.size()), 0));
  std::fill_n(memory->data(), memory->bytes(), '\0');
  (void)ended(engine, engine.read("t", memory->data() + 8192, 100000, 0, 0));
  CHECK(std::equal(data.begin(), data.end(), memory->data() + 8192));
}

// If a ring's table still had the pages of freed memory, a write would use their old contents.
TEST(unregistered_memory_may_be_freed_and_its_address_used_again) {
  const Bench bench;
  DirectEngine engine(bench.open(), options_for("auto", 2));
  constexpr std::size_t kBytes = 1 << 18;
  auto* memory = static_cast<char*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  auto owner = std::make_shared<int>(1);
  for (unsigned round = 0; round < 300; ++round) {  // more rounds than a table has slots
    const bool registered = engine.register_buffer(memory, kBytes, owner);
    CHECK(registered == (engine.backend() == AioKind::kUring));
    CHECK(engine.register_buffer(memory, kBytes, owner) == registered);
    const bool looked_at = round % 50 == 0;
    if (looked_at) {
      const std::vector<char> data = pattern(kBytes, round);
      std::copy(data.begin(), data.end(), memory);
      (void)ended(engine, engine.write("t", memory, record_of(kBytes), 0));
      CHECK(get(engine, "t") == data);
    }
    CHECK((engine.unregister_buffer(memory) != nullptr) == registered && !engine.unregister_buffer(memory));
    if (looked_at) {
      (void)mmap(memory, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    }
  }
  CHECK(owner.use_count() == 1);
  munmap(memory, kBytes);
}

TEST(memory_is_unregistered_while_transfers_from_it_are_in_flight) {
  for (const std::string& backend : backends()) {
    const Bench bench(2);
    DirectEngine engine(bench.open(), options_for(backend, 2, 2));
    SectorBuffer memory(1 << 20);
    const std::vector<char> data = pattern(1 << 20, 3);
    std::copy(data.begin(), data.end(), memory.data());
    for (int round = 0; round < 20; ++round) {
      (void)engine.register_buffer(memory.data(), memory.bytes(), std::make_shared<int>(1));
      const std::uint64_t request = engine.write("t", memory.data(), record_of(data.size()), 0);
      (void)engine.unregister_buffer(memory.data());
      CHECK(!ended(engine, request).failure);
    }
    CHECK(get(engine, "t") == data);
  }
}

// A worker that is computing checksums polls the ring without blocking. With deferred task work, the kernel delivers
// completions only when the thread enters it.
TEST(completions_are_seen_without_blocking) {
  if (backends().size() < 2) {
    return;  // io_uring is not available
  }
  const Bench bench;
  const Device device(bench.paths[0], kernel_syscalls());
  SectorBuffer memory(1 << 16);
  const auto ring = make_backend(AioKind::kUring, 4, {device.fd()}, kernel_syscalls());
  for (std::uint64_t token = 0; token < 20; ++token) {
    ring->queue({false, 0, -1, memory.data(), 1 << 16, 0, token});
    AioEvent event;
    int count = ring->run(&event, 1, false);  // submits it
    for (int tries = 0; tries < 5000 && count == 0; ++tries) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      count = ring->run(&event, 1, false);
    }
    CHECK(count == 1 && event.token == token && event.result == 1 << 16);
  }
}

// Otherwise new work would wait for the next completion of a device.
TEST(after_a_call_that_failed_outright_a_blocked_ring_can_still_be_woken) {
  if (backends().size() < 2) {
    return;  // io_uring is not available
  }
  int pipe_fds[2];
  CHECK(pipe(pipe_fds) == 0);
  FaultyCalls calls;
  bool broken = true;
  calls.on_raw = [&](long number, long& count) {
    errno = EBADF;
    return number == __NR_io_uring_enter && count > 0 && broken;
  };
  SectorBuffer memory(4096);
  {
    const auto ring = make_backend(AioKind::kUring, 4, {pipe_fds[0]}, calls);
    AioEvent event;
    ring->queue({false, 0, -1, memory.data(), 4096, 0, 1});
    CHECK(ring->run(&event, 1, false) == 1 && event.token == 1 && event.result == -EBADF);
    broken = false;
    ring->queue({false, 0, -1, memory.data(), 4096, 0, 2});  // in flight until something is written to the pipe
    CHECK(ring->run(&event, 1, false) == 0);
    ring->wake();
    std::atomic<bool> woken{false};
    std::thread rescue([&] {  // ends a `run` that is not woken
      for (int tries = 0; tries < 5000 && !woken; ++tries) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      CHECK(::write(pipe_fds[1], "x", 1) == 1);
    });
    CHECK(ring->run(&event, 1, true) == 0);
    woken = true;
    rescue.join();
  }
  ::close(pipe_fds[0]);
  ::close(pipe_fds[1]);
}

TEST(memory_is_aligned_as_the_device_demands) {
  for (const std::string& backend : backends()) {
    for (const std::uint32_t alignment : {512u, 1024u, 4096u}) {
      const Bench bench(2);
      FaultLayer calls;
      calls.demand_alignment(alignment, true);
      DirectEngine engine(bench.open(calls), options_for(backend), calls);
      std::vector<char> memory(1 << 18);
      for (const std::size_t skip : {0u, 1u, 512u, 1024u, 2048u}) {
        auto* begin = memory.data() + (4096 - reinterpret_cast<std::uintptr_t>(memory.data()) % 4096) % 4096 + skip;
        const std::vector<char> data = pattern(100001, static_cast<unsigned>(skip));
        std::copy(data.begin(), data.end(), begin);
        CHECK(!ended(engine, engine.write("t", begin, record_of(data.size()), 0)).failure);
        std::fill_n(begin, data.size(), '\0');
        CHECK(!ended(engine, engine.read("t", begin, 100001, 0, 0)).failure);
        CHECK(std::equal(data.begin(), data.end(), begin));
      }
    }
  }
}

TEST(a_device_that_demands_more_than_a_sector_is_refused) {
  const Bench bench;
  FaultLayer calls;
  calls.demand_alignment(16384, true);
  CHECK(contains(message_of<Error>([&] { (void)bench.open(calls); }), "multiples of 16384 bytes"));
}

TEST(without_io_uring_libaio_serves_and_the_word_of_the_user_is_kept) {
  const Bench bench;
  FaultyCalls calls;
  calls.on_raw = [](long number, long&) {
    errno = ENOSYS;
    return number == __NR_io_uring_setup;
  };
  {
    DirectEngine engine(bench.open(), options_for("auto"), calls);
    CHECK(engine.backend() == AioKind::kLibaio);
    (void)ended(engine, put(engine, "t", pattern(100, 1)));
    CHECK(get(engine, "t") == pattern(100, 1));
  }
  CHECK(contains(message_of<Error>([&] { DirectEngine engine(bench.open(), options_for("io_uring"), calls); }),
                 "choose libaio"));
  CHECK(contains(message_of<Error>([&] { DirectEngine engine(bench.open(), options_for("spdk"), calls); }),
                 "use auto, io_uring or libaio"));
}

TEST(a_depth_that_the_kernel_refuses_is_an_error_of_the_constructor) {
  const Bench bench;
  FaultyCalls calls;
  calls.on_raw = [](long number, long&) {
    errno = EAGAIN;
    return number == __NR_io_setup;
  };
  CHECK(contains(message_of<Error>([&] { DirectEngine engine(bench.open(), options_for("libaio"), calls); }),
                 "fs.aio-max-nr"));
}

TEST(readers_and_writers_of_one_key_never_see_a_torn_tensor) {
  const Bench bench(2, 8 << 20);
  const std::shared_ptr<Store> store = bench.open();
  EngineOptions options = options_for("auto", 2, 8);
  options.checksums = Checksums::kOff;  // so that only the index can detect it
  DirectEngine engine(store, options);
  std::vector<std::vector<char>> versions;
  for (char version = 0; version < 4; ++version) {
    versions.emplace_back(60000, version);
  }
  (void)ended(engine, put(engine, "t", versions[0]));
  std::atomic<bool> done{false};
  std::atomic<int> torn{0};
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 2; ++reader) {
    readers.emplace_back([&] {
      while (!done) {
        const std::vector<char> seen = get(engine, "t");
        torn +=
            std::all_of(seen.begin(), seen.end(), [&](char byte) { return byte == seen[0]; }) && seen.size() == 60000
                ? 0
                : 1;
      }
    });
  }
  for (std::size_t round = 0; round < 120; ++round) {
    (void)ended(engine, put(engine, "t", versions[round % 4]));
    (void)ended(engine, put(engine, "u" + std::to_string(round % 7), versions[(round + 1) % 4]));  // reuses freed space
    if (round % 5 == 0) {
      (void)store->commit();
    }
  }
  done = true;
  for (std::thread& reader : readers) {
    reader.join();
  }
  CHECK_NOTE(torn == 0, std::to_string(torn) + " torn reads");
}

#if !UNDER_SANITIZER
TEST(a_forked_child_neither_uses_nor_disturbs_its_parents_engine) {
  const Bench bench;
  const std::shared_ptr<Store> store = bench.open();
  auto engine = std::make_unique<DirectEngine>(store, options_for("auto"));
  (void)ended(*engine, put(*engine, "t", pattern(100, 1)));
  const pid_t child = fork();
  if (child == 0) {
    const bool refused = contains(message_of<Error>([&] { (void)put(*engine, "u", pattern(100, 1)); }), "fork");
    engine.reset();
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK(get(*engine, "t") == pattern(100, 1));
  CHECK(store->commit() == 1);
}
#endif

// Volatile engines write in place, run requests on a key in order, and need no space beyond that of the tensors.
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <mutex>
#include <thread>

#include "check.h"
#include "storage_fixture.h"

using namespace storage_fixture;
using check::contains;
using check::message_of;

namespace {

EngineOptions volatile_options(const std::string& backend, int workers = 2) {
  EngineOptions options = options_for(backend, workers);
  options.is_volatile = true;
  options.checksums = Checksums::kOff;
  return options;
}

struct Swap {
  explicit Swap(EngineOptions options, int devices = 2)
      : bench(devices), store(bench.open(calls)), engine(store, std::move(options), calls) {}
  explicit Swap(const std::string& backend) : Swap(volatile_options(backend)) {}
  Bench bench;
  FaultyCalls calls;
  std::shared_ptr<Store> store;
  DirectEngine engine;
};

RequestOutcome read_into(DirectEngine& engine, const std::string& key, std::vector<char>& out) {
  return ended(engine, engine.read(key, out.data(), static_cast<std::int64_t>(out.size()), 0, 0));
}

// A file system that cannot allocate blocks without writing them. Records where the store writes after `watch`, except
// to the superblocks, and has space up to the offset `end`.
class CannotAllocate : public IoSyscalls {
 public:
  explicit CannotAllocate(int error) : error_(error) {}
  void watch(std::int64_t end = std::numeric_limits<std::int64_t>::max()) {
    lowest = std::numeric_limits<std::int64_t>::max();
    end_ = end;
  }
  int fallocate(int, off_t, off_t) override {
    errno = ++calls_ % 3 != 0 ? EINTR : error_;
    return -1;
  }
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset) override {
    if (offset >= 2 * kSectorBytes) {
      lowest = std::min<std::int64_t>(lowest, offset);
    }
    if (offset + static_cast<off_t>(bytes) > end_) {
      errno = ENOSPC;
      return -1;
    }
    return IoSyscalls::pwrite(fd, data, bytes, offset);
  }
  std::int64_t lowest = 0;

 private:
  const int error_;
  int calls_ = 0;
  std::int64_t end_ = std::numeric_limits<std::int64_t>::max();
};

struct stat status_of(const std::string& path) {
  struct stat status{};
  (void)!::stat(path.c_str(), &status);
  return status;
}

// Gives an empty file of ext4 the block map of ext3, which cannot be allocated in advance. Returns whether that is so.
bool cannot_allocate(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  int flags = 0;
  bool changed = ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0;
  flags &= ~FS_EXTENT_FL;
  changed = changed && ioctl(fd, FS_IOC_SETFLAGS, &flags) == 0;
  changed = changed && ::fallocate(fd, 0, 0, kSectorBytes) != 0 && errno == EOPNOTSUPP;
  ::close(fd);
  return changed;
}

}  // namespace

TEST(a_second_write_of_the_same_size_overwrites_in_place) {
  for (const std::string& backend : backends()) {
    Swap at(backend);
    (void)ended(at.engine, put(at.engine, "t", pattern(200001, 1)));
    const auto extents = at.engine.find("t")->extents;
    const std::int64_t free = at.store->space().free_bytes;
    for (unsigned round = 2; round < 6; ++round) {
      (void)ended(at.engine, put(at.engine, "t", pattern(200001, round)));
      CHECK(get(at.engine, "t") == pattern(200001, round));
    }
    CHECK(at.engine.find("t")->extents == extents);
    CHECK(at.store->space().free_bytes == free);
    CHECK(at.store->uncommitted() == 0 && at.store->list().empty());
  }
}

TEST(volatile_tensors_fill_a_store_to_the_last_unit_and_can_then_all_be_written_again) {
  Swap at(volatile_options("auto"), 1);
  const std::int64_t space = at.store->space().data_bytes;
  const auto size = static_cast<std::size_t>(space / 4);
  for (unsigned round = 0; round < 3; ++round) {
    for (unsigned key = 0; key < 4; ++key) {
      (void)put(at.engine, std::to_string(key), pattern(size / 4096 * 4096 - key, round * 4 + key));
    }
    const auto outcomes = at.engine.wait(-1);
    for (const auto& [request, outcome] : *outcomes) {
      CHECK(!outcome.failure);
    }
    for (unsigned key = 0; key < 4; ++key) {
      std::vector<char> out(size / 4096 * 4096 - key);
      CHECK(!read_into(at.engine, std::to_string(key), out).failure && out == pattern(out.size(), round * 4 + key));
    }
  }
  CHECK(at.store->space().free_bytes < 4 * 4096);
  CHECK(
      contains(message_of<StorageFailure>([&] { (void)put(at.engine, "more", pattern(40000, 1)); }), "no space left"));
}

TEST(another_size_takes_the_old_ones_space_and_an_erased_tensor_gives_it_back) {
  Swap at(volatile_options("auto"), 1);
  const std::int64_t before = at.store->space().free_bytes;
  const auto most = static_cast<std::size_t>(before / 4096 * 4096);
  (void)ended(at.engine, put(at.engine, "t", pattern(most, 1)));
  (void)ended(at.engine, put(at.engine, "t", pattern(most - 4096, 2)));
  CHECK(get(at.engine, "t") == pattern(most - 4096, 2));
  CHECK(at.engine.erase("t") && !at.engine.erase("t") && !at.engine.find("t"));
  CHECK(at.store->space().free_bytes == before);
}

TEST(a_write_that_finds_no_space_leaves_the_tensor_as_it_was) {
  Swap at(volatile_options("auto"), 1);
  const std::int64_t space = at.store->space().free_bytes / 4096 * 4096;
  const std::vector<char> old = pattern(static_cast<std::size_t>(space / 4), 1);
  (void)ended(at.engine, put(at.engine, "t", old));
  (void)ended(at.engine, put(at.engine, "u", pattern(static_cast<std::size_t>(space / 2), 2)));
  const std::int64_t free = at.store->space().free_bytes;
  CHECK(contains(
      message_of<StorageFailure>([&] { (void)put(at.engine, "t", pattern(static_cast<std::size_t>(space), 3)); }),
      "no space left"));
  CHECK(get(at.engine, "t") == old && at.store->space().free_bytes == free);
  const std::vector<char> larger =
      pattern(static_cast<std::size_t>(space / 2 - 4096), 4);  // fits only in the space of the old one
  (void)ended(at.engine, put(at.engine, "t", larger));
  CHECK(get(at.engine, "t") == larger);
  CHECK(get(at.engine, "u") == pattern(static_cast<std::size_t>(space / 2), 2));
}

TEST(requests_on_one_key_run_in_the_order_of_their_submission) {
  for (const std::string& backend : backends()) {
    Swap at(backend);
    std::vector<std::vector<char>> reads(24, std::vector<char>(100001));
    for (unsigned round = 0; round < reads.size(); ++round) {  // without waiting for any request
      (void)put(at.engine, "t", pattern(100001, round), static_cast<int>(round % 3));
      (void)at.engine.read("t", reads[round].data(), 100001, 0, static_cast<int>(round % 5));
    }
    const auto outcomes = at.engine.wait(-1);
    CHECK(outcomes->size() == 2 * reads.size());
    for (unsigned round = 0; round < reads.size(); ++round) {
      CHECK(reads[round] == pattern(100001, round));
    }
  }
}

TEST(a_part_is_written_over_and_the_rest_keeps) {
  for (const std::string& backend : backends()) {
    Swap at(backend);
    std::vector<char> model = pattern(100001, 1);
    (void)ended(at.engine, put(at.engine, "t", model));
    const auto overwrite = [&](std::size_t offset, std::size_t bytes, unsigned seed) {
      const std::vector<char> part = pattern(bytes, seed);
      CHECK(!ended(at.engine, at.engine.write_part("t", part.data(), static_cast<std::int64_t>(bytes),
                                                   static_cast<std::int64_t>(offset), 0))
                 .failure);
      std::copy(part.begin(), part.end(), model.begin() + static_cast<std::ptrdiff_t>(offset));
      CHECK(get(at.engine, "t") == model);
    };
    overwrite(0, 4096, 2);
    overwrite(8192, 40960, 3);
    overwrite(98304, 1697, 4);
    std::vector<char> part(5000);
    CHECK(contains(message_of<Error>([&] { (void)at.engine.write_part("t", part.data(), 5000, 0, 0); }), "4096"));
    CHECK(contains(message_of<Error>([&] { (void)at.engine.write_part("t", part.data(), 4096, 100, 0); }), "4096"));
    CHECK(contains(message_of<Error>([&] { (void)at.engine.write_part("u", part.data(), 1, 0, 0); }), "write all"));
  }
}

TEST(after_a_failed_write_in_place_the_tensor_is_not_handed_out_until_it_is_written_again) {
  for (const std::string& backend : backends()) {
    Swap at(backend);
    (void)ended(at.engine, put(at.engine, "t", pattern(200000, 1)));
    std::atomic<int> left{3};
    at.calls.on_completion = [&](std::uint64_t, int result) { return left-- > 0 ? result : -EIO; };
    CHECK(ended(at.engine, put(at.engine, "t", pattern(200000, 2))).failure->error == EIO);
    at.calls.on_completion = nullptr;
    std::vector<char> out(200000);
    const auto refused = read_into(at.engine, "t", out);
    CHECK(refused.failure && contains(refused.failure->reason, "write all of it again"));
    const std::vector<char> part = pattern(4096, 7);
    (void)ended(at.engine, at.engine.write_part("t", part.data(), 4096, 0, 0));
    CHECK(read_into(at.engine, "t", out).failure);
    (void)ended(at.engine, put(at.engine, "t", pattern(200000, 3)));
    CHECK(get(at.engine, "t") == pattern(200000, 3));
  }
}

TEST(cancelling_a_request_lets_the_next_in_line_go) {
  for (const std::string& backend : backends()) {
    Swap at(backend);
    (void)ended(at.engine, put(at.engine, "t", pattern(100000, 1)));
    std::atomic<bool> hold{true};
    at.calls.on_command = [&](AioCommand&) {
      while (hold) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return 0;
    };
    std::vector<char> first(100000);
    std::vector<char> last(100000);
    (void)at.engine.read("t", first.data(), 100000, 0, 0);
    const std::uint64_t dropped = put(at.engine, "t", pattern(100000, 2));  // waits for its turn
    (void)at.engine.read("t", last.data(), 100000, 0, 0);
    CHECK(at.engine.cancel(dropped));
    hold = false;
    CHECK(ended(at.engine, dropped).cancelled);
    (void)at.engine.wait(-1);
    CHECK(first == pattern(100000, 1) && last == pattern(100000, 1));
  }
}

// `cancel` ends a waiting request in several steps, and the request before it may end between them. The threads that
// list the tensors keep the engine's lock busy, so that there is time between the steps.
TEST(a_waiting_request_that_is_cancelled_while_the_one_before_it_ends_is_not_started) {
  Swap at(volatile_options("auto"), 1);
  for (int other = 0; other < 300; ++other) {
    (void)put(at.engine, "other tensor with a long name " + std::to_string(other), pattern(1, 1));
  }
  (void)put(at.engine, "t", pattern(4096, 1));
  (void)at.engine.wait(-1);
  std::atomic<bool> hold{false};
  std::atomic<int> transfers{0};
  at.calls.on_command = [&](AioCommand&) {
    ++transfers;
    while (hold) {
      std::this_thread::yield();
    }
    return 0;
  };
  std::atomic<bool> done{false};
  std::vector<std::thread> listers;
  for (int lister = 0; lister < 2; ++lister) {
    listers.emplace_back([&] {
      while (!done) {
        (void)at.engine.list();
      }
    });
  }
  for (int round = 0; round < 200; ++round) {
    transfers = 0;
    hold = true;
    const std::uint64_t first = put(at.engine, "t", pattern(4096, 2));
    std::vector<char> out(4096, 'x');
    const std::uint64_t waiting = at.engine.read("t", out.data(), 4096, 0, 0);
    while (transfers == 0) {
      std::this_thread::yield();
    }
    hold = false;
    for (int turn = 0; turn < round % 8; ++turn) {
      (void)at.engine.pending();  // so that the end of the first one is at different steps
    }
    const bool cancelled = at.engine.cancel(waiting);
    CHECK(!ended(at.engine, first).failure);
    const RequestOutcome outcome = ended(at.engine, waiting);
    CHECK(outcome.cancelled == cancelled && !outcome.failure);
    CHECK(cancelled || transfers == 2);
    CHECK(out == (transfers == 1 ? std::vector<char>(4096, 'x') : pattern(4096, 2)));
  }
  done = true;
  for (std::thread& lister : listers) {
    lister.join();
  }
  CHECK(at.engine.pending() == 0 && get(at.engine, "t") == pattern(4096, 2));
}

TEST(erasing_a_tensor_in_use_frees_its_space_only_at_the_end) {
  Swap at("auto");
  const std::int64_t before = at.store->space().free_bytes;
  (void)ended(at.engine, put(at.engine, "t", pattern(100000, 1)));
  std::atomic<bool> hold{true};
  at.calls.on_command = [&](AioCommand&) {
    while (hold) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return 0;
  };
  std::vector<char> out(100000);
  const std::uint64_t request = at.engine.read("t", out.data(), 100000, 0, 0);
  CHECK(at.engine.erase("t"));
  CHECK(at.store->space().free_bytes < before);
  hold = false;
  CHECK(!ended(at.engine, request).failure && out == pattern(100000, 1));
  for (int tries = 0; tries < 1000 && at.store->space().free_bytes != before; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the worker releases it after it has reported
  }
  CHECK(at.store->space().free_bytes == before);
}

TEST(checksums_of_volatile_tensors_are_compared_if_asked_for) {
  EngineOptions options = volatile_options("auto");
  options.checksums = Checksums::kFull;
  Swap at(options);
  (void)ended(at.engine, put(at.engine, "t", pattern(50000, 1)));
  CHECK(get(at.engine, "t") == pattern(50000, 1));
  const Extent where = at.engine.find("t")->extents[0];
  const Device device(at.bench.paths[where.member], kernel_syscalls());
  SectorBuffer sector(4096);
  device.write(sector.data(), 4096, where.offset);
  std::vector<char> out(50000);
  const auto outcome = read_into(at.engine, "t", out);
  CHECK(outcome.failure && contains(outcome.failure->reason, "checksum"));
}

TEST(a_volatile_engine_closed_with_requests_in_line_ends_them_all) {
  for (const std::string& backend : backends()) {
    const Bench bench(2);
    const std::shared_ptr<Store> store = bench.open();
    const std::int64_t before = store->space().free_bytes;
    std::vector<char> out(300000);
    {
      DirectEngine engine(store, volatile_options(backend));
      for (unsigned round = 0; round < 9; ++round) {
        (void)put(engine, "t", pattern(300000, round));
      }
      (void)engine.read("t", out.data(), 300000, 0, 0);
    }
    CHECK(out == pattern(300000, 8));
    CHECK(store->space().free_bytes == before);
  }
}

TEST(many_threads_on_few_volatile_keys_read_whole_tensors_only) {
  Swap at("auto");
  std::atomic<int> torn{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&at, &torn, thread] {
      std::vector<char> out(60000);
      for (int round = 0; round < 60; ++round) {
        const std::string key(1, static_cast<char>('a' + (round + thread) % 3));
        const std::vector<char> data(60000, static_cast<char>(thread * 60 + round));
        (void)ended(at.engine, put(at.engine, key, data));
        (void)read_into(at.engine, key, out);
        torn += std::all_of(out.begin(), out.end(), [&](char byte) { return byte == out[0]; }) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_NOTE(torn == 0, std::to_string(torn) + " torn reads");
}

TEST(a_store_of_one_file_grows_while_it_is_used_and_stays_so) {
  Bench bench(1, (1 << 20) + (1 << 18));
  {
    DirectEngine engine(bench.open(), volatile_options("auto"));
    Store& store = engine.store();
    const std::int64_t before = store.space().data_bytes;
    (void)ended(engine, put(engine, "t", pattern(100000, 1)));
    CHECK(contains(message_of<StorageFailure>([&] { (void)put(engine, "u", pattern(4000000, 2)); }), "no space left"));
    for (const bool allocate : {false, true}) {
      store.grow(before + (allocate ? 8000000 : 4000000), allocate);
    }
    CHECK(store.space().data_bytes >= before + 8000000);
    (void)ended(engine, put(engine, "u", pattern(7900000, 2)));
    CHECK(get(engine, "u") == pattern(7900000, 2) && get(engine, "t") == pattern(100000, 1));
    store.grow(1, true);  // never shrinks the store
    CHECK(store.space().data_bytes >= before + 8000000);
    const std::shared_ptr<Store> other = bench.open();
    CHECK(other->space().data_bytes == store.space().data_bytes);
    CHECK(contains(message_of<Error>([&] { store.grow(20000000, true); }), "which no other process uses"));
  }
  CHECK(bench.open()->space().data_bytes >= 8000000);
  Bench two(2);
  CHECK(contains(message_of<Error>([&] { two.open()->grow(1 << 30, false); }), "one file"));
}

TEST(where_blocks_cannot_be_allocated_a_store_grows_by_writing_the_new_part_only) {
  for (const int error : {EOPNOTSUPP, ENOSYS}) {
    const Bench bench(1, (1 << 20) + (1 << 18));
    CannotAllocate calls(error);
    DirectEngine engine(bench.open(calls), volatile_options("auto"), calls);
    Store& store = engine.store();
    const std::int64_t before = store.space().data_bytes;
    const std::int64_t old_end = store.devices()[0]->bytes();
    (void)ended(engine, put(engine, "t", pattern(100000, 1)));
    const std::int64_t old_blocks = status_of(bench.paths[0]).st_blocks;
    calls.watch(old_end + (6 << 20));
    CHECK(contains(message_of<StorageFailure>([&] { store.grow(before + 8000000, true); }), "grow of"));
    CHECK(calls.lowest == old_end && status_of(bench.paths[0]).st_size == old_end);
    CHECK(store.space().data_bytes == before);
    calls.watch();
    store.grow(before + 8000000, true);
    CHECK(calls.lowest == old_end && status_of(bench.paths[0]).st_size == store.devices()[0]->bytes());
    CHECK((status_of(bench.paths[0]).st_blocks - old_blocks) * 512 >= 8000000);
    (void)ended(engine, put(engine, "u", pattern(7900000, 2)));
    CHECK(get(engine, "u") == pattern(7900000, 2) && get(engine, "t") == pattern(100000, 1));
  }
}

TEST(a_file_whose_blocks_cannot_be_allocated_grows_while_it_is_written) {
  const Folder folder;
  const std::string path = folder.file("device", 0);
  if (!cannot_allocate(path)) {
    return;  // not on ext4
  }
  (void)folder.file("device", (1 << 20) + (1 << 18));
  FormatOptions format;
  format.owner = "tests";
  format.chunk_bytes = 4096;
  format_store({path}, format);
  StoreOptions options;
  options.owner = "tests";
  options.control_folder = folder.path();
  DirectEngine engine(std::make_shared<Store>(std::vector<std::string>{path}, options), volatile_options("auto"));
  (void)ended(engine, put(engine, "t", pattern(60000, 0)));
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (unsigned round = 1; !done; ++round) {
      (void)ended(engine, put(engine, "t", pattern(60000, round % 5)));
      CHECK(get(engine, "t") == pattern(60000, round % 5));
    }
  });
  for (std::int64_t size = 1; size <= 8; ++size) {
    engine.store().grow(size << 20, true);
  }
  done = true;
  writer.join();
  CHECK(engine.store().space().data_bytes >= 8 << 20 && status_of(path).st_blocks * 512 >= 7 << 20);
}

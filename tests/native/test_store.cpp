#include <signal.h>
#include <sys/wait.h>

#include <algorithm>

#include <map>
#include <mutex>
#include <random>

#include "check.h"
#include "storage_fixture.h"

using namespace storage_fixture;
using check::contains;
using check::message_of;

namespace {

using State = std::map<std::string, std::vector<char>>;

void write_tensor(DirectEngine& engine, const std::string& key, const std::vector<char>& data) {
  CHECK(!ended(engine, put(engine, key, data)).failure);
}

// Returns the contents of a store, read by plain device reads. A tensor that fails its checksum has the contents
// "damaged".
State contents(Store& store) {
  State out;
  for (const auto& [key, record] : store.list()) {
    std::vector<char> data;
    for (const Extent& extent : record->extents) {
      SectorBuffer buffer(extent.bytes);
      store.devices()[extent.member]->read(buffer.data(), buffer.bytes(), extent.offset);
      data.insert(data.end(), buffer.data(), buffer.data() + extent.bytes);
    }
    const std::string damaged = "damaged";
    out[key] = store.verify(*record).empty() ? data : std::vector<char>(damaged.begin(), damaged.end());
  }
  return out;
}

// A write to a device, or a flush.
struct Event {
  bool flush = false;
  std::size_t member = 0;
  std::int64_t offset = 0;
  std::vector<char> data;
};

class Recorder : public IoSyscalls {
 public:
  std::vector<Event> events;
  std::map<int, std::size_t> members;  // by descriptor

  int prepare(AioCommand& command) override {
    if (command.write) {
      const char* data = static_cast<const char*>(command.data);
      add({false, static_cast<std::size_t>(command.file), command.offset, {data, data + command.bytes}});
    }
    return 0;
  }
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset) override {
    const char* from = static_cast<const char*>(data);
    add({false, members.at(fd), offset, {from, from + bytes}});
    return IoSyscalls::pwrite(fd, data, bytes, offset);
  }
  int fdatasync(int fd) override {
    const int result = IoSyscalls::fdatasync(fd);
    add({true, members.at(fd), 0, {}});
    return result;
  }

 private:
  void add(Event event) {
    std::lock_guard<std::mutex> guard(mutex_);
    events.push_back(std::move(event));
  }
  std::mutex mutex_;
};

// The state that a power cut may leave: files with everything that was flushed, and any 512-byte sectors of the rest.
class Wreck {
 public:
  explicit Wreck(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
      fds_.push_back(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    }
    unflushed_.resize(paths.size());
  }
  Wreck(const Wreck&) = delete;
  Wreck& operator=(const Wreck&) = delete;
  ~Wreck() {
    for (const int fd : fds_) {
      ::close(fd);
    }
  }
  void follow(const Event& event) {
    if (!event.flush) {
      unflushed_[event.member].push_back(&event);
      return;
    }
    for (const Event* write : unflushed_[event.member]) {
      put_at(event.member, write->offset, write->data);
    }
    unflushed_[event.member].clear();
  }
  [[nodiscard]] bool has_unflushed() const {
    return std::any_of(unflushed_.begin(), unflushed_.end(), [](const auto& writes) { return !writes.empty(); });
  }
  // Each sector of an unflushed write reaches the device with probability `chance`.
  void tear(double chance, std::mt19937& random) {
    for (std::size_t member = 0; member < fds_.size(); ++member) {
      for (const Event* write : unflushed_[member]) {
        std::vector<char> old(write->data.size());
        (void)!::pread(fds_[member], old.data(), old.size(), write->offset);
        undo_.push_back({false, member, write->offset, old});
        for (std::size_t at = 0; at < old.size(); at += 512) {
          if (std::uniform_real_distribution<>(0, 1)(random) < chance) {
            std::copy_n(write->data.begin() + static_cast<std::ptrdiff_t>(at),
                        std::min<std::size_t>(512, old.size() - at), old.begin() + static_cast<std::ptrdiff_t>(at));
          }
        }
        put_at(member, write->offset, old);
      }
    }
  }
  void fix() {
    for (; !undo_.empty(); undo_.pop_back()) {
      put_at(undo_.back().member, undo_.back().offset, undo_.back().data);
    }
  }

 private:
  void put_at(std::size_t member, std::int64_t offset, const std::vector<char>& data) const {
    (void)!::pwrite(fds_[member], data.data(), data.size(), offset);
  }
  std::vector<int> fds_;
  std::vector<std::vector<const Event*>> unflushed_;
  std::vector<Event> undo_;
};

}  // namespace

TEST(what_is_committed_is_there_after_reopening_and_the_rest_is_not) {
  const Bench bench(2);
  {
    const std::shared_ptr<Store> store = bench.open();
    DirectEngine engine(store, options_for("auto"));
    write_tensor(engine, "kept", pattern(70001, 1));
    write_tensor(engine, "gone", pattern(100, 2));
    CHECK(store->commit() == 2);
    CHECK(store->erase("gone") && !store->erase("never"));
    CHECK(store->commit() == 1 && store->commit() == 0);
    write_tensor(engine, "kept", pattern(5, 3));
    write_tensor(engine, "lost", pattern(100, 4));
    CHECK(store->uncommitted() == 2);
  }
  const std::shared_ptr<Store> store = bench.open();
  CHECK(contents(*store) == (State{{"kept", pattern(70001, 1)}}));
  CHECK(store->find("kept")->dtype == "uint8" && store->find("kept")->shape == std::vector<std::int64_t>{70001});
}

TEST(overwriting_for_ever_needs_no_more_than_two_versions_and_moves_the_log) {
  const Bench bench(1, (1 << 20) + 2 * 16384 + 3 * 65536, 4096, 16384);
  const std::shared_ptr<Store> store = bench.open();
  DirectEngine engine(store, options_for("auto"));
  for (unsigned round = 0; round < 40; ++round) {
    write_tensor(engine, "a", pattern(40000, round));
    write_tensor(engine, "b", pattern(20000, round + 100));
    CHECK(store->commit() == 2);
  }
  CHECK(store->superblock(0).epoch > 5);
  CHECK(contents(*store) == (State{{"a", pattern(40000, 39)}, {"b", pattern(20000, 139)}}));
}

TEST(no_space_is_an_error_that_says_how_much_there_is) {
  const Bench bench(1, (1 << 20) + (2 << 16) + (1 << 20), 4096);
  const std::shared_ptr<Store> store = bench.open();
  const std::string message = message_of<Error>([&] { (void)store->reserve(64 << 20); });
  CHECK(contains(message, "expected 67108864 bytes") && contains(message, "no space left"));
}

TEST(an_index_too_large_for_its_log_is_refused_and_nothing_is_lost) {
  const Bench bench(1, 16 << 20, 4096, 8192);
  const std::shared_ptr<Store> store = bench.open();
  DirectEngine engine(store, options_for("auto"));
  write_tensor(engine, "first", pattern(10, 1));
  (void)store->commit();
  for (int index = 0; index < 200; ++index) {
    write_tensor(engine, "tensor number " + std::to_string(index), pattern(10, 2));
  }
  CHECK(contains(message_of<Error>([&] { (void)store->commit(); }), "larger one"));
  CHECK(contents(*bench.open()) == (State{{"first", pattern(10, 1)}}));
  for (int index = 5; index < 200; ++index) {
    CHECK(store->erase("tensor number " + std::to_string(index)));
  }
}

TEST(a_failed_flush_ends_the_promise_until_the_store_is_opened_again) {
  const Bench bench;
  FaultyCalls calls;
  {
    const std::shared_ptr<Store> store = bench.open(calls);
    DirectEngine engine(store, options_for("auto"), calls);
    write_tensor(engine, "a", pattern(100, 1));
    (void)store->commit();
    write_tensor(engine, "a", pattern(100, 2));
    calls.on_flush = [](int) {
      errno = EIO;
      return true;
    };
    CHECK(contains(message_of<Error>([&] { (void)store->commit(); }), "flush of"));
    calls.on_flush = nullptr;
    CHECK(contains(message_of<Error>([&] { (void)store->commit(); }), "open it again and verify"));
  }
  CHECK(contents(*bench.open()) == (State{{"a", pattern(100, 1)}}));
}

TEST(interrupted_and_short_metadata_transfers_are_continued) {
  const Bench bench;
  FaultyCalls calls;
  std::atomic<int> turn{0};
  const auto disturb = [&](int, std::size_t& bytes) {
    errno = EINTR;
    bytes = bytes > 4096 ? bytes / 2 : bytes;
    return ++turn % 2 == 0;
  };
  calls.on_pread = disturb;
  calls.on_pwrite = disturb;
  const std::shared_ptr<Store> store = bench.open(calls);
  DirectEngine engine(store, options_for("auto"), calls);
  for (int index = 0; index < 60; ++index) {
    write_tensor(engine, "tensor number " + std::to_string(index), pattern(10, 2));
  }
  CHECK(store->commit() == 60);
  CHECK(contents(*store).size() == 60);
}

TEST(stores_are_distinguished) {
  const Bench one(2);
  const Bench two(2);
  StoreOptions options;
  options.control_folder = one.folder.path();
  options.owner = "someone else";
  CHECK(contains(message_of<Error>([&] { const Store store(one.paths, options); }), "belongs to 'tests'"));
  options.owner = "tests";
  CHECK(contains(message_of<Error>([&] { const Store store({one.paths[0]}, options); }), "device 1 of 2"));
  CHECK(contains(message_of<Error>([&] { const Store store({one.paths[0], two.paths[1]}, options); }),
                 "belongs to another store"));
  CHECK(contains(message_of<Error>([&] { const Store store({one.paths[0], one.paths[0]}, options); }), "each of its"));
  const Store reversed({one.paths[1], one.paths[0]}, options);
  CHECK(reversed.devices()[0]->path() == one.paths[0]);
}

TEST(a_store_in_use_cannot_be_destroyed_or_formatted) {
  const Bench bench;
  {
    const std::shared_ptr<Store> store = bench.open();
    CHECK(contains(message_of<Error>([&] { destroy_store(bench.paths); }), "in use"));
    FormatOptions options;
    options.owner = "other";
    CHECK(contains(message_of<Error>([&] { format_store(bench.paths, options); }), "in use"));
  }
  destroy_store(bench.paths);
  CHECK(contains(message_of<Error>([&] { (void)bench.open(); }), "holds no store"));
}

TEST(a_batch_lost_in_the_middle_of_the_log_is_damage_and_not_an_end) {
  const Bench bench;
  std::int64_t log = 0;
  {
    const std::shared_ptr<Store> store = bench.open();
    DirectEngine engine(store, options_for("auto"));
    for (unsigned round = 0; round < 3; ++round) {
      write_tensor(engine, "a", pattern(100, round));
      (void)store->commit();
    }
    log = store->superblock(0).log_offset;
  }
  const Device device(bench.paths[0], kernel_syscalls());
  const SectorBuffer zeros(4096);
  device.write(zeros.data(), 4096, log + 4096);
  CHECK(contains(message_of<Error>([&] { (void)bench.open(); }), "batch 2 is not whole though batch 3 is"));
}

TEST(one_torn_superblock_is_survived_and_two_are_named) {
  const Bench bench(1, 16 << 20, 4096, 8192);
  {
    const std::shared_ptr<Store> store = bench.open();
    DirectEngine engine(store, options_for("auto"));
    write_tensor(engine, "a", pattern(100, 1));
    (void)store->commit();
    (void)store->collect();
  }
  const Device device(bench.paths[0], kernel_syscalls());
  const std::uint64_t generation = read_superblock(device)->generation;
  SectorBuffer noise(4096);
  std::fill_n(noise.data(), 100, 'x');
  device.write(noise.data(), 4096, static_cast<std::int64_t>((generation + 1) % 2) * 4096);  // the older one
  CHECK(contents(*bench.open()) == (State{{"a", pattern(100, 1)}}));
  device.write(noise.data(), 4096, static_cast<std::int64_t>(generation % 2) * 4096);
  CHECK(contains(message_of<Error>([&] { (void)bench.open(); }), "superblocks are damaged"));
}

TEST(two_users_see_each_others_commits_and_share_the_space) {
  const Bench bench(2);
  const std::shared_ptr<Store> one = bench.open();
  const std::shared_ptr<Store> two = bench.open();
  DirectEngine first(one, options_for("auto"));
  DirectEngine second(two, options_for("libaio"));
  for (unsigned round = 0; round < 20; ++round) {
    write_tensor(first, "a", pattern(30000, round));
    write_tensor(second, "b", pattern(30000, round + 50));
    CHECK(!two->find("a") || round > 0);
    (void)one->commit();
    (void)two->commit();
    CHECK(get(second, "a") == pattern(30000, round));
    CHECK(get(first, "b") == pattern(30000, round + 50));
    if (round % 6 == 0) {
      (void)(round % 4 == 0 ? one : two)->collect();  // the other one has to switch to the new half
    }
  }
  CHECK(one->space().processes == 2);
  const State both{{"a", pattern(30000, 19)}, {"b", pattern(30000, 69)}};
  CHECK(contents(*one) == both && contents(*two) == both);
}

TEST(a_tensor_that_another_process_replaces_while_it_is_verified_is_not_damaged) {
  const Bench bench;
  FaultyCalls calls;
  const std::shared_ptr<Store> one = bench.open(calls);
  const std::shared_ptr<Store> two = bench.open();
  DirectEngine engine(two, options_for("auto"));
  std::function<void()> before_read;
  calls.on_pread = [&](int, std::size_t&) {
    if (const auto act = std::exchange(before_read, nullptr)) {
      act();
    }
    return false;
  };
  const auto spoil = [&](const TensorRecord& record) {
    const SectorBuffer noise(4096);
    two->devices()[0]->write(noise.data(), 4096, record.extents[0].offset);
  };
  write_tensor(engine, "t", pattern(30000, 1));
  (void)two->commit();
  const RecordPointer old = one->find("t");
  before_read = [&] {
    write_tensor(engine, "t", pattern(30000, 2));
    (void)two->commit();
    spoil(*old);  // its space is free now, and may be reused
  };
  const Verified replaced = one->verify("t");
  CHECK(replaced.problem.empty() && replaced.record && replaced.record->generation == two->find("t")->generation);
  const RecordPointer now = one->find("t");
  before_read = [&] {
    CHECK(two->erase("t"));
    (void)two->commit();
    spoil(*now);
  };
  CHECK(!one->verify("t").record);
  write_tensor(engine, "t", pattern(30000, 3));
  (void)two->commit();
  spoil(*two->find("t"));
  const Verified damaged = one->verify("t");
  CHECK(contains(damaged.problem, "checksum") && damaged.record->generation == two->find("t")->generation);
}

TEST(erasing_one_version_keeps_the_one_that_another_process_has_committed_since) {
  const Bench bench;
  const std::shared_ptr<Store> one = bench.open();
  const std::shared_ptr<Store> two = bench.open();
  DirectEngine engine(two, options_for("auto"));
  const auto replace = [&](unsigned seed) {
    write_tensor(engine, "t", pattern(30000, seed));
    (void)two->commit();
  };
  replace(1);
  const std::uint64_t first = one->find("t")->generation;
  replace(2);
  CHECK(!one->erase("t", first) && one->uncommitted() == 0);
  const std::uint64_t second = one->find("t")->generation;
  CHECK(one->erase("t", second) && !one->find("t"));
  replace(3);  // before the erasure is committed
  CHECK(one->commit() == 0);
  CHECK(contents(*one) == (State{{"t", pattern(30000, 3)}}) && contents(*two) == contents(*one));
  CHECK(one->erase("t", one->find("t")->generation) && one->commit() == 1);
  CHECK(contents(*one).empty() && contents(*two).empty());
  const std::int64_t free = one->space().free_bytes;
  DirectEngine own(one, options_for("auto"));
  write_tensor(own, "t", pattern(30000, 4));
  CHECK(one->erase("t", one->find("t")->generation));  // its own version, which was never committed
  (void)one->commit();
  CHECK(contents(*two).empty() && one->space().free_bytes == free);
}

#if !UNDER_SANITIZER
TEST(what_a_killed_process_held_is_given_back) {
  const Bench bench(1, 4 << 20);
  const std::shared_ptr<Store> store = bench.open();
  const std::int64_t before = store->space().free_bytes;
  int pipe_fds[2];
  CHECK(pipe(pipe_fds) == 0);
  const pid_t child = fork();
  if (child == 0) {
    const std::shared_ptr<Store> own = bench.open();
    (void)own->reserve(1 << 20);
    (void)!::write(pipe_fds[1], "x", 1);
    pause();
    _exit(0);
  }
  char byte = 0;
  CHECK(::read(pipe_fds[0], &byte, 1) == 1);
  CHECK(store->space().free_bytes == before - (1 << 20));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  CHECK(store->collect() > 0);
  CHECK(store->space().free_bytes == before);
  ::close(pipe_fds[0]);
  ::close(pipe_fds[1]);
}
#endif

// Unlike a killed process, a power cut loses the page cache. The sequence of writes is cut after every event; writes
// that were not flushed are dropped, kept, or kept in part (in sectors of 512 bytes); then the store is opened.
TEST(after_a_power_cut_at_any_write_every_commit_is_whole_or_absent) {
  const Bench bench(2, (1 << 20) + 2 * 12288 + (512 << 10), 4096, 12288);
  const Bench wrecked(2, (1 << 20) + 2 * 12288 + (512 << 10), 4096, 12288);
  for (std::size_t member = 0; member < 2; ++member) {  // a copy of the freshly formatted store
    CHECK(std::system(("cp " + bench.paths[member] + " " + wrecked.paths[member]).c_str()) == 0);
  }
  Recorder recorder;
  std::vector<State> states{{}};
  std::vector<std::size_t> begins{0};  // commit k > 0 made the events [begins[k], ends[k])
  std::vector<std::size_t> ends{0};
  {
    StoreOptions options;
    options.owner = "tests";
    options.control_folder = bench.folder.path();
    options.stripe_bytes = 8192;
    const auto store = std::make_shared<Store>(bench.paths, options, recorder);
    for (std::size_t member = 0; member < 2; ++member) {
      recorder.members[store->devices()[member]->fd()] = member;
    }
    DirectEngine engine(store, options_for("auto"), recorder);
    std::mt19937 random(1);
    State state;
    for (unsigned round = 0; round < 25; ++round) {
      for (int change = 0; change < 3; ++change) {
        const std::string key = "k" + std::to_string(random() % 5);
        if (random() % 6 == 0 && state.contains(key)) {
          CHECK(store->erase(key));
          state.erase(key);
        } else {
          state[key] = pattern(random() % 30000, static_cast<unsigned>(random()));
          write_tensor(engine, key, state[key]);
        }
      }
      begins.push_back(recorder.events.size());
      (void)store->commit();
      ends.push_back(recorder.events.size());
      states.push_back(state);
    }
    CHECK(store->superblock(0).epoch > 2);
  }
  Wreck wreck(wrecked.paths);
  std::mt19937 random(2);
  std::size_t committed = 0;
  std::size_t opened = 0;
  const std::size_t stride =
      UNDER_SANITIZER ? 7 : 1;  // a sanitizer checks memory accesses, which are alike for all cuts
  for (std::size_t cut = 0; cut <= recorder.events.size(); ++cut) {
    if (cut > 0) {
      wreck.follow(recorder.events[cut - 1]);
    }
    while (committed + 1 < states.size() && ends[committed + 1] <= cut) {
      ++committed;
    }
    if (cut % stride != 0) {
      continue;
    }
    const bool committing = committed + 1 < states.size() && begins[committed + 1] < cut;
    for (const double chance : {0.0, 1.0, 0.5, 0.9}) {
      if (chance > 0 && !wreck.has_unflushed()) {
        continue;
      }
      wreck.tear(chance, random);
      const std::shared_ptr<Store> store = wrecked.open();
      const State found = contents(*store);
      ++opened;
      CHECK_NOTE(found == states[committed] || (committing && found == states[committed + 1]),
                 "cut " + std::to_string(cut) + ", chance " + std::to_string(chance));
      wreck.fix();
    }
  }
  CHECK(opened > 500 / stride);
}

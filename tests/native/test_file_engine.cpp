#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>

#include "check.h"
#include "core/errors.h"
#include "core/file_engine.h"

using namespace memascend;
using check::contains;
using check::message_of;

namespace {

constexpr std::int64_t kBlock = 16 * 4096;

// A temporary folder in the working directory, removed by the destructor. It is not in /tmp, which may be in memory.
class Folder {
 public:
  Folder() {
    std::string name = "native-test-XXXXXX";
    path_ = mkdtemp(name.data()) ? name : std::string("no-folder");
  }
  ~Folder() { (void)!std::system(("rm -rf " + path_).c_str()); }
  [[nodiscard]] std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

std::vector<char> pattern(std::size_t bytes, unsigned seed) {
  std::vector<char> data(bytes);
  std::uint32_t state = seed * 2654435761u + 1;
  for (char& byte : data) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<char>(state >> 24);
  }
  return data;
}

std::vector<char> content(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::vector<char> data(file ? static_cast<std::size_t>(file.tellg()) : 0);
  file.seekg(0);
  file.read(data.data(), static_cast<std::streamsize>(data.size()));
  return data;
}

void put(const std::string& path, const std::vector<char>& data) {
  std::ofstream(path, std::ios::binary).write(data.data(), static_cast<std::streamsize>(data.size()));
}

// Faults injected between the engine and the kernel in one test. Atomic, since workers read them.
struct Faults {
  std::atomic<std::int64_t> max_bytes{1 << 30};  // a transfer moves at most this many bytes
  std::atomic<int> interrupt_every{0};
  std::atomic<int> fail_call{0};  // the n-th transfer fails ...
  std::atomic<int> fail_errno{0};
  std::atomic<int> refuse_direct_open{0};
  std::atomic<int> refuse_direct_transfer{0};
  std::atomic<int> fail_close{0};
  std::atomic<int> partial_blocks_past_the_cache{0};
  std::atomic<int> calls{0};
  std::atomic<int> open_files{0};
  std::atomic<int> most_open_files{0};
} faults;

void reset_faults() {
  faults.max_bytes = 1 << 30;
  faults.interrupt_every = faults.fail_call = faults.fail_errno = faults.refuse_direct_open = 0;
  faults.refuse_direct_transfer = faults.fail_close = faults.partial_blocks_past_the_cache = faults.calls =
      faults.open_files = faults.most_open_files = 0;
}

int faulty_open(const char* path, int flags, mode_t mode) {
  if (faults.refuse_direct_open && (flags & O_DIRECT)) {
    errno = EINVAL;
    return -1;
  }
  const int fd = ::open(path, flags, mode);
  if (fd >= 0) {
    const int now = ++faults.open_files;
    int most = faults.most_open_files;
    while (now > most && !faults.most_open_files.compare_exchange_weak(most, now)) {
    }
  }
  return fd;
}

bool inject(int fd, std::size_t bytes, off_t offset) {
  const int call = ++faults.calls;
  if ((fcntl(fd, F_GETFL) & O_DIRECT) && (bytes % 4096 != 0 || offset % 4096 != 0)) {
    ++faults.partial_blocks_past_the_cache;
  }
  if (faults.interrupt_every && call % faults.interrupt_every == 0) {
    errno = EINTR;
    return true;
  }
  if (faults.fail_call && call >= faults.fail_call) {
    errno = faults.fail_errno;
    return true;
  }
  if (faults.refuse_direct_transfer && (fcntl(fd, F_GETFL) & O_DIRECT)) {
    errno = EINVAL;
    return true;
  }
  return false;
}

// A partial direct transfer may violate the kernel's alignment rules. The kernel then returns EINVAL, which the engine
// has to cope with too.
ssize_t faulty_pread(int fd, void* data, std::size_t bytes, off_t offset) {
  return inject(fd, bytes, offset)
             ? -1
             : ::pread(fd, data, std::min(bytes, static_cast<std::size_t>(faults.max_bytes)), offset);
}
ssize_t faulty_pwrite(int fd, const void* data, std::size_t bytes, off_t offset) {
  return inject(fd, bytes, offset)
             ? -1
             : ::pwrite(fd, data, std::min(bytes, static_cast<std::size_t>(faults.max_bytes)), offset);
}
int faulty_close(int fd) {
  --faults.open_files;
  ::close(fd);
  if (faults.fail_close) {
    errno = EIO;
    return -1;
  }
  return 0;
}
class FaultyFiles : public IoSyscalls {
 public:
  int open(const char* path, int flags, mode_t mode) override { return faulty_open(path, flags, mode); }
  int close(int fd) override { return faulty_close(fd); }
  ssize_t pread(int fd, void* data, std::size_t bytes, off_t offset) override {
    return faulty_pread(fd, data, bytes, offset);
  }
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset) override {
    return faulty_pwrite(fd, data, bytes, offset);
  }
} faulty;

// A summary of the outcomes of a wait for all requests.
struct Waited {
  std::size_t completed = 0;
  std::vector<RequestFailure> failures;
};
Waited wait_all(FileEngine& engine) {
  Waited out;
  const auto ended = engine.wait(-1);
  for (const auto& [request, outcome] : *ended) {
    ++out.completed;
    if (outcome.failure) {
      out.failures.push_back(*outcome.failure);
    }
  }
  return out;
}

// Writes data and reads it back at every kind of address and offset. The rest of the file must be unchanged.
void round_trips(FileEngine& engine, const Folder& folder, const std::string& note) {
  for (const std::int64_t bytes : {1l, 511l, 512l, 4095l, 4096l, 4097l, 40'000l, 3 * 65'536l, 300'001l}) {
    const auto data = pattern(static_cast<std::size_t>(bytes), 9);
    for (const std::int64_t offset : {0l, 1l, 512l, 4096l, 70'000l}) {
      const auto around = pattern(static_cast<std::size_t>(offset + bytes + 5000), 7);
      for (const std::size_t shift : {0ul, 1ul, 64ul, 512ul}) {
        const std::string path = folder.file("f" + std::to_string(bytes) + "-" + std::to_string(offset));
        put(path, around);
        auto* memory =
            static_cast<char*>(std::aligned_alloc(4096, (shift + static_cast<std::size_t>(bytes) + 8191) & ~4095ul));
        std::memcpy(memory + shift, data.data(), data.size());
        engine.submit(IoOp::kWrite, memory + shift, bytes, path, offset);
        auto wrote = wait_all(engine);
        auto expected = around;
        std::copy(data.begin(), data.end(), expected.begin() + offset);
        const bool kept = wrote.completed == 1 && wrote.failures.empty() && content(path) == expected;
        std::memset(memory + shift, 0, data.size());
        engine.submit(IoOp::kRead, memory + shift, bytes, path, offset);
        auto read = wait_all(engine);
        const bool same =
            read.completed == 1 && read.failures.empty() && std::memcmp(memory + shift, data.data(), data.size()) == 0;
        std::free(memory);
        CHECK_NOTE(kept && same, note + ": bytes " + std::to_string(bytes) + " offset " + std::to_string(offset) +
                                     " shift " + std::to_string(shift) + (kept ? "" : " write") +
                                     (same ? "" : " read"));
      }
    }
  }
}

}  // namespace

TEST(file_engine_any_address_length_and_offset) {
  Folder folder;
  FileEngine engine(3, kBlock);
  round_trips(engine, folder, "kernel");
  CHECK(engine.statistics().bytes_read == engine.statistics().bytes_written);
  CHECK(engine.statistics().bounced_bytes > 0);
}

// If a page is written partly directly and partly through the page cache, write-back can overwrite the direct part.
TEST(file_engine_passes_the_cache_in_whole_pages_only) {
  Folder folder;
  reset_faults();
  FileEngine engine(3, kBlock, faulty);
  round_trips(engine, folder, "counted");
  CHECK(faults.calls > 0 && faults.partial_blocks_past_the_cache == 0);
  CHECK(engine.statistics().buffered_bytes < engine.statistics().bytes_written);
}

TEST(file_engine_partial_transfers_are_continued) {
  for (const std::int64_t most : {512l, 700l, 4096l, 9000l}) {
    Folder folder;
    reset_faults();
    faults.max_bytes = most;
    FileEngine engine(2, kBlock, faulty);
    round_trips(engine, folder, "at most " + std::to_string(most));
  }
  reset_faults();
}

TEST(file_engine_interrupted_calls_are_repeated) {
  Folder folder;
  reset_faults();
  faults.interrupt_every = 2;
  FileEngine engine(2, kBlock, faulty);
  round_trips(engine, folder, "interrupted");
  reset_faults();
}

TEST(file_engine_works_where_o_direct_is_refused) {
  Folder folder;
  reset_faults();
  faults.refuse_direct_open = 1;
  {
    FileEngine engine(2, kBlock, faulty);
    round_trips(engine, folder, "no O_DIRECT open");
    CHECK(engine.statistics().buffered_bytes == engine.statistics().bytes_read + engine.statistics().bytes_written);
  }
  reset_faults();
  faults.refuse_direct_transfer = 1;
  FileEngine engine(2, kBlock, faulty);
  round_trips(engine, folder, "no O_DIRECT transfer");
  reset_faults();
}

TEST(file_engine_new_file_has_exactly_the_bytes) {
  Folder folder;
  FileEngine engine(2, kBlock);
  for (const std::size_t bytes : {0ul, 1ul, 4096ul, 100'003ul}) {
    auto data = pattern(bytes, 3);
    const std::string path = folder.file("new" + std::to_string(bytes));
    engine.submit(IoOp::kWrite, data.data(), static_cast<std::int64_t>(bytes), path, 0);
    CHECK(wait_all(engine).failures.empty());
    CHECK(access(path.c_str(), F_OK) == 0 && content(path) == data);
  }
}

TEST(file_engine_end_of_file_is_a_failure_with_numbers) {
  Folder folder;
  const std::string path = folder.file("short");
  for (const std::size_t there : {0ul, 100ul, 4096ul, 5000ul}) {
    put(path, pattern(there, 1));
    std::vector<char> data(9000);
    FileEngine engine(1, kBlock);
    engine.submit(IoOp::kRead, data.data(), 9000, path, 0);
    const auto result = wait_all(engine);
    CHECK(result.completed == 1 && result.failures.size() == 1);
    const RequestFailure& failure = result.failures.at(0);
    CHECK(failure.error == 0 && failure.reason == "end of file" && failure.path == path);
    CHECK_NOTE(failure.offset == 0 && failure.expected == 9000 && failure.got == static_cast<std::int64_t>(there),
               std::to_string(failure.got));
  }
}

TEST(file_engine_reports_the_errno_and_stays_usable) {
  Folder folder;
  std::vector<char> data = pattern(200'000, 2);
  for (const int error : {EIO, ENOSPC}) {
    reset_faults();
    faults.fail_call = 2;
    faults.fail_errno = error;
    FileEngine engine(2, kBlock, faulty);
    engine.submit(IoOp::kWrite, data.data(), 200'000, folder.file("bad"), 0);
    const auto result = wait_all(engine);
    CHECK(result.completed == 1 && result.failures.size() == 1);
    CHECK(result.failures.at(0).error == error && result.failures.at(0).op == "write");
    CHECK(contains(result.failures.at(0).reason, std::strerror(error)));
    reset_faults();
    engine.submit(IoOp::kWrite, data.data(), 200'000, folder.file("good"), 0);
    const auto again = wait_all(engine);
    CHECK(again.completed == 1 && again.failures.empty() && content(folder.file("good")) == data);
  }
}

TEST(file_engine_failed_close_after_a_write_is_a_failure) {
  Folder folder;
  reset_faults();
  faults.fail_close = 1;
  std::vector<char> data(100);
  FileEngine engine(1, kBlock, faulty);
  engine.submit(IoOp::kWrite, data.data(), 100, folder.file("f"), 0);
  const auto result = wait_all(engine);
  CHECK(result.failures.size() == 1 && contains(result.failures.at(0).reason, "closing"));
  reset_faults();
}

TEST(file_engine_missing_file_fails_in_wait_and_not_the_others) {
  Folder folder;
  auto data = pattern(10'000, 4);
  put(folder.file("there"), data);
  std::vector<char> first(10'000), second(10'000);
  FileEngine engine(2, kBlock);
  engine.submit(IoOp::kRead, first.data(), 10'000, folder.file("missing"), 0);
  engine.submit(IoOp::kRead, second.data(), 10'000, folder.file("there"), 0);
  engine.submit(IoOp::kRead, first.data(), 0, folder.file("missing-too"), 0);
  const auto result = wait_all(engine);
  CHECK(result.completed == 3 && result.failures.size() == 2);
  CHECK(result.failures.at(0).error == ENOENT && result.failures.at(1).error == ENOENT);
  CHECK(second == data);
}

TEST(file_engine_wait_counts_since_the_last_wait) {
  Folder folder;
  auto data = pattern(5000, 5);
  FileEngine engine(2, kBlock);
  CHECK(wait_all(engine).completed == 0);
  for (int i = 0; i < 7; ++i) {
    engine.submit(IoOp::kWrite, data.data(), 5000, folder.file(std::to_string(i)), 0);
  }
  CHECK(wait_all(engine).completed == 7);
  CHECK(wait_all(engine).completed == 0 && engine.pending() == 0);
  CHECK(engine.statistics().requests == 7 && engine.statistics().bytes_written == 35'000);
}

TEST(file_engine_many_requests_keep_few_files_open) {
  Folder folder;
  reset_faults();
  auto data = pattern(3 * kBlock, 6);
  {
    FileEngine engine(2, kBlock, faulty);
    for (int i = 0; i < 60; ++i) {
      engine.submit(IoOp::kWrite, data.data(), 3 * kBlock, folder.file(std::to_string(i)), 0);
    }
    CHECK(wait_all(engine).completed == 60);
  }
  CHECK(faults.open_files == 0);
  CHECK_NOTE(faults.most_open_files <= 8, std::to_string(faults.most_open_files.load()));
  reset_faults();
}

TEST(file_engine_neighbours_in_one_file_do_not_tear) {
  Folder folder;
  const std::string path = folder.file("shared");
  constexpr std::int64_t kLength = 10'007;  // no boundary between parts is at a page boundary
  constexpr int kCount = 24;
  std::vector<std::vector<char>> parts;
  for (int i = 0; i < kCount; ++i) {
    parts.push_back(pattern(kLength, 100u + static_cast<unsigned>(i)));
  }
  FileEngine engine(4, 4096);
  for (int i = 0; i < kCount; ++i) {
    const int which = i * 7 % kCount;
    engine.submit(IoOp::kWrite, parts[static_cast<std::size_t>(which)].data(), kLength, path, which * kLength);
  }
  CHECK(wait_all(engine).failures.empty());
  const auto whole = content(path);
  CHECK(whole.size() == kCount * kLength);
  for (int i = 0; i < kCount; ++i) {
    CHECK(std::memcmp(whole.data() + i * kLength, parts[static_cast<std::size_t>(i)].data(), kLength) == 0);
  }
}

TEST(file_engine_destruction_ends_what_is_in_flight) {
  Folder folder;
  auto data = pattern(500'000, 8);
  auto alive = std::make_shared<int>(1);
  {
    FileEngine engine(2, kBlock);
    for (int i = 0; i < 10; ++i) {
      engine.submit(IoOp::kWrite, data.data(), 500'000, folder.file(std::to_string(i)), 0, alive);
    }
    CHECK(alive.use_count() == 11);
  }
  CHECK(alive.use_count() == 1);
  for (int i = 0; i < 10; ++i) {
    CHECK(content(folder.file(std::to_string(i))) == data);
  }
}

TEST(file_engine_keeps_buffers_alive_until_wait_returns) {
  Folder folder;
  auto buffer = std::make_shared<std::vector<char>>(pattern(50'000, 8));
  FileEngine engine(2, kBlock);
  engine.submit(IoOp::kWrite, buffer->data(), 50'000, folder.file("f"), 0, buffer);
  while (engine.pending() > 0) {
    std::this_thread::yield();
  }
  CHECK(buffer.use_count() == 2);  // the worker is done, but only `wait` releases the owner
  CHECK(engine.wait(-1)->size() == 1);
  CHECK(buffer.use_count() == 1);
}

TEST(file_engine_after_shutdown_and_in_a_child) {
  Folder folder;
  auto data = pattern(1000, 8);
  auto owner = std::make_unique<FileEngine>(2, kBlock);
  FileEngine& engine = *owner;
  engine.submit(IoOp::kWrite, data.data(), 1000, folder.file("f"), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto message = message_of<Error>([&] { (void)wait_all(engine); });
    alarm(60);
    engine.shutdown();  // must not join threads that the child does not have
    owner.reset();      // nor wait for threads that wait on the conditions
    _exit(contains(message, "forked child") ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  engine.shutdown();
  engine.shutdown();
  CHECK(wait_all(engine).completed == 1 && content(folder.file("f")) == data);
  CHECK(contains(message_of<Error>([&] { engine.submit(IoOp::kRead, data.data(), 1, "x", 0); }), "closed"));
}

TEST(file_engine_serves_several_submitters) {
  Folder folder;
  FileEngine engine(3, kBlock);
  std::vector<std::vector<char>> data;
  for (unsigned t = 0; t < 4; ++t) {
    data.push_back(pattern(30'000, t));
  }
  std::vector<std::thread> threads;
  std::atomic<std::size_t> completed{0};
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 10; ++i) {
        engine.submit(IoOp::kWrite, data[t].data(), 30'000,
                      folder.file(std::to_string(t * 100 + static_cast<std::size_t>(i))), 0);
      }
      completed += wait_all(engine).completed;
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  completed += wait_all(engine).completed;
  CHECK(completed == 40);
  CHECK(content(folder.file("309")) == data[3]);
}

TEST(file_engine_bad_arguments) {
  char byte = 0;
  CHECK(contains(message_of<Error>([] { FileEngine engine(0, kBlock); }), "1 to 256"));
  CHECK(contains(message_of<Error>([] { FileEngine engine(1, 1000); }), "multiple of 4096"));
  CHECK(contains(message_of<Error>([] { FileEngine engine(1, 0); }), "multiple of 4096"));
  FileEngine engine(1, kBlock);
  CHECK(contains(message_of<Error>([&] { engine.submit(IoOp::kRead, &byte, -1, "x", 0); }), "negative"));
  CHECK(contains(message_of<Error>([&] { engine.submit(IoOp::kRead, &byte, 1, "x", -1); }), "negative"));
  CHECK(contains(message_of<Error>([&] { engine.submit(IoOp::kRead, nullptr, 1, "x", 0); }), "null"));
  CHECK(contains(message_of<Error>([&] { engine.submit(IoOp::kRead, &byte, 1, "x", INT64_MAX - 1); }), "2^63"));
  CHECK(wait_all(engine).completed == 0);
}

// Fixtures for the tests of the storage core: a folder, a formatted store of files, distinguishable contents, and fault
// injection between the engine and the kernel.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/direct_engine.h"
#include "core/io_syscalls.h"
#include "core/store.h"

namespace storage_fixture {

using namespace memascend;

// A temporary folder in the working directory, removed by the destructor. It is not in /tmp, which may be in memory.
class Folder {
 public:
  Folder() {
    std::string name = "storage-test-XXXXXX";
    path_ = mkdtemp(name.data()) != nullptr ? name : std::string("no-folder");
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { (void)!std::system(("rm -rf " + path_).c_str()); }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string file(const std::string& name, std::int64_t bytes) const {
    const std::string path = path_ + "/" + name;
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    (void)!::ftruncate(fd, bytes);
    ::close(fd);
    return path;
  }

 private:
  std::string path_;
};

inline std::vector<char> pattern(std::size_t bytes, unsigned seed) {
  std::vector<char> data(bytes);
  std::uint32_t state = seed * 2654435761u + 1;
  for (char& byte : data) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<char>(state >> 24);
  }
  return data;
}

// Passes every call through, except for the functions that are set. Set them before the engine starts, since its
// workers call them.
class FaultyCalls : public IoSyscalls {
 public:
  std::function<int(AioCommand&)> on_command;
  std::function<int(std::uint64_t, int)> on_completion;
  std::function<bool(long number, long& count)> on_raw;  // true: fails with errno as set; may lower io_submit's count
  std::function<bool(int fd)> on_flush;  // true: fails with errno as set
  std::function<bool(int fd, std::size_t& bytes)> on_pwrite;
  std::function<bool(int fd, std::size_t& bytes)> on_pread;

  long raw(long number, long a, long b, long c, long d, long e, long f) override {
    if (on_raw && on_raw(number, b)) {
      return -1;
    }
    return IoSyscalls::raw(number, a, b, c, d, e, f);
  }
  int prepare(AioCommand& command) override { return on_command ? on_command(command) : 0; }
  int complete(std::uint64_t token, int result) override {
    return on_completion ? on_completion(token, result) : result;
  }
  int fdatasync(int fd) override { return on_flush && on_flush(fd) ? -1 : IoSyscalls::fdatasync(fd); }
  ssize_t pwrite(int fd, const void* data, std::size_t bytes, off_t offset) override {
    return on_pwrite && on_pwrite(fd, bytes) ? -1 : IoSyscalls::pwrite(fd, data, bytes, offset);
  }
  ssize_t pread(int fd, void* data, std::size_t bytes, off_t offset) override {
    return on_pread && on_pread(fd, bytes) ? -1 : IoSyscalls::pread(fd, data, bytes, offset);
  }
};

// A formatted store of `devices` files, and engines on it.
class Bench {
 public:
  explicit Bench(int devices = 1, std::int64_t bytes = 16 << 20, std::int64_t chunk_bytes = 4096,
                 std::int64_t log_bytes = 0) {
    for (int device = 0; device < devices; ++device) {
      paths.push_back(folder.file("device" + std::to_string(device), bytes));
    }
    FormatOptions options;
    options.owner = "tests";
    options.chunk_bytes = chunk_bytes;
    options.log_bytes = log_bytes;
    format_store(paths, options);
  }
  [[nodiscard]] std::shared_ptr<Store> open(IoSyscalls& calls = kernel_syscalls()) const {
    StoreOptions options;
    options.owner = "tests";
    options.control_folder = folder.path();
    options.stripe_bytes = 8192;
    return std::make_shared<Store>(paths, options, calls);
  }

  Folder folder;
  std::vector<std::string> paths;
};

inline EngineOptions options_for(const std::string& backend, int workers = 2, int depth = 4) {
  EngineOptions options;
  options.backend = backend;
  options.workers = workers;
  options.depth = depth;
  options.block_bytes = 16384;
  return options;
}

inline TensorRecord record_of(std::size_t bytes) {
  TensorRecord record;
  record.bytes = static_cast<std::int64_t>(bytes);
  record.dtype = "uint8";
  record.shape = {record.bytes};
  return record;
}

inline std::uint64_t put(DirectEngine& engine, const std::string& key, const std::vector<char>& data,
                         int priority = 0) {
  auto copy = std::make_shared<std::vector<char>>(data);  // lives as long as the request
  return engine.write(key, copy->data(), record_of(data.size()), priority, copy);
}

// Waits for a request and returns its outcome.
inline RequestOutcome ended(DirectEngine& engine, std::uint64_t request) { return *engine.wait_for(request, -1); }

inline std::vector<char> get(DirectEngine& engine, const std::string& key) {
  const RecordPointer record = engine.find(key);
  std::vector<char> data(record ? static_cast<std::size_t>(record->bytes) : 0);
  const RequestOutcome outcome =
      ended(engine, engine.read(key, data.data(), static_cast<std::int64_t>(data.size()), 0, 0));
  return outcome.failure ? std::vector<char>{'f', 'a', 'i', 'l', 'e', 'd'} : data;
}

inline const std::vector<std::string>& backends() {
  static const std::vector<std::string> all = [] {
    std::vector<std::string> out{"libaio"};
    if (aio_missing(AioKind::kUring, kernel_syscalls()).empty()) {
      out.emplace_back("io_uring");
    }
    return out;
  }();
  return all;
}

}  // namespace storage_fixture

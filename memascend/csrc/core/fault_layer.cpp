#include "fault_layer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <iterator>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "errors.h"

namespace memascend {
namespace {

constexpr std::string_view kOps[] = {"read", "write", "flush", "any", "open", "close", "thread"};

bool matches(const std::string& wanted, const std::string& op) {
  return wanted == op || (wanted == "any" && (op == "read" || op == "write" || op == "flush"));
}

void send(int signal) {
  if (signal != 0) {
    (void)::kill(getpid(), signal);
  }
}

}  // namespace

FaultLayer::~FaultLayer() {
  if (const int fd = log_.load(); fd >= 0) {
    ::close(fd);
  }
}

void FaultLayer::log_writes(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) {
    throw Error(ErrorKind::kInvalidArgument, "fault layer: cannot make the log " + path + ": " + std::strerror(errno));
  }
  const int before = log_.exchange(fd);
  if (before >= 0) {
    ::close(before);
  }
}

void FaultLayer::log(LoggedCall call, const void* data) {
  if (log_.load() < 0) {
    return;
  }
  std::lock_guard<std::mutex> guard(log_mutex_);
  std::string out(reinterpret_cast<const char*>(&call), sizeof(call));
  if (data != nullptr) {
    out.append(static_cast<const char*>(data), static_cast<std::size_t>(call.bytes));
  }
  for (std::size_t done = 0; done < out.size();) {
    const ssize_t moved = ::write(log_.load(), out.data() + done, out.size() - done);
    if (moved < 0 && errno != EINTR) {
      std::abort();  // with a gap in the log, a test would blame an intact store for lost data
    }
    done += moved > 0 ? static_cast<std::size_t>(moved) : 0;
  }
}

void FaultLayer::add(Fault fault) {
  if (std::find(std::begin(kOps), std::end(kOps), fault.op) == std::end(kOps)) {
    throw Error(ErrorKind::kInvalidArgument,
                "fault layer: op '" + fault.op + "': use read, write, flush, any, open, close or thread");
  }
  std::lock_guard<std::mutex> guard(mutex_);
  faults_.push_back(std::move(fault));
}

void FaultLayer::clear() {
  std::lock_guard<std::mutex> guard(mutex_);
  faults_.clear();
}

std::int64_t FaultLayer::calls(const std::string& op) {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto found = calls_.find(op);
  return found == calls_.end() ? 0 : found->second;
}

void FaultLayer::demand_alignment(std::uint32_t bytes, bool reported) {
  reported_ = reported;
  alignment_ = bytes;
}

bool FaultLayer::refuses(const void* data) const {
  const std::uint32_t alignment = alignment_.load();
  return alignment != 0 && reinterpret_cast<std::uintptr_t>(data) % alignment != 0;
}

DirectLimits FaultLayer::direct_limits(int fd) {
  if (const std::uint32_t alignment = alignment_.load(); alignment != 0) {
    return reported_ ? DirectLimits{true, alignment, alignment} : DirectLimits{};
  }
  return IoSyscalls::direct_limits(fd);
}

int FaultLayer::inject(const std::string& op) {
  std::size_t bytes = 0;
  int signal = 0;
  const int error = inject(op, bytes, signal);
  send(signal);
  return error;
}

int FaultLayer::inject(const std::string& op, std::size_t& bytes, int& signal) {
  Fault chosen;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    ++calls_[op];
    for (Fault& fault : faults_) {
      if (!matches(fault.op, op) || fault.times == 0 || fault.after-- > 0) {
        continue;
      }
      fault.after = 0;
      fault.times -= fault.times > 0 ? 1 : 0;
      chosen = fault;
      ++injected_;
      break;
    }
  }
  if (chosen.delay_us > 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(chosen.delay_us));
  }
  if (chosen.at_most >= 0) {
    constexpr std::size_t kUnit = 512;
    bytes = std::min(bytes, (static_cast<std::size_t>(chosen.at_most) + kUnit - 1) / kUnit * kUnit);
    signal = chosen.signal;
  } else {
    send(chosen.signal);
  }
  return chosen.error;
}

int FaultLayer::open(const char* path, int flags, mode_t mode) {
  if (const int error = inject("open"); error != 0) {
    errno = error;
    return -1;
  }
  return IoSyscalls::open(path, flags, mode);
}

int FaultLayer::close(int fd) {
  const int error = inject("close");
  const int result = IoSyscalls::close(fd);
  errno = error != 0 ? error : errno;
  return error != 0 ? -1 : result;
}

ssize_t FaultLayer::pread(int fd, void* data, std::size_t bytes, off_t offset) {
  const bool refused = refuses(data) && (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
  int signal = 0;
  if (const int error = refused ? EINVAL : inject("read", bytes, signal); error != 0) {
    errno = error;
    return -1;
  }
  const ssize_t moved = IoSyscalls::pread(fd, data, bytes, offset);
  send(signal);
  return moved;
}

ssize_t FaultLayer::pwrite(int fd, const void* data, std::size_t bytes, off_t offset) {
  const bool refused = refuses(data) && (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
  int signal = 0;
  if (const int error = refused ? EINVAL : inject("write", bytes, signal); error != 0) {
    errno = error;
    return -1;
  }
  const std::uint64_t token = next_token_.fetch_add(1);
  log({LoggedCall::kWrite, 0, token, offset, static_cast<std::int64_t>(bytes)}, data);
  const ssize_t moved = IoSyscalls::pwrite(fd, data, bytes, offset);
  const int error = errno;
  log({LoggedCall::kWritten, 0, token, 0, moved < 0 ? -error : moved});
  send(signal);
  errno = error;
  return moved;
}

int FaultLayer::fdatasync(int fd) {
  if (const int error = inject("flush"); error != 0) {
    errno = error;
    return -1;
  }
  const std::uint64_t token = next_token_.fetch_add(1);
  log({LoggedCall::kFlush, 0, token, 0, 0});
  const int result = IoSyscalls::fdatasync(fd);
  const int error = errno;
  if (result == 0) {
    log({LoggedCall::kFlushed, 0, token, 0, 0});
  }
  errno = error;
  return result;
}

int FaultLayer::prepare(AioCommand& command) {
  std::size_t bytes = command.bytes;
  if (refuses(command.data)) {
    return -EINVAL;
  }
  int signal = 0;
  const int error = inject(command.write ? "write" : "read", bytes, signal);
  command.bytes = static_cast<std::uint32_t>(bytes);
  if (signal != 0) {
    std::lock_guard<std::mutex> guard(mutex_);
    signals_[command.token] = signal;
  }
  if (error == 0 && command.write) {
    log({LoggedCall::kWrite, 0, command.token, command.offset, command.bytes}, command.data);
  }
  return -error;
}

int FaultLayer::complete(std::uint64_t token, int result) {
  log({LoggedCall::kWritten, 0, token, 0, result});  // logged for reads too, whose tokens match no logged write
  int signal = 0;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (const auto found = signals_.find(token); found != signals_.end()) {
      signal = found->second;
      signals_.erase(found);
    }
  }
  send(signal);
  return result;
}

std::thread FaultLayer::start_thread(std::function<void()> body) {
  if (const int error = inject("thread"); error != 0) {
    throw std::system_error(error, std::generic_category());
  }
  return IoSyscalls::start_thread(std::move(body));
}

}  // namespace memascend

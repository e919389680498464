#include "fault_layer.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
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

}  // namespace

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

void FaultLayer::demand_alignment(std::uint32_t bytes, bool told) {
  told_ = told;
  alignment_ = bytes;
}

bool FaultLayer::refuses(const void* data) const {
  const std::uint32_t alignment = alignment_.load();
  return alignment != 0 && reinterpret_cast<std::uintptr_t>(data) % alignment != 0;
}

DirectLimits FaultLayer::direct_limits(int fd) {
  if (const std::uint32_t alignment = alignment_.load(); alignment != 0) {
    return told_ ? DirectLimits{true, alignment, alignment} : DirectLimits{};
  }
  return IoSyscalls::direct_limits(fd);
}

int FaultLayer::inject(const std::string& op, std::size_t& bytes) {
  Fault chosen;
  {
    std::lock_guard<std::mutex> guard(mutex_);
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
  }
  return chosen.error;
}

int FaultLayer::open(const char* path, int flags, mode_t mode) {
  std::size_t bytes = 0;
  if (const int error = inject("open", bytes); error != 0) {
    errno = error;
    return -1;
  }
  return IoSyscalls::open(path, flags, mode);
}

int FaultLayer::close(int fd) {
  std::size_t bytes = 0;
  const int error = inject("close", bytes);
  const int result = IoSyscalls::close(fd);
  errno = error != 0 ? error : errno;
  return error != 0 ? -1 : result;
}

ssize_t FaultLayer::pread(int fd, void* data, std::size_t bytes, off_t offset) {
  const bool refused = refuses(data) && (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
  if (const int error = refused ? EINVAL : inject("read", bytes); error != 0) {
    errno = error;
    return -1;
  }
  return IoSyscalls::pread(fd, data, bytes, offset);
}

ssize_t FaultLayer::pwrite(int fd, const void* data, std::size_t bytes, off_t offset) {
  const bool refused = refuses(data) && (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
  if (const int error = refused ? EINVAL : inject("write", bytes); error != 0) {
    errno = error;
    return -1;
  }
  return IoSyscalls::pwrite(fd, data, bytes, offset);
}

int FaultLayer::fdatasync(int fd) {
  std::size_t bytes = 0;
  if (const int error = inject("flush", bytes); error != 0) {
    errno = error;
    return -1;
  }
  return IoSyscalls::fdatasync(fd);
}

int FaultLayer::prepare(AioCommand& command) {
  std::size_t bytes = command.bytes;
  if (refuses(command.data)) {
    return -EINVAL;
  }
  const int error = inject(command.write ? "write" : "read", bytes);
  command.bytes = static_cast<std::uint32_t>(bytes);
  return -error;
}

std::thread FaultLayer::start_thread(std::function<void()> body) {
  std::size_t bytes = 0;
  if (const int error = inject("thread", bytes); error != 0) {
    throw std::system_error(error, std::generic_category());
  }
  return IoSyscalls::start_thread(std::move(body));
}

}  // namespace memascend

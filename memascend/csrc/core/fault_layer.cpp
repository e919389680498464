#include "fault_layer.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "errors.h"

namespace memascend {

void FaultLayer::add(Fault fault) {
  if (fault.op != "read" && fault.op != "write" && fault.op != "flush" && fault.op != "any") {
    throw Error(ErrorKind::kInvalidArgument, "fault layer: op '" + fault.op + "': use read, write, flush or any");
  }
  std::lock_guard<std::mutex> guard(mutex_);
  faults_.push_back(std::move(fault));
}

void FaultLayer::clear() {
  std::lock_guard<std::mutex> guard(mutex_);
  faults_.clear();
}

int FaultLayer::suffer(const char* op, std::size_t& bytes) {
  Fault chosen;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (Fault& fault : faults_) {
      if ((fault.op != "any" && fault.op != op) || fault.times == 0 || fault.after-- > 0) {
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

ssize_t FaultLayer::pread(int fd, void* data, std::size_t bytes, off_t offset) {
  if (const int error = suffer("read", bytes); error != 0) {
    errno = error;
    return -1;
  }
  return IoSyscalls::pread(fd, data, bytes, offset);
}

ssize_t FaultLayer::pwrite(int fd, const void* data, std::size_t bytes, off_t offset) {
  if (const int error = suffer("write", bytes); error != 0) {
    errno = error;
    return -1;
  }
  return IoSyscalls::pwrite(fd, data, bytes, offset);
}

int FaultLayer::fdatasync(int fd) {
  std::size_t bytes = 0;
  if (const int error = suffer("flush", bytes); error != 0) {
    errno = error;
    return -1;
  }
  return IoSyscalls::fdatasync(fd);
}

int FaultLayer::prepare(AioCommand& command) {
  std::size_t bytes = command.bytes;
  const int error = suffer(command.write ? "write" : "read", bytes);
  command.bytes = static_cast<std::uint32_t>(bytes);
  return -error;
}

}  // namespace memascend

#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "aio.h"
#include "errors.h"

namespace memascend {
namespace {

constexpr std::uint64_t kWakeToken = ~std::uint64_t{0};

class Libaio final : public AioBackend {
 public:
  Libaio(int depth, const std::vector<int>& files, IoSyscalls& calls)
      : calls_(calls), files_(files), commands_(static_cast<std::size_t>(depth)) {
    for (iocb& slot : commands_) {
      free_.push_back(&slot);
    }
    if (call(__NR_io_setup, depth + 1, address(&context_)) != 0) {
      throw Error(ErrorKind::kState, std::string("libaio: the kernel refuses a context of depth ") +
                                         std::to_string(depth) + ": " + std::strerror(errno) +
                                         ": lower the depth or raise fs.aio-max-nr (sysctl)");
    }
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    arm_wake();
  }

  ~Libaio() override {
    call(__NR_io_destroy, static_cast<long>(context_));
    if (wake_fd_ >= 0) {
      ::close(wake_fd_);
    }
  }

  void queue(const AioCommand& command) override {
    AioCommand prepared = command;
    if (const int error = calls_.prepare(prepared); error != 0) {
      ready_.push_back({command.token, error});
      return;
    }
    iocb& slot = *free_.back();
    free_.pop_back();
    slot = {};
    slot.aio_data = prepared.token;
    slot.aio_lio_opcode = prepared.write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    slot.aio_fildes = static_cast<std::uint32_t>(files_[static_cast<std::size_t>(prepared.file)]);
    slot.aio_buf = reinterpret_cast<std::uint64_t>(prepared.data);
    slot.aio_nbytes = prepared.bytes;
    slot.aio_offset = prepared.offset;
    waiting_.push_back(&slot);
  }

  int run(AioEvent* events, int capacity, bool block) override {
    submit();
    int count = 0;
    for (; count < capacity && !ready_.empty(); ++count) {
      events[count] = ready_.front();
      ready_.pop_front();
    }
    if (count == capacity) {
      return count;
    }
    kernel_events_.resize(static_cast<std::size_t>(capacity - count));
    // If the kernel has not accepted the wake-up poll or all commands, look again every millisecond.
    timespec brief{0, block && count == 0 ? 1'000'000 : 0};
    const bool forever = block && count == 0 && wake_armed_ && waiting_.empty();
    const long found = call(__NR_io_getevents, static_cast<long>(context_), block && count == 0 ? 1 : 0,
                            capacity - count, address(kernel_events_.data()), forever ? 0 : address(&brief));
    for (long at = 0; at < found; ++at) {
      take(kernel_events_[static_cast<std::size_t>(at)], events, count);
    }
    return count;
  }

  void wake() noexcept override {
    const std::uint64_t one = 1;
    (void)!::write(wake_fd_, &one, sizeof(one));
  }

  bool register_buffer(int, void*, std::size_t) override { return false; }
  void unregister_buffer(int) override {}

 private:
  static long address(const void* pointer) { return static_cast<long>(reinterpret_cast<std::uintptr_t>(pointer)); }
  long call(long number, long a, long b = 0, long c = 0, long d = 0, long e = 0) {
    return calls_.raw(number, a, b, c, d, e, 0);
  }

  void submit() {
    while (!waiting_.empty()) {
      batch_.assign(waiting_.begin(), waiting_.end());
      const long taken =
          call(__NR_io_submit, static_cast<long>(context_), static_cast<long>(batch_.size()), address(batch_.data()));
      if (taken > 0) {  // the kernel may accept only some of them
        waiting_.erase(waiting_.begin(), waiting_.begin() + taken);
      } else if (taken < 0 && errno != EAGAIN && errno != EINTR) {  // the error concerns the first one
        ready_.push_back({waiting_.front()->aio_data, -errno});
        free_.push_back(waiting_.front());
        waiting_.pop_front();
      } else {
        return;  // the kernel's queue is full: try again after the next completions
      }
    }
  }

  void take(const io_event& done, AioEvent* events, int& count) {
    if (done.data == kWakeToken) {
      std::uint64_t value = 0;
      (void)!::read(wake_fd_, &value, sizeof(value));
      arm_wake();
      return;
    }
    free_.push_back(reinterpret_cast<iocb*>(done.obj));
    events[count++] = {done.data, calls_.complete(done.data, static_cast<int>(done.res))};
  }

  void arm_wake() {
    wake_command_ = {};
    wake_command_.aio_data = kWakeToken;
    wake_command_.aio_lio_opcode = IOCB_CMD_POLL;
    wake_command_.aio_fildes = static_cast<std::uint32_t>(wake_fd_);
    wake_command_.aio_buf = POLLIN;
    iocb* one = &wake_command_;
    wake_armed_ = wake_fd_ >= 0 && call(__NR_io_submit, static_cast<long>(context_), 1, address(&one)) == 1;
  }

  IoSyscalls& calls_;
  const std::vector<int> files_;
  std::vector<iocb> commands_;
  std::vector<iocb*> free_;
  std::deque<iocb*> waiting_;
  std::vector<iocb*> batch_;
  std::vector<io_event> kernel_events_;
  std::deque<AioEvent> ready_;
  iocb wake_command_{};
  aio_context_t context_ = 0;
  int wake_fd_ = -1;
  bool wake_armed_ = false;
};

}  // namespace

std::unique_ptr<AioBackend> make_libaio(int depth, const std::vector<int>& files, IoSyscalls& calls) {
  return std::make_unique<Libaio>(depth, files, calls);
}

}  // namespace memascend

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "aio.h"
#include "errors.h"

namespace memascend {
namespace {

constexpr std::uint64_t kWakeToken = ~std::uint64_t{0};

// The running kernel may be newer than the header; these numbers are stable.
constexpr unsigned kCoopTaskrun = 1u << 8;
constexpr unsigned kTaskrunFlag = 1u << 9;
constexpr unsigned kSqTaskrun = 1u << 2;  // of the ring's flags
constexpr unsigned kSingleIssuer = 1u << 12;
constexpr unsigned kDeferTaskrun = 1u << 13;

class Mapping {
 public:
  void map(int fd, std::size_t bytes, std::uint64_t offset) {
    void* data =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
    if (data == MAP_FAILED) {
      throw Error(ErrorKind::kState, std::string("io_uring: mapping the ring failed: ") + std::strerror(errno) +
                                         ": raise the memory limit (ulimit -l), or choose libaio");
    }
    data_ = data;
    bytes_ = bytes;
  }
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (data_ != nullptr) {
      munmap(data_, bytes_);
    }
  }
  template <typename T>
  [[nodiscard]] T* at(std::uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + offset);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class Descriptor {
 public:
  Descriptor() = default;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) {
      ::close(fd);
    }
  }
  int fd = -1;
};

class Uring final : public AioBackend {
 public:
  Uring(int depth, const std::vector<int>& files, IoSyscalls& calls) : calls_(calls), files_(files) {
    setup(static_cast<unsigned>(depth) + 1);
    wake_.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_.fd < 0) {
      throw Error(ErrorKind::kState, std::string("io_uring: eventfd failed: ") + std::strerror(errno));
    }
    register_files();
    register_sparse_buffers();
    arm_wake();
  }

  void queue(const AioCommand& command) override {
    AioCommand prepared = command;
    if (const int error = calls_.prepare(prepared); error != 0) {
      ready_.push_back({command.token, error});
      return;
    }
    io_uring_sqe& entry = next_entry();
    const bool fixed = prepared.buffer >= 0;
    entry.opcode = static_cast<std::uint8_t>(prepared.write ? (fixed ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE)
                                                            : (fixed ? IORING_OP_READ_FIXED : IORING_OP_READ));
    entry.fd = files_registered_ ? prepared.file : files_[static_cast<std::size_t>(prepared.file)];
    entry.flags = files_registered_ ? static_cast<std::uint8_t>(IOSQE_FIXED_FILE) : std::uint8_t{0};
    entry.addr = reinterpret_cast<std::uint64_t>(prepared.data);
    entry.len = prepared.bytes;
    entry.off = static_cast<std::uint64_t>(prepared.offset);
    entry.buf_index = fixed ? static_cast<std::uint16_t>(prepared.buffer) : std::uint16_t{0};
    entry.user_data = prepared.token;
    publish();
  }

  int run(AioEvent* events, int capacity, bool block) override {
    int count = take_ready(events, capacity);
    count += take_completions(events + count, capacity - count);
    const unsigned waiting = queued();
    const bool wait = block && count == 0;
    if (waiting == 0 && !wait && !kernel_has_more()) {
      return count;
    }
    const long taken = calls_.raw(__NR_io_uring_enter, ring_.fd, waiting, wait ? 1 : 0, IORING_ENTER_GETEVENTS, 0, 0);
    if (taken < 0 && errno != EINTR && errno != EAGAIN && errno != EBUSY && errno != ENOMEM && errno != EBADR) {
      fail_queued(-errno);
    }
    count += take_ready(events + count, capacity - count);
    return count + take_completions(events + count, capacity - count);
  }

  void wake() noexcept override {
    const std::uint64_t one = 1;
    (void)!::write(wake_.fd, &one, sizeof(one));
  }

  bool register_buffer(int index, void* data, std::size_t bytes) override {
    if (!buffers_registered_ || index < 0 || index >= kBuffers || bytes > kBufferBytes) {
      return false;
    }
    return update_buffer(index, data, bytes);
  }

  void unregister_buffer(int index) override {
    const std::uint32_t head = std::atomic_ref<std::uint32_t>(*sq_head_).load(std::memory_order_acquire);
    for (std::uint32_t at = head; at != *sq_tail_; ++at) {
      io_uring_sqe& entry = sqes_[at & sq_mask_];
      if (entry.buf_index == index && entry.opcode == IORING_OP_WRITE_FIXED) {
        entry.opcode = IORING_OP_WRITE;
      } else if (entry.buf_index == index && entry.opcode == IORING_OP_READ_FIXED) {
        entry.opcode = IORING_OP_READ;
      }
    }
    (void)update_buffer(index, nullptr, 0);
  }

 private:
  static long address(const void* pointer) { return static_cast<long>(reinterpret_cast<std::uintptr_t>(pointer)); }

  bool update_buffer(int index, void* data, std::size_t bytes) {
    iovec vector{data, bytes};
    io_uring_rsrc_update2 update{};
    update.offset = static_cast<std::uint32_t>(index);
    update.data = reinterpret_cast<std::uint64_t>(&vector);
    update.nr = 1;
    return calls_.raw(__NR_io_uring_register, ring_.fd, IORING_REGISTER_BUFFERS_UPDATE, address(&update),
                      sizeof(update), 0, 0) == 1;
  }

  void setup(unsigned entries) {
    io_uring_params params{};
    // From the best flags to none, which every kernel with io_uring accepts.
    for (const unsigned flags : {kSingleIssuer | kDeferTaskrun | kTaskrunFlag,
                                 kSingleIssuer | kCoopTaskrun | kTaskrunFlag, kCoopTaskrun | kTaskrunFlag, 0u}) {
      params = {};
      params.flags = flags | IORING_SETUP_CLAMP;
      ring_.fd = static_cast<int>(calls_.raw(__NR_io_uring_setup, entries, address(&params), 0, 0, 0, 0));
      if (ring_.fd >= 0 || errno != EINVAL) {
        break;
      }
    }
    if (ring_.fd < 0) {
      throw Error(
          ErrorKind::kState,
          std::string("io_uring: the kernel refuses a ring: ") + std::strerror(errno) +
              (errno == ENOMEM ? ": raise the memory limit (ulimit -l), or choose libaio"
                               : ": set kernel.io_uring_disabled=0 and allow io_uring_setup, or choose libaio"));
    }
    if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0 || params.sq_entries < entries) {
      throw Error(ErrorKind::kState, "io_uring: the kernel is older than 5.4 or the depth too large: choose libaio");
    }
    map_rings(params);
  }

  void map_rings(const io_uring_params& params) {
    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(std::uint32_t);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    rings_.map(ring_.fd, std::max(sq_bytes, cq_bytes), IORING_OFF_SQ_RING);
    entries_.map(ring_.fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES);
    sq_head_ = rings_.at<std::uint32_t>(params.sq_off.head);
    sq_tail_ = rings_.at<std::uint32_t>(params.sq_off.tail);
    sq_flags_ = rings_.at<std::uint32_t>(params.sq_off.flags);
    sq_mask_ = *rings_.at<std::uint32_t>(params.sq_off.ring_mask);
    cq_head_ = rings_.at<std::uint32_t>(params.cq_off.head);
    cq_tail_ = rings_.at<std::uint32_t>(params.cq_off.tail);
    cq_mask_ = *rings_.at<std::uint32_t>(params.cq_off.ring_mask);
    cqes_ = rings_.at<io_uring_cqe>(params.cq_off.cqes);
    sqes_ = entries_.at<io_uring_sqe>(0);
    auto* array = rings_.at<std::uint32_t>(params.sq_off.array);
    for (std::uint32_t index = 0; index < params.sq_entries; ++index) {
      array[index] = index;
    }
  }

  void register_files() {
    if (files_.empty()) {
      return;
    }
    files_registered_ = calls_.raw(__NR_io_uring_register, ring_.fd, IORING_REGISTER_FILES, address(files_.data()),
                                   static_cast<long>(files_.size()), 0, 0) == 0;
  }

  void register_sparse_buffers() {
    io_uring_rsrc_register table{};
    table.nr = kBuffers;
    table.flags = IORING_RSRC_REGISTER_SPARSE;
    buffers_registered_ = calls_.raw(__NR_io_uring_register, ring_.fd, IORING_REGISTER_BUFFERS2, address(&table),
                                     sizeof(table), 0, 0) == 0;
  }

  void arm_wake() {
    io_uring_sqe& entry = next_entry();
    entry.opcode = IORING_OP_POLL_ADD;
    entry.fd = wake_.fd;
    entry.poll32_events = POLLIN;
    entry.user_data = kWakeToken;
    publish();
  }

  io_uring_sqe& next_entry() {
    io_uring_sqe& entry = sqes_[*sq_tail_ & sq_mask_];
    std::memset(&entry, 0, sizeof(entry));
    return entry;
  }
  void publish() { std::atomic_ref<std::uint32_t>(*sq_tail_).store(*sq_tail_ + 1, std::memory_order_release); }
  [[nodiscard]] unsigned queued() const {
    return *sq_tail_ - std::atomic_ref<std::uint32_t>(*sq_head_).load(std::memory_order_acquire);
  }
  // Whether the kernel has completions that it only delivers when entered: the queue was full, or their task work was
  // deferred to this thread.
  [[nodiscard]] bool kernel_has_more() const {
    const std::uint32_t flags = std::atomic_ref<std::uint32_t>(*sq_flags_).load(std::memory_order_relaxed);
    return (flags & (IORING_SQ_CQ_OVERFLOW | kSqTaskrun)) != 0;
  }

  // Fails the queued commands. The kernel has not looked at them yet, so they can be taken back. If the wake-up poll is
  // among them, it is queued again, since a blocked `run` would otherwise miss `wake`.
  void fail_queued(int error) {
    const std::uint32_t head = std::atomic_ref<std::uint32_t>(*sq_head_).load(std::memory_order_acquire);
    bool wake_queued = false;
    for (std::uint32_t at = head; at != *sq_tail_; ++at) {
      const std::uint64_t token = sqes_[at & sq_mask_].user_data;
      if (token == kWakeToken) {
        wake_queued = true;
      } else {
        ready_.push_back({token, error});
      }
    }
    std::atomic_ref<std::uint32_t>(*sq_tail_).store(head, std::memory_order_release);
    if (wake_queued) {
      arm_wake();
    }
  }

  int take_ready(AioEvent* events, int capacity) {
    int count = 0;
    for (; count < capacity && !ready_.empty(); ++count) {
      events[count] = ready_.front();
      ready_.pop_front();
    }
    return count;
  }

  int take_completions(AioEvent* events, int capacity) {
    int count = 0;
    bool woken = false;
    std::uint32_t head = *cq_head_;
    const std::uint32_t tail = std::atomic_ref<std::uint32_t>(*cq_tail_).load(std::memory_order_acquire);
    for (; head != tail && count < capacity; ++head) {
      const io_uring_cqe& done = cqes_[head & cq_mask_];
      if (done.user_data == kWakeToken) {
        woken = true;
        continue;
      }
      events[count++] = {done.user_data, calls_.complete(done.user_data, done.res)};
    }
    std::atomic_ref<std::uint32_t>(*cq_head_).store(head, std::memory_order_release);
    if (woken) {
      std::uint64_t value = 0;
      (void)!::read(wake_.fd, &value, sizeof(value));
      arm_wake();
    }
    return count;
  }

  IoSyscalls& calls_;
  const std::vector<int> files_;
  Descriptor wake_;
  Descriptor ring_;
  Mapping rings_;
  Mapping entries_;
  std::uint32_t* sq_head_ = nullptr;
  std::uint32_t* sq_tail_ = nullptr;
  std::uint32_t* sq_flags_ = nullptr;
  std::uint32_t sq_mask_ = 0;
  std::uint32_t* cq_head_ = nullptr;
  std::uint32_t* cq_tail_ = nullptr;
  std::uint32_t cq_mask_ = 0;
  io_uring_cqe* cqes_ = nullptr;
  io_uring_sqe* sqes_ = nullptr;
  bool files_registered_ = false;
  bool buffers_registered_ = false;
  std::deque<AioEvent> ready_;
};

}  // namespace

std::unique_ptr<AioBackend> make_uring(int depth, const std::vector<int>& files, IoSyscalls& calls) {
  return std::make_unique<Uring>(depth, files, calls);
}

}  // namespace memascend

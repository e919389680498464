// The file of a Control: making and attaching it, its locks, and which processes are alive.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "control.h"
#include "control_layout.h"
#include "device.h"

namespace memascend {

Control::Control(const std::string& path, const std::array<std::uint8_t, 16>& uuid, std::int64_t chunk_bytes,
                 std::vector<MemberSpace> members)
    : chunk_bytes_(chunk_bytes), members_(std::move(members)), path_(path), owner_pid_(getpid()) {
  bytes_ = sector_up(static_cast<std::int64_t>(sizeof(Header) + kMaxReservations * sizeof(Slot)));
  for (const MemberSpace& member : members_) {
    bitmap_offsets_.push_back(bytes_);
    bytes_ += sector_up((member.chunks + 63) / 64 * 8);
  }
  try {
    attach(path, uuid);
  } catch (...) {
    if (data_ != nullptr) {
      munmap(data_, static_cast<std::size_t>(mapped_));
    }
    if (fd_ >= 0) {
      if (alone_) {  // no other process uses the file, or can attach to it while we hold the locks
        ::unlink(path.c_str());
      }
      ::close(fd_);
    }
    throw;
  }
}

void Control::attach(const std::string& path, const std::array<std::uint8_t, 16>& uuid) {
  open_file(path);
  alone_ = set_lock(fd_, F_OFD_SETLK, F_WRLCK, kPresence) == 0;
  if (!alone_ && set_lock(fd_, F_OFD_SETLK, F_RDLCK, kPresence) != 0) {
    throw StorageFailure("share", path, 0, 0, 0, errno, "another process repairs or destroys this store");
  }
  struct stat status{};
  // The contents that a killed process left are discarded, not overwritten with zeros: pages that are not touched do
  // not count towards our resident memory.
  if ((alone_ && (ftruncate(fd_, 0) != 0 || ftruncate(fd_, bytes_) != 0)) || fstat(fd_, &status) != 0) {
    throw StorageFailure("share", path, 0, bytes_, 0, errno, std::strerror(errno));
  }
  if (status.st_size != bytes_) {
    throw StorageFailure("share", path, 0, bytes_, status.st_size, 0, "made by another version of memascend");
  }
  if (alone_) {  // allocated now: a full /dev/shm is an error here, not a SIGBUS later
    if (const int error = allocate(fd_, bytes_); error != 0 && error != EOPNOTSUPP) {
      throw StorageFailure("share", path, 0, bytes_, 0, error, std::strerror(error));
    }
  }
  mapped_ = bytes_ + (members_.size() == 1 ? kGrowthBytes : 0);
  void* data = mmap(nullptr, static_cast<std::size_t>(mapped_), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (data == MAP_FAILED) {
    throw StorageFailure("share", path, 0, bytes_, 0, errno, std::strerror(errno));
  }
  data_ = data;
  if (alone_) {
    initialise(uuid);
  } else if (header().magic != kMagic || header().version != kVersion || header().uuid != uuid) {
    throw StorageFailure("share", path, 0, 0, 0, 0, "made by another version of memascend, or for another store");
  }
  take_process_slot();
}

// The last user may remove the file between our open and our lock; we then make it again.
void Control::open_file(const std::string& path) {
  while (true) {
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd_ < 0 || set_lock(fd_, F_OFD_SETLKW, F_WRLCK, kOpening) != 0) {
      throw StorageFailure("share", path, 0, 0, 0, errno, std::strerror(errno));
    }
    struct stat status{};
    if (fstat(fd_, &status) == 0 && status.st_nlink > 0) {
      return;
    }
    ::close(std::exchange(fd_, -1));
  }
}

void Control::initialise(const std::array<std::uint8_t, 16>& uuid) {
  Header& head = header();  // the file is new: zeros
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&head.mutex, &kind);
  pthread_mutexattr_destroy(&kind);
  head.version = kVersion;
  head.members = static_cast<std::uint32_t>(members_.size());
  head.uuid = uuid;
  head.chunk_bytes = chunk_bytes_;
  head.generation = 1;
}

void Control::take_process_slot() {
  for (int slot = 0; slot < kMaxProcesses; ++slot) {
    if (set_lock(fd_, F_OFD_SETLK, F_WRLCK, kFirstProcess + slot) == 0) {
      process_ = slot;
      return;
    }
  }
  throw StorageFailure("share", path_, 0, kMaxProcesses, kMaxProcesses, EUSERS, "too many processes on one store");
}

void Control::opened() {
  if (alone_) {
    header().magic = kMagic;
    (void)set_lock(fd_, F_OFD_SETLK, F_RDLCK, kPresence);
  }
  (void)set_lock(fd_, F_OFD_SETLK, F_UNLCK, kOpening);
}

Control::~Control() {
  // The last process removes the file. A killed process leaves it behind, and the next user starts it afresh. Locks are
  // released explicitly: while the kernel tears down a ring, it may keep the descriptor open a little longer, although
  // all transfers have ended.
  if (getpid() == owner_pid_) {
    if (set_lock(fd_, F_OFD_SETLKW, F_WRLCK, kOpening) == 0 && set_lock(fd_, F_OFD_SETLK, F_WRLCK, kPresence) == 0) {
      ::unlink(path_.c_str());
    }
    for (const off_t byte : {kFirstProcess + process_, kPresence, kOpening}) {
      (void)set_lock(fd_, F_OFD_SETLK, F_UNLCK, byte);
    }
  }
  munmap(data_, static_cast<std::size_t>(mapped_));
  ::close(fd_);
}

bool Control::lock() {
  if (getpid() != owner_pid_) {
    throw Error(ErrorKind::kState,
                "store: opened before the fork, its locks are the parent's: open it in each process");
  }
  const int result = pthread_mutex_lock(&header().mutex);
  if (result == EOWNERDEAD) {
    pthread_mutex_consistent(&header().mutex);
    return true;
  }
  if (result != 0) {
    throw StorageFailure("lock", path_, 0, 0, 0, result, std::strerror(result));
  }
  return false;
}
void Control::unlock() { pthread_mutex_unlock(&header().mutex); }

Control::LogState Control::log() const {
  const Header& head = header();
  return {head.epoch, head.sequence, head.tail, head.superblock, head.half};
}
void Control::set_log(const LogState& state) {
  Header& head = header();
  head.epoch = state.epoch;
  head.tail = state.tail;
  head.superblock = state.superblock;
  head.half = state.half;
  std::atomic_ref<std::uint64_t>(head.sequence).store(state.sequence, std::memory_order_release);
}
bool Control::broken() const { return header().broken != 0; }
void Control::set_broken(bool value) { header().broken = value ? 1 : 0; }

std::uint64_t Control::sequence() const noexcept {
  return std::atomic_ref<std::uint64_t>(header().sequence).load(std::memory_order_acquire);
}
std::uint64_t Control::next_generation() noexcept {
  return std::atomic_ref<std::uint64_t>(header().generation).fetch_add(1);
}
void Control::generations_from(std::uint64_t first) noexcept {
  std::atomic_ref<std::uint64_t> current(header().generation);
  std::uint64_t seen = current.load();
  while (seen < first && !current.compare_exchange_weak(seen, first)) {
  }
}

Control::Slot* Control::slots() const noexcept {
  return reinterpret_cast<Slot*>(static_cast<char*>(data_) + sizeof(Header));
}
std::uint64_t* Control::bitmap(std::uint32_t member) const noexcept {
  return reinterpret_cast<std::uint64_t*>(static_cast<char*>(data_) + bitmap_offsets_[member]);
}

bool Control::is_live(int process) const {
  if (process == process_) {
    return true;
  }
  struct flock range{};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = kFirstProcess + process;
  range.l_len = 1;
  return fcntl(fd_, F_OFD_GETLK, &range) != 0 || range.l_type != F_UNLCK;
}

int Control::processes() const {
  int count = 0;
  for (int process = 0; process < kMaxProcesses; ++process) {
    count += is_live(process) ? 1 : 0;
  }
  return count;
}

}  // namespace memascend

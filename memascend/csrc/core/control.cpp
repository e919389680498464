#include "control.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include "device.h"

namespace memascend {
namespace {

constexpr std::uint64_t kMagic = 0x6d656d61736374ULL;
constexpr std::uint32_t kVersion = 2;
// Bytes of the file that carry locks.
constexpr off_t kOpening = 0;
constexpr off_t kPresence = 1;
constexpr off_t kFirstProcess = 100;
constexpr std::int64_t kGrowthBytes = 64 << 20;  // of addresses, kept for a longer bitmap: 2 TiB in chunks of 4096

int set_lock(int fd, int command, short type, off_t byte) {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = byte;
  range.l_len = 1;
  int result = 0;
  do {
    result = fcntl(fd, command, &range);
  } while (result != 0 && errno == EINTR);
  return result;
}

// posix_fallocate, repeated where a signal cut it off; its error.
int allocate(int fd, std::int64_t bytes) {
  int error = 0;
  do {
    error = posix_fallocate(fd, 0, bytes);
  } while (error == EINTR);
  return error;
}

}  // namespace

struct Control::Header {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t members;
  std::array<std::uint8_t, 16> uuid;
  std::int64_t chunk_bytes;
  pthread_mutex_t mutex;
  std::uint32_t broken;
  std::uint32_t half;
  std::uint64_t epoch;
  std::uint64_t sequence;  // also read without the lock
  std::uint64_t tail;
  std::uint64_t superblock;
  std::uint64_t generation;  // atomic
  std::int64_t used[kMaxMembers];
  std::int64_t hint[kMaxMembers];
  std::int64_t slot_hint;
};

struct Control::Slot {
  std::int64_t first;
  std::uint32_t chunks;
  std::uint16_t member;
  std::uint8_t process;
  std::uint8_t active;
};
static_assert(kMaxMembers < 65536 && kMaxProcesses < 256);

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
      if (alone_) {  // nobody else has it, or can get it while we hold the locks
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
  // What a killed process left is given up, not overwritten: pages that nobody touches stay out of our resident memory.
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

// The file may be removed by the last user between our open and our lock: then it is made again.
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
  // The last one removes the file. A killed process leaves it; the next user starts it anew. Locks are given back by
  // word: a ring that is being taken down may hold the descriptor a little longer, though all transfers have ended.
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

// Returns how many of the chunks were in the other state before.
std::int64_t Control::mark(std::uint32_t member, std::int64_t first, std::int64_t count, bool used) {
  std::uint64_t* words = bitmap(member);
  std::int64_t changed = 0;
  while (count > 0) {
    const std::int64_t bit = first % 64;
    const std::int64_t here = std::min<std::int64_t>(count, 64 - bit);
    const std::uint64_t mask = (here == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << here) - 1) << bit;
    std::uint64_t& word = words[first / 64];
    changed += __builtin_popcountll((used ? ~word : word) & mask);
    word = used ? word | mask : word & ~mask;
    first += here;
    count -= here;
  }
  header().used[member] += used ? changed : -changed;
  return changed;
}

std::int64_t Control::max_chunks() const noexcept { return (mapped_ - bitmap_offsets_.back()) * 8; }

void Control::grow(std::int64_t chunks) {
  const std::int64_t bytes = bitmap_offsets_.back() + sector_up((chunks + 63) / 64 * 8);
  if (const int error = allocate(fd_, bytes); error != 0) {
    throw StorageFailure("share", path_, 0, bytes, bytes_, error, std::strerror(error));
  }
  bytes_ = bytes;
  members_.back().chunks = chunks;
}

Control::Overlap Control::rebuild(const std::vector<Extent>& used) {
  Header& head = header();
  Overlap overlap;
  for (std::uint32_t member = 0; member < members_.size(); ++member) {
    std::memset(bitmap(member), 0, static_cast<std::size_t>((members_[member].chunks + 63) / 64 * 8));
    head.used[member] = 0;
  }
  for (const Extent& extent : used) {
    const std::int64_t chunks = chunk_count(extent.bytes);
    const std::int64_t first = (extent.offset - members_[extent.member].first_byte) / chunk_bytes_;
    if (mark(extent.member, first, chunks, true) != chunks && !overlap.found) {
      overlap = {true, extent};
    }
  }
  if (head.magic != kMagic) {  // not opened yet: nobody has reserved anything, and the table need not be looked at
    return overlap;
  }
  (void)drop_dead_reservations();
  for (int index = 0; index < kMaxReservations; ++index) {
    const Slot& slot = slots()[index];
    if (slot.active != 0) {  // may have entered the index already: then it is marked twice
      (void)mark(slot.member, slot.first, slot.chunks, true);
    }
  }
  return overlap;
}

int Control::drop_dead_reservations() {
  std::array<int, kMaxProcesses> live{};  // 0 unknown, 1 live, 2 dead
  int dropped = 0;
  for (int index = 0; index < kMaxReservations; ++index) {
    Slot& slot = slots()[index];
    if (slot.active == 0) {
      continue;
    }
    int& state = live[slot.process % kMaxProcesses];
    state = state != 0 ? state : (is_live(static_cast<int>(slot.process)) ? 1 : 2);
    if (state == 2) {
      slot.active = 0;
      (void)mark(slot.member, slot.first, slot.chunks, false);
      ++dropped;
    }
  }
  return dropped;
}

void Control::drop_own_reservations() {
  for (int index = 0; index < kMaxReservations; ++index) {
    Slot& slot = slots()[index];
    if (slot.active != 0 && slot.process == process_) {
      slot.active = 0;
      (void)mark(slot.member, slot.first, slot.chunks, false);
    }
  }
}

std::int64_t Control::free_bytes(std::uint32_t member) const {
  return (members_[member].chunks - header().used[member]) * chunk_bytes_;
}
std::int64_t Control::free_bytes() const {
  std::int64_t sum = 0;
  for (std::uint32_t member = 0; member < members_.size(); ++member) {
    sum += free_bytes(member);
  }
  return sum;
}
std::int64_t Control::reserved_bytes() const {
  std::int64_t sum = 0;
  for (int index = 0; index < kMaxReservations; ++index) {
    sum += slots()[index].active != 0 ? static_cast<std::int64_t>(slots()[index].chunks) * chunk_bytes_ : 0;
  }
  return sum;
}

int Control::free_slot() {
  std::int64_t& hint = header().slot_hint;
  for (int tried = 0; tried < kMaxReservations; ++tried, hint = (hint + 1) % kMaxReservations) {
    if (slots()[hint].active == 0) {
      return static_cast<int>(hint);
    }
  }
  return -1;
}

// One run of free chunks after the last allocation if there is one, else the pieces that there are.
std::vector<std::pair<std::int64_t, std::int64_t>> Control::find_runs(std::uint32_t member, std::int64_t want) {
  const std::uint64_t* words = bitmap(member);
  const std::int64_t chunks = members_[member].chunks;
  std::int64_t& hint = header().hint[member];
  std::vector<std::pair<std::int64_t, std::int64_t>> pieces;
  std::int64_t gathered = 0;
  const auto walk = [&](std::int64_t from, std::int64_t to) {
    std::int64_t run = 0;
    for (std::int64_t at = from; at <= to; ++at) {
      if (at < to && at % 64 == 0 && run == 0 && words[at / 64] == ~std::uint64_t{0} && at + 64 <= to) {
        at += 63;
        continue;
      }
      const bool is_free = at < to && ((words[at / 64] >> (at % 64)) & 1) == 0;
      run += is_free ? 1 : 0;
      if (is_free && run < want) {
        continue;
      }
      if (run >= want) {
        pieces.assign(1, {at + 1 - run, want});
        return true;
      }
      if (run > 0 && gathered < want) {
        const std::int64_t take = std::min(run, want - gathered);
        pieces.emplace_back(at - run, take);
        gathered += take;
      }
      run = 0;
    }
    return false;
  };
  if (walk(hint, chunks) || walk(0, hint) || gathered == want) {
    hint = (pieces.back().first + pieces.back().second) % chunks;
    return pieces;
  }
  return {};
}

// Chunks a member: by weight, where it has the space; the rest wherever there is some.
std::vector<std::int64_t> Control::shares(std::int64_t chunks, bool striped) const {
  const auto count = static_cast<std::uint32_t>(members_.size());
  std::vector<std::int64_t> out(count, 0);
  std::vector<std::int64_t> room(count);
  std::int64_t weights = 0;
  std::uint32_t emptiest = 0;
  for (std::uint32_t member = 0; member < count; ++member) {
    room[member] = free_bytes(member) / chunk_bytes_;
    weights += members_[member].weight;
    const std::int64_t* used = header().used;
    emptiest = used[member] * members_[emptiest].weight < used[emptiest] * members_[member].weight ? member : emptiest;
  }
  std::int64_t left = chunks;
  for (std::uint32_t member = 0; member < count; ++member) {
    const std::int64_t share = striped ? chunks * members_[member].weight / weights : (member == emptiest ? chunks : 0);
    out[member] = std::min({share, room[member], left});
    left -= out[member];
  }
  for (std::uint32_t member = 0; member < count && left > 0; ++member) {
    const std::int64_t more = std::min(left, room[member] - out[member]);
    out[member] += more;
    left -= more;
  }
  return left == 0 ? out : std::vector<std::int64_t>{};
}

Reservation Control::reserve(std::int64_t bytes, std::int64_t stripe_bytes) {
  Reservation out;
  if (bytes == 0) {
    return out;
  }
  const std::vector<std::int64_t> wanted = shares(chunk_count(bytes), bytes >= stripe_bytes);
  std::int64_t left = bytes;
  for (std::uint32_t member = 0; member < wanted.size(); ++member) {
    if (wanted[member] == 0) {
      continue;
    }
    for (const auto& [first, count] : find_runs(member, wanted[member])) {
      const int index = free_slot();
      if (index < 0) {
        release(out);
        return {};
      }
      slots()[index] = {first, static_cast<std::uint32_t>(count), static_cast<std::uint16_t>(member),
                        static_cast<std::uint8_t>(process_), 0};
      std::atomic_ref<std::uint8_t>(slots()[index].active).store(1, std::memory_order_release);
      (void)mark(member, first, count, true);
      const std::int64_t here = std::min(left, count * chunk_bytes_);
      out.extents.push_back({member, members_[member].first_byte + first * chunk_bytes_, here});
      out.slots.push_back(static_cast<std::uint32_t>(index));
      left -= here;
    }
  }
  if (left > 0) {
    release(out);
    return {};
  }
  return out;
}

Reservation Control::exchange(const Reservation& old, std::int64_t bytes, std::int64_t stripe_bytes) {
  std::vector<Slot> before;
  before.reserve(old.slots.size());
  for (const std::uint32_t index : old.slots) {
    before.push_back(slots()[index]);
  }
  release(old);
  Reservation out = reserve(bytes, stripe_bytes);
  if (out.extents.empty() && bytes > 0) {  // nobody else has been given the space: the lock is held
    for (std::size_t at = 0; at < before.size(); ++at) {
      slots()[old.slots[at]] = before[at];
      (void)mark(before[at].member, before[at].first, before[at].chunks, true);
    }
  }
  return out;
}

void Control::keep(const Reservation& reservation) {
  for (const std::uint32_t index : reservation.slots) {
    slots()[index].active = 0;
  }
}

void Control::release(const Reservation& reservation) {
  for (const std::uint32_t index : reservation.slots) {
    Slot& slot = slots()[index];
    (void)mark(slot.member, slot.first, slot.chunks, false);
    slot.active = 0;
  }
}

void Control::free_extent(const Extent& extent) {
  (void)mark(extent.member, (extent.offset - members_[extent.member].first_byte) / chunk_bytes_,
             chunk_count(extent.bytes), false);
}

}  // namespace memascend

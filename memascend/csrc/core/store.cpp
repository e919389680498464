#include "store.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "crc32c.h"
#include "store_format.h"

namespace memascend {
namespace {

constexpr std::int64_t kVerifyBytes = 4 << 20;
constexpr int kVerifyTries = 100;  // for a tensor that is overwritten while it is read

StorageFailure damage(const std::string& device, std::int64_t offset, const std::string& what) {
  return {
      "index", device, offset, 0, 0, 0, what + ": the index is damaged; restore the store, or destroy and format it"};
}

}  // namespace

// ------------------------------------------------------------------------------------------------------- opening

Store::Store(const std::vector<std::string>& paths, StoreOptions options, IoSyscalls& calls)
    : options_(std::move(options)), calls_(calls) {
  open_devices(paths);
  check_members();
  open_control();
}

void Store::open_devices(const std::vector<std::string>& paths) {
  if (paths.empty() || paths.size() > kMaxMembers) {
    throw Error(ErrorKind::kInvalidArgument, "store: give 1 to 16 devices");
  }
  devices_.resize(paths.size());
  superblocks_.resize(paths.size());
  for (const std::string& path : paths) {
    auto device = std::make_unique<Device>(path, calls_, false, options_.require_direct);
    const std::optional<Superblock> block = read_superblock(*device);
    if (!block) {
      throw Error(ErrorKind::kState, path + " holds no store, or its superblocks are damaged: format it first");
    }
    if (block->members != paths.size() || block->member >= paths.size() || devices_[block->member]) {
      throw Error(ErrorKind::kState, path + " is device " + std::to_string(block->member + 1) + " of " +
                                         std::to_string(block->members) + " of a store, but " +
                                         std::to_string(paths.size()) + " are given: name each of its devices once");
    }
    superblocks_[block->member] = *block;
    devices_[block->member] = std::move(device);
  }
}

void Store::check_members() const {
  const Superblock& first = superblocks_[0];
  for (std::size_t member = 0; member < devices_.size(); ++member) {
    const Superblock& block = superblocks_[member];
    const Device& device = *devices_[member];
    if (block.uuid != first.uuid) {
      throw Error(ErrorKind::kState, device.path() + " belongs to another store (" + uuid_text(block.uuid) + ") than " +
                                         devices_[0]->path() + " (" + uuid_text(first.uuid) + ")");
    }
    if (!options_.any_owner && block.owner != options_.owner) {
      throw Error(ErrorKind::kState, device.path() + " belongs to '" + block.owner + "', not to '" + options_.owner +
                                         "': open it as its owner, or destroy and format it");
    }
    if (device.bytes() < block.size_bytes) {
      throw StorageFailure("open", device.path(), 0, block.size_bytes, device.bytes(), 0,
                           "smaller than when it was formatted");
    }
  }
}

void Store::open_control() {
  const Superblock& first = superblocks_[0];
  std::vector<MemberSpace> members;
  members.reserve(superblocks_.size());
  for (const Superblock& block : superblocks_) {
    members.push_back({block.data_offset, (block.size_bytes - block.data_offset) / block.chunk_bytes, block.weight});
  }
  control_ = std::make_unique<Control>(options_.control_folder + "/memascend-" + uuid_text(first.uuid), first.uuid,
                                       first.chunk_bytes, std::move(members));
  if (control_->alone()) {
    for (const auto& device : devices_) {
      if (!device->claim_alone()) {
        throw Error(ErrorKind::kState, device->path() + " is in use outside of the processes that share " +
                                           options_.control_folder + ": unmount it, or end the other user");
      }
    }
    rebuild();
  }
  if (control_->alone()) {
    share_claims();
  }
  control_->opened();
  if (!control_->alone()) {
    share_claims();
  }
  const ControlLock lock(*this);
  if (!control_->alone()) {
    control_->drop_own_reservations();
    catch_up();
  }
}

void Store::share_claims() const {
  for (const auto& device : devices_) {
    device->share_claim();
  }
}

// Rebuilds the contents of the control from the devices. Needs its lock, or to be the only process.
void Store::rebuild() {
  const std::optional<Superblock> block = read_superblock(*devices_[0]);
  if (!block || block->uuid != superblocks_[0].uuid) {
    throw damage(devices_[0]->path(), 0, "no valid superblock");
  }
  superblocks_[0] = *block;
  load_log();
  control_->set_log(seen_);
  std::vector<Extent> used;
  std::uint64_t generation = 0;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (const auto& [key, record] : committed_) {
      used.insert(used.end(), record->extents.begin(), record->extents.end());
      generation = std::max(generation, record->generation);
    }
  }
  control_->generations_from(generation + 1);
  if (const Control::Overlap overlap = control_->rebuild(used); overlap.found) {
    throw damage(devices_[overlap.extent.member]->path(), overlap.extent.offset, "two tensors in one place");
  }
}

std::int64_t Store::half_offset(std::uint32_t half) const {
  return superblocks_[0].log_offset + static_cast<std::int64_t>(half) * superblocks_[0].log_bytes;
}

// Rebuilds committed_ and seen_ by replaying the active half of the log from its beginning.
void Store::load_log() {
  const Superblock& block = superblocks_[0];
  SectorBuffer log(block.log_bytes);
  devices_[0]->read(log.data(), block.log_bytes, half_offset(block.half));
  {
    std::lock_guard<std::mutex> guard(mutex_);
    committed_.clear();
  }
  seen_ = {block.epoch, block.first_sequence - 1, 0, block.generation, block.half};
  const std::uint64_t end = replay(log.data(), block.log_bytes, 0);
  refuse_hidden_batches(log.data(), block.log_bytes, end);
  if (block.epoch > 1 && end == 0) {
    throw damage(devices_[0]->path(), half_offset(block.half), "the first batch of the log is not whole");
  }
}

// Applies the consecutive batches from `from` on. Returns the offset of their end.
std::uint64_t Store::replay(const char* log, std::int64_t bytes, std::uint64_t from) {
  auto at = static_cast<std::int64_t>(from);
  while (at + kSectorBytes <= bytes) {
    const auto header = batch_at(log + at, bytes - at, superblocks_[0]);
    if (!header || header->epoch != seen_.epoch || header->sequence != seen_.sequence + 1) {
      break;
    }
    apply_payload(log + at + sizeof(BatchHeader), header->payload_bytes, half_offset(seen_.half) + at);
    at += batch_bytes(header->payload_bytes);
    seen_.sequence = header->sequence;
    seen_.tail = static_cast<std::uint64_t>(at);
  }
  seen_sequence_.store(seen_.sequence, std::memory_order_release);
  return static_cast<std::uint64_t>(at);
}

// Throws if there is a complete batch after the end of the log. A batch is only written once the one before it is on
// the device, so this is not an interrupted write: the device has lost data that it had confirmed.
void Store::refuse_hidden_batches(const char* log, std::int64_t bytes, std::uint64_t from) const {
  for (auto at = static_cast<std::int64_t>(from); at + kSectorBytes <= bytes; at += kSectorBytes) {
    const auto header = batch_at(log + at, bytes - at, superblocks_[0]);
    if (header && header->epoch == seen_.epoch && header->sequence > seen_.sequence) {
      throw damage(devices_[0]->path(), half_offset(seen_.half) + static_cast<std::int64_t>(from),
                   "batch " + std::to_string(seen_.sequence + 1) + " is not whole though batch " +
                       std::to_string(header->sequence) + " is");
    }
  }
}

bool Store::is_place(const Extent& extent) const {
  if (extent.member >= superblocks_.size()) {
    return false;
  }
  const Superblock& block = superblocks_[extent.member];
  const std::int64_t from = extent.offset - block.data_offset;
  return from >= 0 && from % block.chunk_bytes == 0 && extent.bytes > 0 && extent.bytes <= block.size_bytes &&
         extent.offset <= block.size_bytes - extent.bytes;
}

void Store::apply_payload(const char* data, std::size_t bytes, std::int64_t offset) {
  Reader reader(data, bytes);
  std::lock_guard<std::mutex> guard(mutex_);
  while (reader.more()) {
    auto [key, record] = get_record(reader);
    bool good = reader.good();
    std::int64_t sum = 0;
    for (std::size_t index = 0; good && record && index < record->extents.size(); ++index) {
      good = is_place(record->extents[index]);
      sum += record->extents[index].bytes;
    }
    if (!good || (record && sum != record->bytes)) {
      throw damage(devices_[0]->path(), offset, "a record of '" + key + "' makes no sense");
    }
    if (record) {
      committed_[key] = std::move(record);
    } else {
      committed_.erase(key);
    }
  }
}

// Applies what other processes have committed. Needs the control's lock.
void Store::catch_up() {
  const Control::LogState now = control_->log();
  if (now.sequence == seen_.sequence && now.epoch == seen_.epoch) {
    return;
  }
  if (now.epoch != seen_.epoch) {
    if (const auto block = read_superblock(*devices_[0]); block) {
      superblocks_[0] = *block;
    }
    load_log();
    return;
  }
  const auto bytes = static_cast<std::int64_t>(now.tail - seen_.tail);
  SectorBuffer log(bytes);
  devices_[0]->read(log.data(), bytes, half_offset(seen_.half) + static_cast<std::int64_t>(seen_.tail));
  const std::uint64_t before = seen_.tail;
  (void)replay(log.data(), bytes, 0);
  seen_.tail += before;
  if (seen_.sequence != now.sequence) {
    throw damage(devices_[0]->path(), half_offset(seen_.half) + static_cast<std::int64_t>(before),
                 "another process's batch cannot be read");
  }
}

// ------------------------------------------------------------------------------------------------------- changing

void Store::require_sound() const {
  if (damaged_ || control_->broken()) {
    throw Error(ErrorKind::kState, "store on " + devices_[0]->path() +
                                       ": a flush failed earlier, nothing can be promised: close it in all processes, "
                                       "check the device (dmesg), open it again and verify");
  }
}

Reservation Store::reserve(std::int64_t bytes) {
  const ControlLock lock(*this);
  require_sound();
  Reservation out = control_->reserve(bytes, options_.stripe_bytes);
  if (out.extents.empty() && bytes > 0 && control_->drop_dead_reservations() > 0) {
    out = control_->reserve(bytes, options_.stripe_bytes);
  }
  if (out.extents.empty() && bytes > 0) {
    throw_no_space(bytes);
  }
  return out;
}

Reservation Store::exchange(const Reservation& old, std::int64_t bytes) {
  const ControlLock lock(*this);
  require_sound();
  Reservation out = control_->exchange(old, bytes, options_.stripe_bytes);
  if (out.extents.empty() && bytes > 0 && control_->drop_dead_reservations() > 0) {
    out = control_->exchange(old, bytes, options_.stripe_bytes);
  }
  if (out.extents.empty() && bytes > 0) {
    throw_no_space(bytes);
  }
  return out;
}

void Store::throw_no_space(std::int64_t bytes) const {
  const std::int64_t free = control_->free_bytes();
  throw StorageFailure("reserve", devices_[0]->path(), 0, bytes, free, ENOSPC,
                       free < bytes ? "no space left on the store"
                                    : "the space is in too many pieces, or too many tensors (131072) are volatile "
                                      "or not committed");
}

void Store::release(const Reservation& reservation) {
  const ControlLock lock(*this);
  control_->release(reservation);
}

const Store::Change* Store::find_change(const std::string& key) const {
  for (const Changes* changes : {&pending_, &committing_}) {
    if (const auto found = changes->find(key); found != changes->end()) {
      return &found->second;
    }
  }
  return nullptr;
}

bool Store::install(const std::string& key, TensorRecord record, const Reservation& reservation) {
  if (key.empty() || key.size() > kMaxKeyBytes || record.dtype.size() > 255 || record.shape.size() > 255) {
    throw Error(ErrorKind::kInvalidArgument, "store: a key has 1 to 4096 bytes, a shape at most 255 dimensions");
  }
  Reservation outdated = reservation;
  bool installed = false;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    std::uint64_t& newest = newest_[key];
    if (record.generation > newest) {
      newest = record.generation;
      Change change;
      change.generation = record.generation;
      change.record = std::make_shared<TensorRecord>(std::move(record));
      change.reservation = reservation;
      outdated = std::exchange(pending_[key], std::move(change)).reservation;
      installed = true;
    }
  }
  if (!outdated.slots.empty()) {
    release(outdated);
  }
  return installed;
}

bool Store::erase(const std::string& key, std::optional<std::uint64_t> generation) {
  (void)find(key);  // catches up
  Reservation outdated;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const RecordPointer now = current(key);
    if (!now || (generation && now->generation != *generation)) {
      return false;
    }
    Change change;
    change.generation = control_->next_generation();
    if (!pending_.contains(key)) {  // else the version is this process's own, which was to replace the committed one
      change.only = generation;
    }
    newest_[key] = change.generation;
    outdated = std::exchange(pending_[key], std::move(change)).reservation;
  }
  if (!outdated.slots.empty()) {
    release(outdated);
  }
  return true;
}

RecordPointer Store::find(const std::string& key) {
  if (control_->sequence() != seen_sequence_.load(std::memory_order_acquire)) {
    const ControlLock lock(*this);
    catch_up();
  }
  std::lock_guard<std::mutex> guard(mutex_);
  return current(key);
}

RecordPointer Store::current(const std::string& key) const {
  if (const Change* change = find_change(key)) {
    return change->record;
  }
  const auto found = committed_.find(key);
  return found == committed_.end() ? nullptr : found->second;
}

std::vector<std::pair<std::string, RecordPointer>> Store::list() {
  (void)find("");  // catches up
  std::lock_guard<std::mutex> guard(mutex_);
  std::map<std::string, RecordPointer> merged = committed_;
  for (const Changes* changes : {&committing_, &pending_}) {
    for (const auto& [key, change] : *changes) {
      merged[key] = change.record;
    }
  }
  std::vector<std::pair<std::string, RecordPointer>> out;
  for (auto& [key, record] : merged) {
    if (record) {
      out.emplace_back(key, std::move(record));
    }
  }
  return out;
}

std::int64_t Store::uncommitted() {
  std::lock_guard<std::mutex> guard(mutex_);
  return static_cast<std::int64_t>(pending_.size());
}

std::string Store::verify(const TensorRecord& record) {
  SectorBuffer buffer(kVerifyBytes);
  std::uint32_t sum = 0;
  for (const Extent& extent : record.extents) {
    for (std::int64_t done = 0; done < extent.bytes; done += kVerifyBytes) {
      const std::int64_t here = std::min(kVerifyBytes, extent.bytes - done);
      try {
        devices_[extent.member]->read(buffer.data(), sector_up(here), extent.offset + done);
      } catch (const StorageFailure& failure) {
        return failure.what();
      }
      sum = crc32c(sum, buffer.data(), static_cast<std::size_t>(here));
    }
  }
  if (record.checksum && *record.checksum != sum) {
    return "checksum " + std::to_string(sum) + " where the index has " + std::to_string(*record.checksum);
  }
  return "";
}

Verified Store::verify(const std::string& key) {
  return verify(key, [&] { return find(key); });
}

Verified Store::verify(const std::string& key, const std::function<RecordPointer()>& find) {
  RecordPointer record = find();
  for (int tries = 0; record && tries < kVerifyTries; ++tries) {
    std::string problem = verify(*record);
    RecordPointer now = problem.empty() ? record : find();
    if (now && now->generation == record->generation) {
      return {std::move(record), std::move(problem)};
    }
    record = std::move(now);
  }
  if (record) {
    throw StorageFailure("verify", devices_[0]->path(), 0, record->bytes, 0, 0,
                         "'" + key + "' is written faster than it can be read: verify it when its writer has ended");
  }
  return {nullptr, "no such tensor"};
}

StoreSpace Store::space() {
  const ControlLock lock(*this);
  StoreSpace out;
  for (const Superblock& block : superblocks_) {
    out.data_bytes += (block.size_bytes - block.data_offset) / block.chunk_bytes * block.chunk_bytes;
  }
  out.free_bytes = control_->free_bytes();
  out.reserved_bytes = control_->reserved_bytes();
  out.log_bytes = superblocks_[0].log_bytes;
  out.log_used_bytes = static_cast<std::int64_t>(control_->log().tail);
  out.processes = control_->processes();
  return out;
}

}  // namespace memascend

// Making changes of a store durable: batches at the end of the log, and switching to its other half when one is full.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "crc32c.h"
#include "store.h"
#include "store_format.h"

namespace memascend {

std::string Store::encode(const Changes& changes) const {
  std::string out;
  for (const auto& [key, change] : changes) {
    put_record(out, key, change.record.get());
  }
  return out;
}

SectorBuffer Store::frame(const std::string& payload, std::uint64_t count, std::uint64_t epoch,
                          std::uint64_t sequence) const {
  BatchHeader header{};
  header.magic = kBatchMagic;
  header.uuid = superblocks_[0].uuid;
  header.epoch = epoch;
  header.sequence = sequence;
  header.payload_bytes = payload.size();
  header.count = count;
  SectorBuffer out(batch_bytes(payload.size()));
  std::memcpy(out.data(), &header, sizeof(header));
  std::memcpy(out.data() + sizeof(header), payload.data(), payload.size());
  header.checksum = crc32c(0, out.data() + kUnchecked, sizeof(header) - kUnchecked + payload.size());
  std::memcpy(out.data(), &header, sizeof(header));
  return out;
}

// Writes a batch at the end of the log, or moves to its other half if the batch does not fit. Needs the control's lock.
void Store::write_batch(const Changes& changes) {
  Control::LogState state = control_->log();
  const SectorBuffer batch = frame(encode(changes), changes.size(), state.epoch, state.sequence + 1);
  if (static_cast<std::int64_t>(state.tail) + batch.bytes() > superblocks_[0].log_bytes) {
    compact(changes);
    return;
  }
  const std::int64_t place = half_offset(state.half) + static_cast<std::int64_t>(state.tail);
  try {
    devices_[0]->write(batch.data(), batch.bytes(), place);
    devices_[0]->flush();
  } catch (...) {
    unwrite(place);
    throw;
  }
  state.sequence += 1;
  state.tail += static_cast<std::uint64_t>(batch.bytes());
  control_->set_log(state);
}

// Overwrites a batch or superblock whose write or flush failed. `commit` reports to its caller that the changes are not
// kept, so a process that opens the store later should not find them. If this fails too, it may (see `commit`).
void Store::unwrite(std::int64_t offset) const noexcept {
  try {
    const SectorBuffer zeros(kSectorBytes);
    devices_[0]->write(zeros.data(), zeros.bytes(), offset);
    devices_[0]->flush();
  } catch (...) {
  }
}

void Store::compact(const Changes& changes) {
  Changes all;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    for (const auto& [key, record] : committed_) {
      all[key].record = record;
    }
  }
  for (const auto& [key, change] : changes) {
    if (change.record) {
      all[key].record = change.record;
    } else {
      all.erase(key);
    }
  }
  const Control::LogState old = control_->log();
  const SectorBuffer batch = frame(encode(all), all.size(), old.epoch + 1, old.sequence + 1);
  Superblock block = superblocks_[0];
  if (batch.bytes() > block.log_bytes) {
    throw StorageFailure("commit", devices_[0]->path(), block.log_offset, batch.bytes(), block.log_bytes, ENOSPC,
                         "the index does not fit its log: format with a larger one (log_bytes)");
  }
  block.half = 1 - old.half;
  block.epoch = old.epoch + 1;
  block.first_sequence = old.sequence + 1;
  block.generation = old.superblock + 1;
  devices_[0]->write(batch.data(), batch.bytes(), half_offset(block.half));
  devices_[0]->flush();
  try {
    write_superblock(*devices_[0], block);
    devices_[0]->flush();
  } catch (...) {
    unwrite(static_cast<std::int64_t>(block.generation % 2) * kSectorBytes);
    throw;
  }
  superblocks_[0] = block;
  control_->set_log(
      {block.epoch, block.first_sequence, static_cast<std::uint64_t>(batch.bytes()), block.generation, block.half});
}

// Updates the maps and frees old space, after the batch is on the device. Needs the control's lock.
void Store::apply(Changes& changes) {
  std::lock_guard<std::mutex> guard(mutex_);
  for (auto& [key, change] : changes) {
    RecordPointer& slot = committed_[key];
    const RecordPointer old = std::exchange(slot, change.record);
    control_->keep(change.reservation);
    for (std::size_t index = 0; old && index < old->extents.size(); ++index) {
      control_->free_extent(old->extents[index]);
    }
    if (!slot) {
      committed_.erase(key);
    }
  }
  changes.clear();
  seen_ = control_->log();
  seen_sequence_.store(seen_.sequence, std::memory_order_release);
}

// Drops the erasures of versions that another process has replaced or erased. Needs the control's lock, so that no
// other process can commit between this and the batch.
void Store::drop_outdated_erasures() {
  std::lock_guard<std::mutex> guard(mutex_);
  std::erase_if(committing_, [&](const auto& each) {
    const auto& [key, change] = each;
    const auto found = committed_.find(key);
    return change.only && (found == committed_.end() || found->second->generation != *change.only);
  });
}

std::int64_t Store::commit() {
  std::lock_guard<std::mutex> one_at_a_time(commit_mutex_);
  std::int64_t count = 0;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (pending_.empty()) {
      return 0;
    }
    committing_ = std::exchange(pending_, {});
  }
  bool on_device = false;
  try {
    require_sound();
    on_device = true;  // if a flush fails, it is unknown which data the devices have kept
    for (const auto& device : devices_) {
      device->flush();
    }
    on_device = false;
    const ControlLock lock(*this);
    require_sound();
    catch_up();
    drop_outdated_erasures();
    count = static_cast<std::int64_t>(committing_.size());
    if (count == 0) {
      return 0;
    }
    try {
      write_batch(committing_);
    } catch (const StorageFailure& failure) {
      if (failure.error != ENOSPC || failure.op != "commit") {
        damaged_ = true;
        control_->set_broken(true);
      }
      throw;
    }
    apply(committing_);
  } catch (...) {
    damaged_ = damaged_ || on_device;
    std::vector<Reservation> outdated;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      for (auto& [key, change] : committing_) {
        if (const auto [at, fresh] = pending_.try_emplace(key, change); !fresh) {
          outdated.push_back(change.reservation);
        }
      }
      committing_.clear();
    }
    for (const Reservation& reservation : outdated) {
      release(reservation);
    }
    throw;
  }
  return count;
}

void Store::grow(std::int64_t data_bytes, bool allocate) {
  std::lock_guard<std::mutex> one_at_a_time(commit_mutex_);
  const ControlLock lock(*this);
  require_sound();
  Superblock block = superblocks_[0];
  const std::int64_t chunks = (data_bytes + block.chunk_bytes - 1) / block.chunk_bytes;
  if (devices_.size() != 1 || devices_[0]->is_block() || control_->processes() != 1) {
    throw Error(ErrorKind::kState, "grow: only a store of one file, which no other process uses, can be made larger");
  }
  if (chunks > control_->max_chunks()) {
    throw Error(ErrorKind::kInvalidArgument,
                "grow: at most to " + std::to_string(control_->max_chunks() * block.chunk_bytes) +
                    " bytes with space in units of " + std::to_string(block.chunk_bytes) + ": make a new store");
  }
  if (block.data_offset + chunks * block.chunk_bytes <= block.size_bytes) {
    return;
  }
  block.size_bytes = block.data_offset + chunks * block.chunk_bytes;
  devices_[0]->grow(block.size_bytes, allocate);
  Control::LogState state = control_->log();
  block.generation = state.superblock += 1;
  write_superblock(*devices_[0], block);
  devices_[0]->flush();
  superblocks_[0] = block;
  control_->set_log(state);
  seen_.superblock = state.superblock;
  control_->grow(chunks);
}

int Store::collect() {
  std::lock_guard<std::mutex> one_at_a_time(commit_mutex_);
  const ControlLock lock(*this);
  require_sound();
  catch_up();
  try {
    compact({});
  } catch (const StorageFailure& failure) {
    control_->set_broken(failure.op != "commit");
    throw;
  }
  seen_ = control_->log();
  seen_sequence_.store(seen_.sequence, std::memory_order_release);
  return control_->drop_dead_reservations();
}

}  // namespace memascend

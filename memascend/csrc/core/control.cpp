// The allocator of a Control: used chunks and reservations.

#include "control.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "control_layout.h"
#include "device.h"

namespace memascend {

// Marks chunks as used or free. Returns how many of them were in the other state before.
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
  if (head.magic != kMagic) {  // not opened yet: no process has reserved anything, so the table is not scanned
    return overlap;
  }
  (void)drop_dead_reservations();
  for (int index = 0; index < kMaxReservations; ++index) {
    const Slot& slot = slots()[index];
    if (slot.active != 0) {  // it may be in the index already; marking it twice does no harm
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

// Returns one run of `want` free chunks, searching from the last allocation on, or else several smaller runs that add
// up to `want`. Returns nothing if there are fewer free chunks.
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

// Returns the number of chunks for each member: by weight as far as its space allows, and the rest on any member with
// free space. Without striping all go to the member that is emptiest in proportion to its weight, if it has the space.
// Returns nothing if the store is too full.
std::vector<std::int64_t> Control::shares(std::int64_t chunks, bool striped) const {
  const auto count = static_cast<std::uint32_t>(members_.size());
  std::vector<std::int64_t> out(count, 0);
  std::vector<std::int64_t> free_chunks(count);
  std::int64_t weights = 0;
  std::uint32_t emptiest = 0;
  for (std::uint32_t member = 0; member < count; ++member) {
    free_chunks[member] = free_bytes(member) / chunk_bytes_;
    weights += members_[member].weight;
    const std::int64_t* used = header().used;
    emptiest = used[member] * members_[emptiest].weight < used[emptiest] * members_[member].weight ? member : emptiest;
  }
  std::int64_t left = chunks;
  for (std::uint32_t member = 0; member < count; ++member) {
    const std::int64_t share = striped ? chunks * members_[member].weight / weights : (member == emptiest ? chunks : 0);
    out[member] = std::min({share, free_chunks[member], left});
    left -= out[member];
  }
  for (std::uint32_t member = 0; member < count && left > 0; ++member) {
    const std::int64_t more = std::min(left, free_chunks[member] - out[member]);
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
  if (out.extents.empty() && bytes > 0) {  // the lock is held, so the old space has not been given to another process
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

// Superblocks: reading and writing them, and formatting and destroying stores.
#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "crc32c.h"
#include "store.h"
#include "store_format.h"

namespace memascend {
namespace {

constexpr std::array<char, 8> kSuperMagic{'M', 'E', 'M', 'A', 'S', 'C', 'N', 'D'};
constexpr std::uint32_t kFormatVersion = 1;
constexpr std::int64_t kLogOffset = 1 << 20;  // after the superblocks, and after what a partitioner would write
constexpr std::size_t kOwnerBytes = 256;

// Layout on the device, little endian. It fits one 512-byte sector, so that it is written completely or not at all.
struct RawSuperblock {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t checksum;  // of what follows
  std::uint64_t generation;
  std::array<std::uint8_t, 16> uuid;
  std::uint32_t member;
  std::uint32_t members;
  std::uint32_t weight;
  std::uint32_t half;
  std::int64_t chunk_bytes;
  std::int64_t log_offset;
  std::int64_t log_bytes;
  std::int64_t data_offset;
  std::int64_t size_bytes;
  std::uint64_t epoch;
  std::uint64_t first_sequence;
  std::array<char, kOwnerBytes> owner;
  std::int64_t scratch_pid;
  std::array<char, 512 - 120 - kOwnerBytes> unused;
};
static_assert(sizeof(RawSuperblock) == 512);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the format is little endian");

std::uint32_t checksum_of(const RawSuperblock& raw) {
  constexpr std::size_t kBefore = 16;
  return crc32c(0, reinterpret_cast<const char*>(&raw) + kBefore, sizeof(raw) - kBefore);
}

RawSuperblock to_raw(const Superblock& block) {
  RawSuperblock raw{};
  raw.magic = kSuperMagic;
  raw.version = kFormatVersion;
  raw.generation = block.generation;
  raw.uuid = block.uuid;
  raw.member = block.member;
  raw.members = block.members;
  raw.weight = block.weight;
  raw.half = block.half;
  raw.chunk_bytes = block.chunk_bytes;
  raw.log_offset = block.log_offset;
  raw.log_bytes = block.log_bytes;
  raw.data_offset = block.data_offset;
  raw.size_bytes = block.size_bytes;
  raw.epoch = block.epoch;
  raw.first_sequence = block.first_sequence;
  raw.scratch_pid = block.scratch_pid;
  std::memcpy(raw.owner.data(), block.owner.data(), block.owner.size());
  raw.checksum = checksum_of(raw);
  return raw;
}

Superblock from_raw(const RawSuperblock& raw) {
  Superblock block;
  block.generation = raw.generation;
  block.uuid = raw.uuid;
  block.owner.assign(raw.owner.data(), strnlen(raw.owner.data(), kOwnerBytes));
  block.member = raw.member;
  block.members = raw.members;
  block.weight = raw.weight;
  block.half = raw.half;
  block.chunk_bytes = raw.chunk_bytes;
  block.log_offset = raw.log_offset;
  block.log_bytes = raw.log_bytes;
  block.data_offset = raw.data_offset;
  block.size_bytes = raw.size_bytes;
  block.epoch = raw.epoch;
  block.first_sequence = raw.first_sequence;
  block.scratch_pid = raw.scratch_pid;
  return block;
}

std::int64_t default_log_bytes(std::int64_t size) {
  return std::clamp(sector_down(size / 256), std::int64_t{64} << 10, std::int64_t{64} << 20);
}

}  // namespace

void write_superblock(const Device& device, const Superblock& block) {
  SectorBuffer sector(kSectorBytes);
  const RawSuperblock raw = to_raw(block);
  std::memcpy(sector.data(), &raw, sizeof(raw));
  device.write(sector.data(), kSectorBytes, static_cast<std::int64_t>(block.generation % 2) * kSectorBytes);
}

std::optional<Superblock> read_superblock(const Device& device) {
  std::optional<Superblock> best;
  if (device.bytes() < 2 * kSectorBytes) {
    return best;
  }
  SectorBuffer sectors(2 * kSectorBytes);
  device.read(sectors.data(), 2 * kSectorBytes, 0);
  for (const std::int64_t at : {std::int64_t{0}, kSectorBytes}) {
    RawSuperblock raw{};
    std::memcpy(&raw, sectors.data() + at, sizeof(raw));
    if (raw.magic == kSuperMagic && raw.checksum == checksum_of(raw) && raw.version != kFormatVersion) {
      throw Error(ErrorKind::kState, device.path() + " has format version " + std::to_string(raw.version) +
                                         ", this program knows " + std::to_string(kFormatVersion));
    }
    if (raw.magic == kSuperMagic && raw.checksum == checksum_of(raw) && (!best || raw.generation > best->generation)) {
      best = from_raw(raw);
    }
  }
  return best;
}

std::string uuid_text(const std::array<std::uint8_t, 16>& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const std::uint8_t byte : uuid) {
    out += kDigits[byte >> 4];
    out += kDigits[byte & 15];
  }
  return out;
}

void format_store(const std::vector<std::string>& paths, const FormatOptions& options, IoSyscalls& calls) {
  if (paths.empty() || paths.size() > kMaxMembers ||
      (!options.weights.empty() && options.weights.size() != paths.size())) {
    throw Error(ErrorKind::kInvalidArgument, "format: give 1 to 16 devices, and a weight for each or for none");
  }
  if (options.owner.empty() || options.owner.size() > kOwnerBytes) {
    throw Error(ErrorKind::kInvalidArgument, "format: name the owner (run or model) in 1 to 256 bytes");
  }
  if (options.chunk_bytes < kSectorBytes || options.chunk_bytes % kSectorBytes != 0 ||
      options.log_bytes % kSectorBytes != 0 || options.log_bytes < 0) {
    throw Error(ErrorKind::kInvalidArgument, "format: chunk and log sizes are positive multiples of 4096 bytes");
  }
  Superblock block;
  block.generation = 1;
  block.epoch = 1;
  block.first_sequence = 1;
  block.owner = options.owner;
  block.members = static_cast<std::uint32_t>(paths.size());
  block.chunk_bytes = options.chunk_bytes;
  block.scratch_pid = options.scratch_pid;
  block.log_offset = kLogOffset;
  if (getrandom(block.uuid.data(), block.uuid.size(), 0) != static_cast<ssize_t>(block.uuid.size())) {
    throw Error(ErrorKind::kState, "format: the kernel gives no random bytes");
  }
  std::vector<std::unique_ptr<Device>> devices;
  for (const std::string& path : paths) {
    devices.push_back(std::make_unique<Device>(path, calls));
    if (!devices.back()->claim_alone()) {
      throw Error(ErrorKind::kState, "format: " + path + " is in use by another process or by the kernel");
    }
  }
  block.log_bytes = options.log_bytes > 0 ? options.log_bytes : default_log_bytes(devices[0]->bytes());
  block.data_offset = sector_up(kLogOffset + 2 * block.log_bytes);
  for (const auto& device : devices) {
    if (device->bytes() < block.data_offset + block.chunk_bytes) {
      throw StorageFailure("format", device->path(), 0, block.data_offset + block.chunk_bytes, device->bytes(), 0,
                           "too small for a store: use a larger device or a smaller log");
    }
  }
  // The first device is written last: its superblock completes the set.
  for (std::uint32_t member = block.members; member-- > 0;) {
    const Device& device = *devices[member];
    block.member = member;
    block.weight = options.weights.empty() ? 1 : std::max<std::uint32_t>(1, options.weights[member]);
    block.size_bytes = device.bytes();
    const SectorBuffer zeros(2 * kSectorBytes);
    device.write(zeros.data(), zeros.bytes(), 0);
    device.flush();
    write_superblock(device, block);
    device.flush();
  }
}

void destroy_store(const std::vector<std::string>& paths, IoSyscalls& calls) {
  std::vector<std::unique_ptr<Device>> devices;
  for (const std::string& path : paths) {
    devices.push_back(std::make_unique<Device>(path, calls));
    if (!read_superblock(*devices.back())) {
      throw Error(ErrorKind::kState, "destroy: " + path + " holds no store");
    }
  }
  for (const auto& device : devices) {
    if (!device->claim_alone()) {
      throw Error(ErrorKind::kState, "destroy: " + device->path() + " is in use: end the processes that use the store");
    }
  }
  for (const auto& device : devices) {
    const SectorBuffer zeros(2 * kSectorBytes);
    device->write(zeros.data(), zeros.bytes(), 0);
    device->flush();
  }
}

}  // namespace memascend

// Serialization of the records and batches of a store's log.
#include <cstring>
#include <utility>

#include "crc32c.h"
#include "store_format.h"

namespace memascend {
namespace {

void put_bytes(std::string& out, const void* data, std::size_t bytes) {
  out.append(static_cast<const char*>(data), bytes);
}
template <typename T>
void put(std::string& out, T value) {
  put_bytes(out, &value, sizeof(value));
}

}  // namespace

void put_record(std::string& out, const std::string& key, const TensorRecord* record) {
  put<std::uint8_t>(out, record != nullptr ? 1 : 0);
  put(out, static_cast<std::uint16_t>(key.size()));
  put_bytes(out, key.data(), key.size());
  if (record == nullptr) {
    return;
  }
  put(out, record->bytes);
  put(out, record->generation);
  put<std::uint8_t>(out, record->checksum.has_value() ? 1 : 0);
  put(out, record->checksum.value_or(0));
  put(out, static_cast<std::uint8_t>(record->dtype.size()));
  put_bytes(out, record->dtype.data(), record->dtype.size());
  put(out, static_cast<std::uint8_t>(record->shape.size()));
  for (const std::int64_t size : record->shape) {
    put(out, size);
  }
  put(out, static_cast<std::uint32_t>(record->extents.size()));
  for (const Extent& extent : record->extents) {
    put(out, extent.member);
    put(out, extent.offset);
    put(out, extent.bytes);
  }
}

std::pair<std::string, RecordPointer> get_record(Reader& reader) {
  const bool erased = reader.get<std::uint8_t>() == 0;
  std::string key = reader.text(reader.get<std::uint16_t>());
  if (erased) {
    return {std::move(key), nullptr};
  }
  auto record = std::make_shared<TensorRecord>();
  record->bytes = reader.get<std::int64_t>();
  record->generation = reader.get<std::uint64_t>();
  const bool summed = reader.get<std::uint8_t>() != 0;
  const auto checksum = reader.get<std::uint32_t>();
  record->checksum = summed ? std::optional(checksum) : std::nullopt;
  record->dtype = reader.text(reader.get<std::uint8_t>());
  const auto dimensions = reader.get<std::uint8_t>();
  for (int dimension = 0; dimension < dimensions && reader.good(); ++dimension) {
    record->shape.push_back(reader.get<std::int64_t>());
  }
  const auto extents = reader.get<std::uint32_t>();
  for (std::uint32_t index = 0; index < extents && reader.good(); ++index) {
    const auto member = reader.get<std::uint32_t>();
    const auto offset = reader.get<std::int64_t>();
    record->extents.push_back({member, offset, reader.get<std::int64_t>()});
  }
  return {std::move(key), std::move(record)};
}

std::optional<BatchHeader> batch_at(const char* data, std::int64_t left, const Superblock& block) {
  BatchHeader header{};
  std::memcpy(&header, data, sizeof(header));
  const auto available = static_cast<std::uint64_t>(left) - sizeof(header);
  if (header.magic != kBatchMagic || header.uuid != block.uuid || header.payload_bytes > available ||
      header.checksum != crc32c(0, data + kUnchecked, sizeof(header) - kUnchecked + header.payload_bytes)) {
    return std::nullopt;
  }
  return header;
}

std::int64_t batch_bytes(std::uint64_t payload) {
  return sector_up(static_cast<std::int64_t>(sizeof(BatchHeader) + payload));
}

}  // namespace memascend

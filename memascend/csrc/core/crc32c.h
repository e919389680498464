// CRC-32C (Castagnoli), the checksum of iSCSI and ext4: by SSE4.2 where the processor has it, otherwise by tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memascend {

// Continues from `crc` (0 at the start), so that crc32c(crc32c(0, a), b) is the checksum of a followed by b.
[[nodiscard]] std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;
[[nodiscard]] std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;
[[nodiscard]] bool crc32c_in_hardware() noexcept;

// Returns the checksum of a followed by b from the checksums of both. With it, blocks can be checksummed in any order
// and joined at the end.
[[nodiscard]] std::uint32_t crc32c_join(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t bytes_b) noexcept;

}  // namespace memascend

// CRC-32C (Castagnoli), the checksum of iSCSI and ext4: SSE4.2 where the processor has it, a table otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memascend {

// Goes on from `crc` (0 to begin), so that crc32c(crc32c(0, a), b) is the checksum of a followed by b.
[[nodiscard]] std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;
[[nodiscard]] std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;
[[nodiscard]] bool crc32c_in_hardware() noexcept;

// The checksum of a followed by b from the checksums of both: blocks are summed in any order, joined at the end.
[[nodiscard]] std::uint32_t crc32c_join(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t bytes_b) noexcept;

}  // namespace memascend

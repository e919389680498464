#include "check.h"
#include "core/crc32c.h"
#include "storage_fixture.h"

using namespace memascend;

TEST(crc32c_matches_the_check_value_of_its_definition) {  // from RFC 3720, appendix B.4; "123456789": from Koopman
  const std::vector<char> zeros(32, 0);
  const std::vector<char> ones(32, '\xff');
  CHECK(crc32c(0, "123456789", 9) == 0xE3069283u);
  CHECK(crc32c(0, zeros.data(), zeros.size()) == 0x8A9136AAu);
  CHECK(crc32c(0, ones.data(), ones.size()) == 0x62A8AB43u);
  CHECK(crc32c(0, nullptr, 0) == 0);
}

TEST(crc32c_in_hardware_equals_the_table_at_every_length_and_address) {
  const std::vector<char> data = storage_fixture::pattern(40000, 7);
  for (const std::size_t bytes : {0, 1, 7, 8, 9, 63, 4095, 4096, 12287, 12288, 12289, 24576, 30001, 39990}) {
    for (const std::size_t skip : {0, 1, 3, 8}) {
      CHECK(crc32c(5, data.data() + skip, bytes) == crc32c_portable(5, data.data() + skip, bytes));
    }
  }
}

TEST(crc32c_of_parts_joins_to_that_of_the_whole) {
  const std::vector<char> data = storage_fixture::pattern(30000, 3);
  const std::uint32_t whole = crc32c(0, data.data(), data.size());
  for (const std::size_t cut : {0, 1, 8, 4096, 12345, 29999, 30000}) {
    const std::uint32_t head = crc32c(0, data.data(), cut);
    const std::uint32_t tail = crc32c(0, data.data() + cut, data.size() - cut);
    CHECK(crc32c_join(head, tail, data.size() - cut) == whole);
  }
}

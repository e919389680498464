#include <sys/mman.h>

#include <cmath>
#include <cstring>

#include "check.h"
#include "core/errors.h"
#include "core/overflow.h"

using namespace memascend;
using check::contains;
using check::message_of;

namespace {

std::vector<SimdLevel> levels_here() {
  std::vector<SimdLevel> levels{SimdLevel::kPortable};
  for (const SimdLevel level : {SimdLevel::kAvx2, SimdLevel::kAvx2Vaes, SimdLevel::kAvx512}) {
    if (level <= best_simd_level()) {
      levels.push_back(level);
    }
  }
  return levels;
}

float from_bfloat16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Returns the value of an IEEE half by its definition, independently of the mask in the code under test.
float from_float16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) {
    return fraction ? NAN : INFINITY;
  }
  return exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                       : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

}  // namespace

TEST(overflow_agrees_with_isfinite_on_every_16_bit_pattern) {
  for (const SimdLevel level : levels_here()) {
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      std::vector<std::uint16_t> words(70, 0x3C00);
      words[bits % words.size()] = static_cast<std::uint16_t>(bits);  // in the vectors and in the remainder after them
      const bool half = has_overflow(words.data(), 70, FloatFormat::kFloat16, 1, level);
      const bool brain = has_overflow(words.data(), 70, FloatFormat::kBFloat16, 1, level);
      if (half == static_cast<bool>(std::isfinite(from_float16(static_cast<std::uint16_t>(bits)))) ||
          brain == static_cast<bool>(std::isfinite(from_bfloat16(static_cast<std::uint16_t>(bits))))) {
        CHECK_NOTE(false, simd_level_name(level) + " pattern " + std::to_string(bits));
        return;
      }
    }
  }
  CHECK(true);
}

TEST(overflow_agrees_with_isfinite_on_32_bit_pattern_classes) {
  for (const SimdLevel level : levels_here()) {
    for (std::uint32_t top = 0; top < 512; ++top) {  // sign and exponent
      for (const std::uint32_t fraction : {0u, 1u, 0x400000u, 0x7FFFFFu, 0x2AAAAAu}) {
        const std::uint32_t bits = top << 23 | fraction;
        float value = 0;
        std::memcpy(&value, &bits, sizeof value);
        std::vector<float> values(37, 1.5f);
        values[bits % values.size()] = value;
        CHECK(has_overflow(values.data(), 37, FloatFormat::kFloat32, 1, level) == !std::isfinite(value));
      }
    }
  }
}

TEST(overflow_finds_the_one_bad_value_wherever_it_is) {
  std::vector<float> values(300'001, -3.4e38f);
  for (const SimdLevel level : levels_here()) {
    for (const int threads : {1, 3}) {
      CHECK(!has_overflow(values.data(), 300'001, FloatFormat::kFloat32, threads, level));
      for (const std::size_t place : {0ul, 1ul, 65'535ul, 65'536ul, 200'000ul, 300'000ul}) {
        const float kept = values[place];
        values[place] = NAN;
        CHECK(has_overflow(values.data(), 300'001, FloatFormat::kFloat32, threads, level));
        values[place] = kept;
      }
    }
  }
}

TEST(overflow_reads_nothing_beyond_an_unaligned_end) {
  for (int count = 0; count < 70; ++count) {
    std::vector<std::uint16_t> words(static_cast<std::size_t>(count) + 1, 0);
    std::vector<std::uint16_t> exact(words.begin() + 1, words.end());  // the sanitizer checks its ends
    CHECK(!has_overflow(exact.data(), count, FloatFormat::kFloat16, 1));
    CHECK(!has_overflow(words.data() + 1, count, FloatFormat::kFloat16, 1));
  }
}

TEST(overflow_stops_early) {
  constexpr std::size_t kBytes = 64 << 20;
  auto* data = static_cast<float*>(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  CHECK(data != MAP_FAILED);
  data[5] = INFINITY;
  CHECK(mprotect(reinterpret_cast<char*>(data) + (1 << 20), kBytes - (1 << 20), PROT_NONE) == 0);
  CHECK(has_overflow(data, kBytes / 4, FloatFormat::kFloat32, 1));  // would fault if it did not stop early
  munmap(data, kBytes);
}

TEST(overflow_strided_sees_the_tensor_and_only_the_tensor) {
  std::vector<float> values(4 * 6 * 10, 1.0f);
  const auto has = [&](std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides) {
    return has_overflow_strided(values.data(), std::move(sizes), std::move(strides), FloatFormat::kFloat32, 1);
  };
  values[5] = NAN;  // index (0, 0, 5)
  CHECK(has({4, 6, 10}, {60, 10, 1}));
  CHECK(has({10, 6, 4}, {1, 10, 60}));
  CHECK(!has({4, 6, 5}, {60, 10, 1}));
  CHECK(has({4, 6, 6}, {60, 10, 1}));
  CHECK(!has({4, 6, 5}, {60, 10, 2}));
  CHECK(has({4, 6, 2}, {60, 10, 5}));
  CHECK(!has({1000, 4}, {0, 60}));
  CHECK(has({1000, 10}, {0, 1}));
  CHECK(!has({0, 10}, {10, 1}));
  values[5] = 1.0f;
  CHECK(!has({4, 6, 10}, {60, 10, 1}));
  CHECK(!has({}, {}));
  values[0] = INFINITY;
  CHECK(has({}, {}));
}

TEST(overflow_bad_arguments) {
  float value = 0;
  CHECK(contains(message_of<Error>([&] { (void)has_overflow(&value, -1, FloatFormat::kFloat32, 1); }), "no data"));
  CHECK(contains(message_of<Error>([&] { (void)has_overflow(nullptr, 1, FloatFormat::kFloat32, 1); }), "no data"));
  CHECK(contains(message_of<Error>([&] { (void)has_overflow(&value, 1, FloatFormat::kFloat32, 0); }), "at least one"));
  CHECK(contains(message_of<Error>([&] { (void)has_overflow_strided(&value, {1}, {-1}, FloatFormat::kFloat32, 1); }),
                 "negative"));
  CHECK(!has_overflow(nullptr, 0, FloatFormat::kFloat32, 4));
}

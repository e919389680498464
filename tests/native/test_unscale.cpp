#include <cmath>
#include <cstring>

#include "check.h"
#include "core/errors.h"
#include "core/unscale.h"

using namespace memascend;
using check::contains;
using check::message_of;

namespace {

std::vector<SimdLevel> levels_here() {
  std::vector<SimdLevel> levels;
  for (const SimdLevel level : {SimdLevel::kPortable, SimdLevel::kAvx2, SimdLevel::kAvx2Vaes, SimdLevel::kAvx512}) {
    if (level <= best_simd_level()) {
      levels.push_back(level);
    }
  }
  return levels;
}

// Returns the finite bit patterns of a 16-bit format, in an order that mixes magnitudes.
std::vector<std::uint16_t> finite_patterns(std::uint16_t exponent) {
  std::vector<std::uint16_t> out;
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i * 40503u);
    if ((bits & exponent) != exponent) {
      out.push_back(bits);
    }
  }
  return out;
}

}  // namespace

TEST(unscale_bits_depend_on_no_instruction_set_or_thread) {
  for (const FloatFormat format : {FloatFormat::kFloat16, FloatFormat::kBFloat16}) {
    const auto data = finite_patterns(format == FloatFormat::kFloat16 ? 0x7C00 : 0x7F80);
    const auto count = static_cast<std::int64_t>(data.size());
    for (const bool widen : {false, true}) {
      std::vector<char> first;
      double first_sum = 0;
      for (const SimdLevel level : levels_here()) {
        for (const int threads : {1, 3}) {
          std::vector<char> out(data.size() * (widen ? 4 : 2));
          const auto result = unscale_norm_overflow(
              data.data(), format, out.data(), widen ? FloatFormat::kFloat32 : format, count, 0.37, threads, level);
          if (first.empty()) {
            first = out;
            first_sum = result.sum_squares;
          }
          CHECK_NOTE(out == first && result.sum_squares == first_sum && !result.overflow, simd_level_name(level));
        }
      }
    }
  }
}

TEST(unscale_sums_what_it_writes) {
  for (const SimdLevel level : levels_here()) {
    for (const std::int64_t count : {0, 1, 31, 32, 33, 1000, 65'536, 200'003}) {
      std::vector<float> data(static_cast<std::size_t>(count));
      for (std::size_t i = 0; i < data.size(); ++i) {
        data[i] = std::sin(static_cast<float>(i)) * 1000;
      }
      const auto before = data;
      const auto result = unscale_norm_overflow(data.data(), FloatFormat::kFloat32, data.data(), FloatFormat::kFloat32,
                                                count, 1.0 / 1024, 2, level);
      double sum = 0;
      for (std::size_t i = 0; i < data.size(); ++i) {
        CHECK(data[i] == before[i] / 1024);
        sum += static_cast<double>(data[i]) * data[i];
      }
      CHECK(!result.overflow && std::fabs(result.sum_squares - sum) <= 1e-12 * sum);
    }
  }
}

TEST(unscale_finds_one_bad_value_anywhere) {
  std::vector<float> data(140'001, 2.0f);
  for (const SimdLevel level : levels_here()) {
    for (const std::size_t place : {0ul, 31ul, 70'000ul, 139'999ul, 140'000ul}) {
      for (const float bad : {INFINITY, -INFINITY, NAN, 3e38f}) {
        const float kept = data[place];
        data[place] = bad;
        std::vector<float> out(data.size());
        const auto result = unscale_norm_overflow(data.data(), FloatFormat::kFloat32, out.data(), FloatFormat::kFloat32,
                                                  140'001, 4.0, 2, level);
        CHECK(result.overflow && !std::isfinite(result.sum_squares));
        data[place] = kept;
      }
    }
    // A scaled value that exceeds the range of the format is an overflow too.
    std::vector<std::uint16_t> half(100, 0x7BFF);
    CHECK(unscale_norm_overflow(half.data(), FloatFormat::kFloat16, half.data(), FloatFormat::kFloat16, 100, 2.0, 1,
                                level)
              .overflow);
  }
}

TEST(unscale_by_one_in_place_writes_nothing) {
  const std::vector<float> data(1000, 3.0f);
  const auto result = unscale_norm_overflow(data.data(), FloatFormat::kFloat32, const_cast<float*>(data.data()),
                                            FloatFormat::kFloat32, 1000, 1.0, 1);
  CHECK(result.sum_squares == 9000 && !result.overflow);
}

TEST(unscale_bad_arguments) {
  float x = 1;
  const auto call = [&](const void* data, FloatFormat out, std::int64_t count, double scale, int threads) {
    return message_of<Error>(
        [&, data] { unscale_norm_overflow(data, FloatFormat::kFloat32, &x, out, count, scale, threads); });
  };
  CHECK(contains(call(nullptr, FloatFormat::kFloat32, 1, 1, 1), "no data"));
  CHECK(contains(call(&x, FloatFormat::kFloat32, -1, 1, 1), "no data"));
  CHECK(contains(call(&x, FloatFormat::kFloat16, 1, 1, 1), "float32"));
  CHECK(contains(call(&x, FloatFormat::kFloat32, 1, NAN, 1), "not finite"));
  CHECK(contains(call(&x, FloatFormat::kFloat32, 1, 1e300, 1), "not finite"));
  CHECK(contains(call(&x, FloatFormat::kFloat32, 1, 1, 0), "at least one"));
}

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "check.h"
#include "core/adamw8.h"
#include "core/errors.h"

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

constexpr FloatFormat kFormats[] = {FloatFormat::kFloat32, FloatFormat::kFloat16, FloatFormat::kBFloat16};

std::uint16_t bf16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  return static_cast<std::uint16_t>(bits >> 16);
}

// Every byte is a valid code, so the moments are random bytes. The scales are those of small numbers, and zero.
struct Case {
  FloatFormat grad;
  std::int64_t count;
  std::vector<std::uint16_t> p;
  std::vector<char> g;
  std::vector<std::uint8_t> m, r, s;

  Case(FloatFormat grad_, std::int64_t count_) : grad(grad_), count(count_) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < count; ++i) {
      p.push_back(bf16(normal(random)));
      const float value = normal(random) * std::exp2(static_cast<float>(static_cast<int>(random() % 12)) - 12);
      char bytes[4];
      if (grad == FloatFormat::kFloat32) {
        std::memcpy(bytes, &value, 4);
      } else {
        const std::uint16_t half =
            grad == FloatFormat::kBFloat16 ? bf16(value) : static_cast<std::uint16_t>(random() & 0xBFFF);
        std::memcpy(bytes, &half, 2);
      }
      g.insert(g.end(), bytes, bytes + format_bytes(grad));
      m.push_back(static_cast<std::uint8_t>(random()));
      r.push_back(static_cast<std::uint8_t>(random()));
    }
    for (std::int64_t block = 0; block < (count + kBlock - 1) / kBlock; ++block) {
      s.push_back(static_cast<std::uint8_t>(random() % 20 == 0 ? 0 : 100 + random() % 28));
      s.push_back(static_cast<std::uint8_t>(random() % 20 == 0 ? 0 : 100 + random() % 28));
    }
  }

  void run(std::int64_t begin, std::int64_t end, std::int64_t offset, int threads, SimdLevel level, int step = 3) {
    const AdamW8Tensors tensors{p.data() + begin, g.data() + begin * format_bytes(grad), m.data() + begin,
                                r.data() + begin, s.data() + begin / kBlock * 2,         grad,
                                end - begin};
    adamw8(tensors, {step, 1e-3, 0.9, 0.999, 1e-8, 0.01, 0.5, 1234567890123ull, offset + begin}, threads, level);
  }

  [[nodiscard]] bool same(const Case& other) const {
    return p == other.p && m == other.m && r == other.r && s == other.s && g == other.g;
  }
};

// Decodes a code by the definition of the format, without the bit operations of the code under test.
double decoded(std::uint8_t code, int fraction_bits, int scale) {
  const int ones = 1 << fraction_bits;
  const int exponent = code >> fraction_bits & 7;
  const double fraction = static_cast<double>(code % ones) / ones;
  const double value = exponent == 0 ? std::ldexp(fraction, -6) : std::ldexp(1 + fraction, exponent - 7);
  return std::ldexp(value, std::max(scale, 8) - 127);
}

double momentum_of(std::uint8_t code, int scale) { return (code & 0x80 ? -1 : 1) * decoded(code & 0x7F, 4, scale); }

}  // namespace

TEST(adamw8_bits_depend_on_no_instruction_set_thread_or_slice) {
  for (const FloatFormat grad : kFormats) {
    constexpr std::int64_t kCount = 40'013;
    Case whole(grad, kCount);
    const Case before = whole;
    for (int step = 3; step < 6; ++step) {
      whole.run(0, kCount, 64, 1, SimdLevel::kPortable, step);
    }
    CHECK(whole.p != before.p && whole.m != before.m && whole.r != before.r && whole.s != before.s);
    for (const SimdLevel level : levels_here()) {
      Case threaded = before;
      Case sliced = before;
      for (int step = 3; step < 6; ++step) {
        threaded.run(0, kCount, 64, 3, level, step);
        for (const auto& [begin, end] : {std::pair<int, int>{20'000, 40'013}, {0, 32}, {32, 96}, {96, 20'000}}) {
          sliced.run(begin, end, 64, 2, level, step);
        }
      }
      CHECK_NOTE(threaded.same(whole), simd_level_name(level) + " threads");
      CHECK_NOTE(sliced.same(whole), simd_level_name(level) + " slices");
    }
  }
}

TEST(adamw8_touches_nothing_outside_its_elements) {
  for (const FloatFormat grad : kFormats) {
    for (const SimdLevel level : levels_here()) {
      Case all(grad, 256);
      const Case before = all;
      all.run(32, 150, 0, 1, level);  // the sanitizer checks the ends of the buffers, this test those of the slice
      for (const auto& [now, then] : {std::pair{&all.m, &before.m}, {&all.r, &before.r}}) {
        CHECK(std::equal(now->begin(), now->begin() + 32, then->begin()));
        CHECK(std::equal(now->begin() + 150, now->end(), then->begin() + 150));
      }
      CHECK(std::equal(all.p.begin() + 150, all.p.end(), before.p.begin() + 150));
      CHECK(std::equal(all.s.begin() + 10, all.s.end(), before.s.begin() + 10));
      for (std::int64_t count = 0; count < 70; ++count) {
        Case exact(grad, count);
        exact.run(0, count, 32, 2, level);
      }
    }
  }
}

TEST(adamw8_is_the_formula_within_a_step_of_the_codes) {
  for (const SimdLevel level : levels_here()) {
    Case one(FloatFormat::kFloat32, 3200);
    const Case before = one;
    one.run(0, 3200, 0, 1, level, 2);
    for (std::size_t i = 0; i < 3200; ++i) {
      float grad = 0;
      std::memcpy(&grad, before.g.data() + 4 * i, 4);
      const double g = static_cast<double>(grad) * 0.5;
      const double m0 = momentum_of(before.m[i], before.s[i / 32 * 2]);
      const double r0 = decoded(before.r[i], 5, before.s[i / 32 * 2 + 1]);
      const double m = 0.9 * m0 + 0.1 * g;
      const double r = std::sqrt(0.999 * r0 * r0 + 0.001 * g * g);
      const double new_m = momentum_of(one.m[i], one.s[i / 32 * 2]);
      const double new_r = decoded(one.r[i], 5, one.s[i / 32 * 2 + 1]);
      const double m_step = std::fmax(std::ldexp(1.0, one.s[i / 32 * 2] - 127 - 10), std::fabs(m) / 16);
      const double r_step = std::fmax(std::ldexp(1.0, one.s[i / 32 * 2 + 1] - 127 - 11), r / 32);
      CHECK(std::fabs(new_m - m) <= m_step * 1.0001);
      CHECK(std::fabs(new_r - r) <= r_step * 1.0001);
      CHECK(new_r > 0);
      const double update = 1e-3 / (1 - 0.81) * m / (r / std::sqrt(1 - 0.998001) + 1e-8);
      const std::uint32_t bits = static_cast<std::uint32_t>(before.p[i]) << 16;
      const std::uint32_t now_bits = static_cast<std::uint32_t>(one.p[i]) << 16;
      float p = 0, now = 0;
      std::memcpy(&p, &bits, 4);
      std::memcpy(&now, &now_bits, 4);
      const double exact = static_cast<double>(p) * (1 - 1e-5) - update;
      CHECK(std::fabs(static_cast<double>(now) - exact) <=
            std::fmax(std::fabs(exact), std::fabs(static_cast<double>(now))) / 128 + 1e-6);
    }
  }
}

// The mean over many elements equals the exact value, for codes in both parts of the range.
TEST(adamw8_stochastic_rounding_has_no_bias) {
  constexpr std::int64_t kCount = 1 << 17;
  for (const float small : {0.37f, 0.0101f}) {  // in a block with 1.0: in the normal and in the evenly spaced part
    Case one(FloatFormat::kFloat32, kCount);
    std::fill(one.m.begin(), one.m.end(), std::uint8_t{0});
    std::fill(one.r.begin(), one.r.end(), std::uint8_t{0});
    for (std::int64_t i = 0; i < kCount; ++i) {
      const float g = i % 32 == 0 ? 1.0f : small;
      std::memcpy(one.g.data() + 4 * i, &g, 4);
    }
    // With betas of zero the moments are the gradient and its square.
    adamw8({one.p.data(), one.g.data(), one.m.data(), one.r.data(), one.s.data(), one.grad, kCount},
           {10, 0.0, 0.0, 0.0, 1e-8, 0.0, 1.0, 5}, 2);
    double momentum = 0, root = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
      if (i % 32 != 0) {
        momentum += momentum_of(one.m[i], one.s[i / 32 * 2]);
        root += decoded(one.r[i], 5, one.s[i / 32 * 2 + 1]);
      } else {
        CHECK(one.m[i] == 0x70 && one.r[i] == 0xE0 && one.s[i / 32 * 2] == 127 && one.s[i / 32 * 2 + 1] == 127);
      }
    }
    const double count = kCount / 32 * 31;
    const double value = static_cast<double>(small);
    const double step = std::fmax(std::ldexp(1.0, -10), std::exp2(std::floor(std::log2(value)) - 4));
    CHECK_NOTE(std::fabs(momentum / count - value) < 5 * 0.5 * step / std::sqrt(count),
               std::to_string(momentum / count));
    CHECK_NOTE(std::fabs(root / count - value) < 5 * 0.25 * step / std::sqrt(count), std::to_string(root / count));
  }
}

TEST(adamw8_zero_states_are_the_beginning_and_no_root_becomes_zero) {
  for (const SimdLevel level : levels_here()) {
    Case one(FloatFormat::kFloat32, 64);
    std::fill(one.m.begin(), one.m.end(), std::uint8_t{0});
    std::fill(one.r.begin(), one.r.end(), std::uint8_t{0});
    std::fill(one.s.begin(), one.s.end(), std::uint8_t{0});
    for (std::int64_t i = 0; i < 64; ++i) {
      const float g = i == 0   ? 1e4f
                      : i < 32 ? 1e-6f
                               : 0.0f;  // one huge value in the first block, nothing in the second
      std::memcpy(one.g.data() + 4 * i, &g, 4);
    }
    const Case before = one;
    for (int step = 1; step < 20; ++step) {
      one.run(0, 64, 0, 1, level, step);
      CHECK(std::count(one.r.begin(), one.r.end(), 0) == 0);
      CHECK(one.s[2] == 8 && one.s[3] == 8);
    }
    for (std::size_t i = 0; i < 64; ++i) {  // 19 steps of at most lr / (1 - beta1): no step is infinite or huge
      const std::uint32_t bits = static_cast<std::uint32_t>(one.p[i]) << 16;
      const std::uint32_t old = static_cast<std::uint32_t>(before.p[i]) << 16;
      float now = 0, then = 0;
      std::memcpy(&now, &bits, 4);
      std::memcpy(&then, &old, 4);
      CHECK(std::fabs(now - then) < 0.3f);
    }
  }
}

// A number in the last step below a power of two may be rounded up to it, so its block must have the scale of that
// power.
TEST(adamw8_rounding_up_never_wraps) {
  for (const SimdLevel level : levels_here()) {
    for (const float top : {1.9999999f, 1.96f, 1.98f, 1.94f, 1.9375f, 1.96875f}) {
      Case one(FloatFormat::kFloat32, 3200);
      for (std::int64_t i = 0; i < 3200; ++i) {
        std::memcpy(one.g.data() + 4 * i, &top, 4);
      }
      adamw8({one.p.data(), one.g.data(), one.m.data(), one.r.data(), one.s.data(), one.grad, 3200},
             {1, 0.0, 0.0, 0.0, 1e-8, 0.0, 1.0, 3}, 1, level);
      for (std::size_t i = 0; i < 3200; ++i) {
        CHECK(std::fabs(momentum_of(one.m[i], one.s[i / 32 * 2]) - static_cast<double>(top)) <= 1.0 / 16);
        CHECK(std::fabs(decoded(one.r[i], 5, one.s[i / 32 * 2 + 1]) - static_cast<double>(top)) <= 1.0 / 32);
      }
    }
  }
}

TEST(adamw8_names_what_is_not_finite_and_leaves_its_block) {
  for (const SimdLevel level : levels_here()) {
    for (const std::size_t place : {0ul, 40ul, 999ul}) {
      for (int kind = 0; kind < 5; ++kind) {
        Case one(FloatFormat::kFloat32, 1000);
        std::string says;
        if (kind == 0) {
          one.p[place] = 0x7F80;
          says = "parameter is inf at element " + std::to_string(96 + place) + " ";
        } else if (kind == 1) {
          const std::uint32_t nan = 0xFFFFFFFFu;
          std::memcpy(one.g.data() + 4 * place, &nan, 4);
          says = "gradient is -nan at element " + std::to_string(96 + place) + " ";
        } else if (kind == 2) {
          const float huge = 3e38f;
          std::memcpy(one.g.data() + 4 * place, &huge, 4);
          says = "update is not finite";
        } else {
          one.s[place / 32 * 2 + static_cast<std::size_t>(kind - 3)] = 255;
          says = kind == 3 ? "momentum has scale 255" : "variance has scale 255";
        }
        const Case before = one;
        const std::string message = message_of<Error>([&] { one.run(0, 1000, 96, 2, level); });
        CHECK_NOTE(contains(message, says) && contains(message, "step 3"), says + " | " + message);
        const std::size_t block = place / 32 * 32;
        const std::size_t end = std::min<std::size_t>(1000, block + 32);
        CHECK(std::equal(one.p.begin() + block, one.p.begin() + end, before.p.begin() + block));
        CHECK(std::equal(one.m.begin() + block, one.m.begin() + end, before.m.begin() + block));
        CHECK(std::equal(one.r.begin() + block, one.r.begin() + end, before.r.begin() + block));
        CHECK(one.s[block / 16] == before.s[block / 16] && one.s[block / 16 + 1] == before.s[block / 16 + 1]);
        CHECK(!std::equal(one.m.begin() + 512, one.m.begin() + 544, before.m.begin() + 512));
      }
    }
  }
}

TEST(adamw8_bad_arguments) {
  std::uint16_t p = 0;
  float g = 0;
  std::uint8_t m = 0, r = 0, s[2] = {0, 0};
  const AdamW8Tensors good{&p, &g, &m, &r, s, FloatFormat::kFloat32, 1};
  const AdamWOptions usual{1, 1e-3, 0.9, 0.999, 1e-8, 0.0};
  const auto says = [&](auto change) {
    AdamW8Tensors tensors = good;
    AdamWOptions options = usual;
    change(tensors, options);
    return message_of<Error>([&] { adamw8(tensors, options, 1); });
  };
  CHECK(contains(says([](auto& t, auto&) { t.scales = nullptr; }), "adamw8: no data"));
  CHECK(contains(says([](auto& t, auto&) { t.count = -1; }), "-1 elements"));
  CHECK(contains(says([](auto&, auto& o) { o.element_offset = 33; }), "element offset 33 is inside a block"));
  CHECK(contains(says([](auto&, auto& o) { o.element_offset = -32; }), "negative"));
  CHECK(contains(says([](auto&, auto& o) { o.step = 0; }), "adamw8: step 0: steps are counted from one"));
  CHECK(contains(says([](auto&, auto& o) { o.lr = NAN; }), "learning rate"));
  CHECK(contains(message_of<Error>([&] { adamw8(good, usual, 0); }), "at least one"));
}

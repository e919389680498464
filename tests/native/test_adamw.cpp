#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "check.h"
#include "core/adamw.h"
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

std::uint16_t bf16(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  return static_cast<std::uint16_t>(bits >> 16);
}

float wide(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The tensors of a step as bytes, in the given formats, so that results can be compared bit by bit.
struct Case {
  FloatFormat state = FloatFormat::kFloat32;
  FloatFormat grad = FloatFormat::kFloat32;
  CopyFormat copy = CopyFormat::kNone;
  std::int64_t count = 0;
  std::vector<char> p, g, m, v, c;

  Case(FloatFormat state_, FloatFormat grad_, CopyFormat copy_, std::int64_t count_)
      : state(state_), grad(grad_), copy(copy_), count(count_) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < count; ++i) {
      add(p, state, normal(random));
      add(g, grad, normal(random) * 0.1f);
      add(m, state, normal(random) * 0.01f);
      add(v, state, std::fabs(normal(random)) * 0.001f);
      add(c, FloatFormat::kBFloat16, 0);
    }
  }

  static void add(std::vector<char>& to, FloatFormat format, float value) {
    char bytes[4];
    if (format == FloatFormat::kFloat32) {
      std::memcpy(bytes, &value, 4);
    } else {
      const std::uint16_t half = format == FloatFormat::kBFloat16
                                     ? bf16(value)
                                     : static_cast<std::uint16_t>((value < 0 ? 0x8000 : 0) | 0x2000 |
                                                                  (static_cast<int>(std::fabs(value) * 5000) & 0xFFF));
      std::memcpy(bytes, &half, 2);
    }
    to.insert(to.end(), bytes, bytes + format_bytes(format));
  }

  void run(std::int64_t begin, std::int64_t end, std::int64_t offset, int threads, SimdLevel level, int step = 3) {
    const std::int64_t wide_state = format_bytes(state);
    const AdamWTensors tensors{p.data() + begin * wide_state,
                               g.data() + begin * format_bytes(grad),
                               m.data() + begin * wide_state,
                               v.data() + begin * wide_state,
                               copy == CopyFormat::kNone ? nullptr : c.data() + begin * 2,
                               state,
                               grad,
                               copy,
                               end - begin};
    adamw(tensors, {step, 1e-3, 0.9, 0.999, 1e-8, 0.01, 0.5, 1234567890123ull, offset + begin}, threads, level);
  }

  [[nodiscard]] bool same(const Case& other) const {
    return p == other.p && m == other.m && v == other.v && c == other.c && g == other.g;
  }
};

constexpr FloatFormat kFormats[] = {FloatFormat::kFloat32, FloatFormat::kFloat16, FloatFormat::kBFloat16};

template <class Body>
void for_all_formats(Body body) {
  for (const FloatFormat state : {FloatFormat::kFloat32, FloatFormat::kBFloat16}) {
    for (const FloatFormat grad : kFormats) {
      for (const CopyFormat copy : {CopyFormat::kNone, CopyFormat::kFloat16, CopyFormat::kBFloat16}) {
        body(state, grad, copy);
      }
    }
  }
}

}  // namespace

TEST(adamw_bits_depend_on_no_instruction_set_thread_or_slice) {
  for_all_formats([](FloatFormat state, FloatFormat grad, CopyFormat copy) {
    constexpr std::int64_t kCount = 40'013;
    Case whole(state, grad, copy, kCount);
    const Case before = whole;
    whole.run(0, kCount, 5, 1, SimdLevel::kPortable);
    CHECK(whole.p != before.p && whole.m != before.m && whole.v != before.v && whole.g == before.g);
    CHECK((whole.c != before.c) == (copy != CopyFormat::kNone));
    for (const SimdLevel level : levels_here()) {
      Case threaded = before;
      threaded.run(0, kCount, 5, 3, level);
      CHECK_NOTE(threaded.same(whole), simd_level_name(level) + " threads");
      Case sliced = before;
      for (const auto& [begin, end] : {std::pair<int, int>{20'000, 40'013}, {0, 1}, {1, 27}, {27, 63}, {63, 20'000}}) {
        sliced.run(begin, end, 5, 2, level);
      }
      CHECK_NOTE(sliced.same(whole), simd_level_name(level) + " slices");
    }
  });
}

TEST(adamw_touches_nothing_outside_its_elements) {
  for_all_formats([](FloatFormat state, FloatFormat grad, CopyFormat copy) {
    for (const SimdLevel level : levels_here()) {
      Case all(state, grad, copy, 200);
      const Case before = all;
      all.run(37, 150, 11, 1, level);  // the sanitizer checks the ends of the buffers, this test those of the slice
      for (const auto& [now, then, bytes] :
           {std::tuple{&all.p, &before.p, format_bytes(state)}, std::tuple{&all.c, &before.c, std::int64_t{2}}}) {
        CHECK(std::equal(now->begin(), now->begin() + 37 * bytes, then->begin()));
        CHECK(std::equal(now->begin() + 150 * bytes, now->end(), then->begin() + 150 * bytes));
      }
      for (std::int64_t count = 0; count < 70; ++count) {
        Case exact(state, grad, copy, count);
        exact.run(0, count, 3, 2, level);
      }
    }
  });
}

TEST(adamw_is_the_formula) {
  Case one(FloatFormat::kFloat32, FloatFormat::kFloat32, CopyFormat::kNone, 1000);
  const Case before = one;
  one.run(0, 1000, 0, 1, best_simd_level(), 2);
  const auto value = [](const std::vector<char>& data, std::size_t i) {
    float out = 0;
    std::memcpy(&out, data.data() + 4 * i, 4);
    return static_cast<double>(out);
  };
  for (std::size_t i = 0; i < 1000; ++i) {
    const double g = value(before.g, i) * 0.5;
    const double m = 0.9 * value(before.m, i) + 0.1 * g;
    const double v = 0.999 * value(before.v, i) + 0.001 * g * g;
    const double step = 1e-3 / (1 - 0.81) * m / (std::sqrt(v / (1 - 0.998001)) + 1e-8);
    const double p = value(before.p, i) * (1 - 1e-5) - step;
    CHECK(std::fabs(value(one.p, i) - p) <= 1e-6 * std::fmax(1, std::fabs(p)));
    CHECK(std::fabs(value(one.m, i) - m) <= 1e-6 * std::fabs(m) + 1e-9);
    CHECK(std::fabs(value(one.v, i) - v) <= 1e-6 * v);
  }
}

// The mean of the rounded values over many random numbers equals the exact value, for each of the three states.
TEST(adamw_stochastic_rounding_has_no_bias) {
  constexpr int kCount = 1 << 17;
  std::vector<std::uint16_t> p(kCount, bf16(1.0f)), g(kCount, bf16(0.5f)), m(kCount, bf16(0.25f)),
      v(kCount, bf16(0.25f));
  adamw({p.data(), g.data(), m.data(), v.data(), nullptr, FloatFormat::kBFloat16, FloatFormat::kBFloat16,
         CopyFormat::kNone, kCount},
        {10, 1e-3, 0.9, 0.999, 1e-8, 0.0}, 2);
  const double c1 = 1 - std::pow(0.9, 10);
  const double c2 = 1 - std::pow(0.999, 10);
  const double exact_p = 1 - 1e-3 / c1 * 0.275 / std::sqrt(0.25 / c2);
  for (const auto& [data, exact] : {std::pair{&p, exact_p}, {&m, 0.275}, {&v, 0.25}}) {
    double sum = 0;
    for (const std::uint16_t half : *data) {
      sum += wide(half);
    }
    const double ulp = std::exp2(std::floor(std::log2(exact)) - 7);
    CHECK_NOTE(std::fabs(sum / kCount - exact) < 5 * 0.5 * ulp / std::sqrt(kCount),
               std::to_string(sum / kCount) + " for " + std::to_string(exact));
  }
}

// The Python tests check the random numbers themselves against the papers.
TEST(adamw_noise_is_a_function_of_seed_step_and_element) {
  const auto run = [](std::uint64_t seed, std::int64_t step, std::int64_t offset) {
    Case one(FloatFormat::kBFloat16, FloatFormat::kBFloat16, CopyFormat::kNone, 500);
    adamw({one.p.data(), one.g.data(), one.m.data(), one.v.data(), nullptr, one.state, one.grad, one.copy, 500},
          {step, 0.0, 0.9, 0.999, 1e-8, 0.0, 1.0, seed, offset}, 1);
    return one.m;
  };
  const auto base = run(1, 1, 0);
  CHECK(base == run(1, 1, 0));
  CHECK(base != run(2, 1, 0));
  CHECK(base != run(1ull << 32 | 1, 1, 0));
  CHECK(base != run(1, 2, 0));
  CHECK(base != run(1, 1 + (1ll << 32), 0));
  CHECK(base != run(1, 1, 1));
  CHECK(base != run(1, 1, 1ll << 40));
}

TEST(adamw_names_what_is_not_finite_and_leaves_it) {
  for (const SimdLevel level : levels_here()) {
    for (const std::size_t place : {0ul, 40ul, 999ul}) {
      struct Bad {
        std::vector<char> Case::* tensor;
        float value;
        std::string says;
      };
      for (const Bad& bad :
           {Bad{&Case::p, INFINITY, "parameter is inf"}, Bad{&Case::g, NAN, "gradient is nan"},
            Bad{&Case::m, -INFINITY, "momentum is -inf"}, Bad{&Case::v, NAN, "variance is nan"},
            Bad{&Case::v, -1.0f, "variance is negative"}, Bad{&Case::g, 3e38f, "update is not finite"}}) {
        Case one(FloatFormat::kFloat32, FloatFormat::kFloat32, CopyFormat::kNone, 1000);
        std::memcpy((one.*bad.tensor).data() + 4 * place, &bad.value, 4);
        const Case before = one;
        const std::string message = message_of<Error>([&] { one.run(0, 1000, 96, 2, level); });
        CHECK_NOTE(contains(message, bad.says) && contains(message, "step 3"), bad.says + " | " + message);
        CHECK(bad.value == 3e38f || contains(message, "element " + std::to_string(96 + place) + " "));
        CHECK(std::memcmp(one.p.data() + 4 * place, before.p.data() + 4 * place, 4) == 0);
        CHECK(std::memcmp(one.p.data() + 4 * 500, before.p.data() + 4 * 500, 4) != 0);
      }
    }
  }
}

TEST(adamw_rounds_no_nan_to_a_number) {
  // With all bits of the fraction set, adding noise below them carries into the sign, unless the code checks for NaN.
  const std::pair<FloatFormat, std::uint32_t> nans[] = {
      {FloatFormat::kFloat32, 0x7FFFFFFFu}, {FloatFormat::kFloat16, 0x7FFFu}, {FloatFormat::kBFloat16, 0x7FFFu}};
  for (const SimdLevel level : levels_here()) {
    for (const auto& [format, nan] : nans) {
      for (std::size_t place = 0; place < 320; ++place) {
        Case one(FloatFormat::kBFloat16, format, CopyFormat::kNone, 320);
        const auto bytes = static_cast<std::size_t>(format_bytes(format));
        std::memcpy(one.g.data() + bytes * place, &nan, bytes);
        const Case before = one;
        const std::string message = message_of<Error>([&] { one.run(0, 320, 0, 1, level); });
        CHECK_NOTE(contains(message, "gradient is nan at element " + std::to_string(place) + " "), message);
        CHECK(std::memcmp(one.p.data() + 2 * place, before.p.data() + 2 * place, 2) == 0);
      }
    }
  }
}

TEST(adamw_bad_arguments) {
  float x = 1;
  const AdamWTensors good{&x, &x, &x, &x, nullptr, FloatFormat::kFloat32, FloatFormat::kFloat32, CopyFormat::kNone, 1};
  const AdamWOptions usual{1, 1e-3, 0.9, 0.999, 1e-8, 0.0};
  const auto says = [&](auto change) {
    AdamWTensors tensors = good;
    AdamWOptions options = usual;
    change(tensors, options);
    return message_of<Error>([&] { adamw(tensors, options, 1); });
  };
  CHECK(contains(says([](auto& t, auto&) { t.grad = nullptr; }), "no data"));
  CHECK(contains(says([](auto& t, auto&) { t.count = -1; }), "-1 elements"));
  CHECK(contains(says([](auto& t, auto&) { t.state_format = FloatFormat::kFloat16; }), "not supported"));
  CHECK(contains(says([](auto& t, auto&) { t.copy_format = CopyFormat::kFloat16; }), "format"));
  CHECK(contains(says([](auto&, auto& o) { o.step = 0; }), "counted from one"));
  CHECK(contains(says([](auto&, auto& o) { o.beta1 = 1; }), "beta1"));
  CHECK(contains(says([](auto&, auto& o) { o.beta2 = -0.1; }), "beta2"));
  CHECK(contains(says([](auto&, auto& o) { o.lr = NAN; }), "learning rate"));
  CHECK(contains(says([](auto&, auto& o) { o.epsilon = -1; }), "epsilon"));
  CHECK(contains(says([](auto&, auto& o) { o.weight_decay = INFINITY; }), "weight decay"));
  CHECK(contains(says([](auto&, auto& o) { o.grad_scale = INFINITY; }), "gradient scale"));
  CHECK(contains(says([](auto&, auto& o) { o.element_offset = -1; }), "negative"));
  CHECK(contains(message_of<Error>([&] { adamw(good, usual, 0); }), "at least one"));
}

// 16 lanes in plain C++: the reference that every other instruction set must match bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "simd_kernels.h"

namespace memascend {
namespace {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float float_of_f16(std::uint16_t half) {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t rest = half & 0x7FFFu;
  if (rest >= 0x7C00u) {  // infinite, or NaN, which becomes quiet
    return float_of(sign | 0x7F800000u | (rest & 0x3FFu) << 13 | (rest > 0x7C00u ? 0x400000u : 0u));
  }
  if (rest < 0x400u) {
    return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
  }
  return float_of(sign | ((rest << 13) + (112u << 23)));
}

// Rounds to nearest, ties to even.
inline std::uint16_t f16_of(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t rest = bits & 0x7FFFFFFFu;
  if (rest > 0x7F800000u) {
    return static_cast<std::uint16_t>(sign | 0x7E00u | (rest >> 13 & 0x1FFu));
  }
  if (rest >= 0x47800000u) {  // 65536 and more
    return static_cast<std::uint16_t>(sign | 0x7C00u);
  }
  if (rest < 0x38800000u) {  // subnormal: the last bits of the sum are the result, rounded by the addition
    return static_cast<std::uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
  }
  return static_cast<std::uint16_t>(sign | ((rest - (112u << 23) + 0xFFFu + (rest >> 13 & 1u)) >> 13));
}

// Rounds to nearest, ties to even.
inline std::uint16_t bf16_of(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
    return static_cast<std::uint16_t>(bits >> 16 | 0x40u);
  }
  return static_cast<std::uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// One AES block in the byte order of the instructions: byte 0 is the lowest.
struct Block {
  std::uint8_t byte[16];
};

constexpr std::uint8_t times_two(std::uint8_t a) { return static_cast<std::uint8_t>(a << 1 ^ (a & 0x80 ? 0x1B : 0)); }

struct SBox {
  std::uint8_t of[256] = {};
};

// The S-box of FIPS 197: the inverse in GF(2^8), then an affine map. 3 generates the multiplicative group, and 0xF6 is
// its inverse.
constexpr SBox make_s_box() {
  SBox box;
  std::uint8_t p = 1;
  std::uint8_t q = 1;
  do {
    p = static_cast<std::uint8_t>(p ^ times_two(p));
    q = static_cast<std::uint8_t>(q ^ q << 1);
    q = static_cast<std::uint8_t>(q ^ q << 2);
    q = static_cast<std::uint8_t>(q ^ q << 4);
    q = static_cast<std::uint8_t>(q & 0x80 ? q ^ 0x09 : q);
    const unsigned twice = q | static_cast<unsigned>(q) << 8;
    box.of[p] = static_cast<std::uint8_t>(q ^ twice >> 7 ^ twice >> 6 ^ twice >> 5 ^ twice >> 4 ^ 0x63);
  } while (p != 1);
  box.of[0] = 0x63;
  return box;
}

inline constexpr SBox kSBox = make_s_box();

inline Block xored(Block block, const std::uint64_t (&key)[2]) {
  std::uint8_t bytes[16];
  std::memcpy(bytes, key, 16);
  for (int i = 0; i < 16; ++i) {
    block.byte[i] ^= bytes[i];
  }
  return block;
}

inline Block substituted_and_shifted(const Block& in) {
  Block out;
  for (int i = 0; i < 16; ++i) {
    out.byte[i] = kSBox.of[in.byte[(i + 4 * (i % 4)) % 16]];
  }
  return out;
}

inline Block mixed(const Block& in) {
  Block out;
  for (int i = 0; i < 16; ++i) {
    const auto at = [&](int row) { return in.byte[i / 4 * 4 + (i + row) % 4]; };
    out.byte[i] = static_cast<std::uint8_t>(times_two(at(0)) ^ times_two(at(1)) ^ at(1) ^ at(2) ^ at(3));
  }
  return out;
}

// The random block of the counter (number, step), and the same block after one more AES round.
struct TwoBlocks {
  Block block, next;
};

inline TwoBlocks ars(std::uint64_t number, const AdamWFactors& f) {
  Block block;
  std::memcpy(block.byte, &number, 8);
  std::memcpy(block.byte + 8, &f.step, 8);
  block = xored(block, f.round_key[0]);
  for (int round = 1; round < kArsRounds; ++round) {
    block = xored(mixed(substituted_and_shifted(block)), f.round_key[round]);
  }
  block = xored(substituted_and_shifted(block), f.round_key[kArsRounds]);
  return {block, xored(mixed(substituted_and_shifted(block)), f.round_key[kArsRounds + 1])};
}

struct Portable {
  static constexpr int kTogether = 1;  // groups with 8-bit moments that are stepped before any is coded
  struct Floats {
    float lane[16];
  };
  struct Halves {
    std::uint16_t lane[16];
  };
  struct Doubles {
    double lane[32];
  };
  struct Two {
    Floats a, b;
  };
  struct Packed {
    std::uint16_t lane[32];  // a group of bf16
  };
  struct Noise {
    Packed param, momentum, variance;
  };
  struct Codes {
    std::uint8_t lane[32];  // of a group, one byte per element
  };

  template <class Result, class Make>
  static Result each(Make make) {
    Result out;
    for (int k = 0; k < 16; ++k) {
      out.lane[k] = make(k);
    }
    return out;
  }

  static Floats set(float value) {
    return each<Floats>([&](int) { return value; });
  }
  static Floats load_f32(const float* p) {
    return each<Floats>([&](int k) { return p[k]; });
  }
  static Floats load_f16(const std::uint16_t* p) {
    return each<Floats>([&](int k) { return float_of_f16(p[k]); });
  }
  static Floats load_bf16(const std::uint16_t* p) {
    return each<Floats>([&](int k) { return float_of(static_cast<std::uint32_t>(p[k]) << 16); });
  }
  static void store_f32(float* p, const Floats& a) { std::memcpy(p, a.lane, sizeof a.lane); }
  static void store_f16(std::uint16_t* p, const Floats& a) { std::memcpy(p, to_f16(a).lane, 32); }
  static void store_bf16(std::uint16_t* p, const Floats& a) { std::memcpy(p, to_bf16(a).lane, 32); }
  static void store_pair(std::uint16_t* p, const Halves& low, const Halves& high, bool) {
    std::memcpy(p, low.lane, 32);
    std::memcpy(p + 16, high.lane, 32);
  }
  static void fence() {}

  static Floats sub(const Floats& a, const Floats& b) {
    return each<Floats>([&](int k) { return a.lane[k] - b.lane[k]; });
  }
  static Floats mul(const Floats& a, const Floats& b) {
    return each<Floats>([&](int k) { return a.lane[k] * b.lane[k]; });
  }
  static Floats div(const Floats& a, const Floats& b) {
    return each<Floats>([&](int k) { return a.lane[k] / b.lane[k]; });
  }
  static Floats sqrt(const Floats& a) {
    return each<Floats>([&](int k) { return std::sqrt(a.lane[k]); });
  }
  static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    return each<Floats>([&](int k) { return std::fma(a.lane[k], b.lane[k], c.lane[k]); });
  }
  template <class... More>
  static bool any_not_finite(const More&... floats) {
    bool bad = false;
    for (const Floats* one : {&floats...}) {
      for (const float value : one->lane) {
        bad |= (bits_of(value) & 0x7F800000u) == 0x7F800000u;
      }
    }
    return bad;
  }
  // For bf16: tests whether any exponent is all ones.
  static bool any_packed_not_finite(const Packed& a, const Packed& b) {
    bool bad = false;
    for (int k = 0; k < 32; ++k) {
      bad |= (a.lane[k] & 0x7F80) == 0x7F80 || (b.lane[k] & 0x7F80) == 0x7F80;
    }
    return bad;
  }

  static Halves to_f16(const Floats& a) {
    return each<Halves>([&](int k) { return f16_of(a.lane[k]); });
  }
  static Halves to_bf16(const Floats& a) {
    return each<Halves>([&](int k) { return bf16_of(a.lane[k]); });
  }
  static Floats widen_f16(const Halves& a) { return load_f16(a.lane); }
  static Floats widen(const Halves& a) { return load_bf16(a.lane); }

  static Packed load_packed(const std::uint16_t* p) {
    Packed out;
    std::memcpy(out.lane, p, sizeof out.lane);
    return out;
  }
  static void store_packed(std::uint16_t* p, const Packed& a, bool) { std::memcpy(p, a.lane, sizeof a.lane); }
  // Returns the even and the odd elements, widened.
  static Two split(const Packed& a) {
    const auto part = [&](int odd) {
      return each<Floats>([&](int k) { return float_of(static_cast<std::uint32_t>(a.lane[2 * k + odd]) << 16); });
    };
    return {part(0), part(1)};
  }
  static Two deinterleave(const Floats& first, const Floats& last) {
    const auto at = [&](int i) { return i < 16 ? first.lane[i] : last.lane[i - 16]; };
    return {each<Floats>([&](int k) { return at(2 * k); }), each<Floats>([&](int k) { return at(2 * k + 1); })};
  }
  static Two interleave(const Floats& even, const Floats& odd) {
    const auto at = [&](int i) { return i % 2 == 0 ? even.lane[i / 2] : odd.lane[i / 2]; };
    return {each<Floats>([&](int k) { return at(k); }), each<Floats>([&](int k) { return at(16 + k); })};
  }
  static Packed round(const Floats& even, const Floats& odd, const Packed& noise) {
    Packed out;
    for (int k = 0; k < 16; ++k) {
      out.lane[2 * k] = static_cast<std::uint16_t>((bits_of(even.lane[k]) + noise.lane[2 * k]) >> 16);
      out.lane[2 * k + 1] = static_cast<std::uint16_t>((bits_of(odd.lane[k]) + noise.lane[2 * k + 1]) >> 16);
    }
    return out;
  }

  static Noise noise(std::uint64_t first_block, const AdamWFactors& f) {
    Noise out;
    for (std::uint64_t k = 0; k < 4; ++k) {
      const TwoBlocks both = ars(first_block + k, f);
      std::memcpy(out.param.lane + 8 * k, both.block.byte, 16);
      std::memcpy(out.variance.lane + 8 * k, both.next.byte, 16);
    }
    for (int i = 0; i < 32; ++i) {
      out.momentum.lane[i] = out.param.lane[i] ^ out.variance.lane[i];
    }
    return out;
  }

  static Codes load_codes(const std::uint8_t* p) {
    Codes out;
    std::memcpy(out.lane, p, sizeof out.lane);
    return out;
  }
  static void store_codes(std::uint8_t* p, const Codes& a) { std::memcpy(p, a.lane, sizeof a.lane); }
  // Returns the even and the odd elements, times 2 to the (biased) exponent.
  static Two decode_signed(const Codes& codes, std::uint32_t exponent) {
    const auto part = [&](int odd) {
      return each<Floats>([&](int k) {
        const std::uint32_t code = codes.lane[2 * k + odd];
        const float value = decoded((code & 0x7Fu) << kMomentumShift, exponent);
        return float_of(bits_of(value) | (code & 0x80u) << 24);
      });
    };
    return {part(0), part(1)};
  }
  static Two decode_unsigned(const Codes& codes, std::uint32_t exponent) {
    const auto part = [&](int odd) {
      return each<Floats>(
          [&](int k) { return decoded(static_cast<std::uint32_t>(codes.lane[2 * k + odd]) << kRootShift, exponent); });
    };
    return {part(0), part(1)};
  }
  // Returns the upper 16 bits of the largest root, and below them those of the largest momentum without its sign.
  static std::uint32_t largest(const Floats& m_even, const Floats& m_odd, const Floats& r_even, const Floats& r_odd) {
    std::uint32_t momentum = 0;
    std::uint32_t root = 0;
    for (int k = 0; k < 16; ++k) {
      momentum = std::max({momentum, bits_of(m_even.lane[k]) & 0x7FFFFFFFu, bits_of(m_odd.lane[k]) & 0x7FFFFFFFu});
      root = std::max({root, bits_of(r_even.lane[k]), bits_of(r_odd.lane[k])});
    }
    return momentum >> 16 | (root & 0xFFFF0000u);
  }
  // All numbers must be below 2 to the (biased) exponent + 1, by at least the last step between codes.
  static Codes encode_signed(const Two& values, std::uint32_t exponent, const Packed& noise) {
    Codes out;
    for (int i = 0; i < 32; ++i) {
      const std::uint32_t bits = bits_of((i % 2 == 0 ? values.a : values.b).lane[i / 2]);
      const std::uint32_t code = encoded(float_of(bits & 0x7FFFFFFFu), exponent, noise.lane[i], kMomentumShift);
      out.lane[i] = static_cast<std::uint8_t>((code & 0x7Fu) | (bits >> 24 & 0x80u));
    }
    return out;
  }
  // The smallest code is one, since a root of zero would make a step infinite.
  static Codes encode_unsigned(const Two& values, std::uint32_t exponent, const Packed& noise) {
    Codes out;
    for (int i = 0; i < 32; ++i) {
      const float value = (i % 2 == 0 ? values.a : values.b).lane[i / 2];
      out.lane[i] =
          static_cast<std::uint8_t>(std::max(encoded(value, exponent, noise.lane[i], kRootShift) & 0xFFu, 1u));
    }
    return out;
  }

  static Doubles zero_sums() { return {}; }
  static void add_squares(Doubles& sums, const Floats& low, const Floats& high) {
    for (int k = 0; k < 16; ++k) {  // a product of two floats is exact in double, so fusing the sum changes nothing
      sums.lane[k] += static_cast<double>(low.lane[k]) * static_cast<double>(low.lane[k]);
      sums.lane[16 + k] += static_cast<double>(high.lane[k]) * static_cast<double>(high.lane[k]);
    }
  }
  static double total(const Doubles& sums) {
    double left[32];
    std::memcpy(left, sums.lane, sizeof left);
    for (int half = 16; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) {
        left[k] += left[k + half];
      }
    }
    return left[0];
  }

 private:
  static float decoded(std::uint32_t code, std::uint32_t exponent) {
    const float z = float_of(code + code_base(exponent));
    return std::min(z, std::fma(z, 2.0f, -float_of(linear_bits(exponent))));
  }
  static std::uint32_t encoded(float value, std::uint32_t exponent, std::uint32_t noise, int shift) {
    const float z = std::max(value, std::fma(value, 0.5f, float_of(half_linear_bits(exponent))));
    return (bits_of(z) + (noise << (shift - 16)) + unscaling(exponent)) >> shift;
  }
};

}  // namespace
}  // namespace memascend

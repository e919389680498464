// 16 lanes in two AVX2 registers (with FMA, F16C and AES). Include this after the target pragma.
#pragma once

#include <cstdint>

#include "simd_kernels.h"
#include "simd_x86.h"

namespace memascend {
namespace {

struct Avx2 {
  static constexpr int kTogether = 1;  // groups with 8-bit moments that are stepped before any is coded
  struct Floats {
    __m256 low, high;
  };
  struct Words {
    __m256i low, high;
  };
  using Halves = __m256i;
  struct Doubles {
    __m256d part[8];
  };
  struct Two {
    Floats a, b;
  };
  using Packed = Words;  // a group of bf16
  struct Noise {
    Packed param, momentum, variance;
  };
  using Codes = Words;  // of a group: each 32-bit lane has the code of an even element and above it that of the odd one

  static Floats set(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Floats load_f32(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Floats load_f16(const std::uint16_t* p) { return widen_f16(load_halves(p)); }
  static Floats load_bf16(const std::uint16_t* p) { return widen(load_halves(p)); }
  static void store_f32(float* p, Floats a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
  }
  static void store_f16(std::uint16_t* p, Floats a) { store_halves(p, to_f16(a)); }
  static void store_bf16(std::uint16_t* p, Floats a) { store_halves(p, to_bf16(a)); }
  static void store_pair(std::uint16_t* p, Halves low, Halves high, bool stream) {
    auto* out = reinterpret_cast<__m256i*>(p);
    if (stream) {
      _mm256_stream_si256(out, low);
      _mm256_stream_si256(out + 1, high);
    } else {
      _mm256_storeu_si256(out, low);
      _mm256_storeu_si256(out + 1, high);
    }
  }
  static void fence() { _mm_sfence(); }

  static Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  static Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
  static Floats sqrt(Floats a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
  static Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  // Zero times a number is zero, but NaN if the number is infinite or NaN.
  template <class... More>
  static bool any_not_finite(Floats first, More... rest) {
    const Floats zero = set(0);
    Floats sum = mul(first, zero);
    ((sum = fma(rest, zero, sum)), ...);
    const __m256 both = _mm256_add_ps(sum.low, sum.high);
    return _mm256_movemask_ps(_mm256_cmp_ps(both, both, _CMP_UNORD_Q)) != 0;
  }

  // For bf16: tests whether any exponent is all ones.
  static bool any_packed_not_finite(const Packed& a, const Packed& b) {
    const __m256i exponent = _mm256_set1_epi16(0x7F80);
    const auto full = [&](__m256i x) { return _mm256_cmpeq_epi16(_mm256_and_si256(x, exponent), exponent); };
    const __m256i any =
        _mm256_or_si256(_mm256_or_si256(full(a.low), full(a.high)), _mm256_or_si256(full(b.low), full(b.high)));
    return _mm256_movemask_epi8(any) != 0;
  }

  static Halves to_f16(Floats a) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_set_m128i(_mm256_cvtps_ph(a.high, kNearest), _mm256_cvtps_ph(a.low, kNearest));
  }
  static Halves to_bf16(Floats a) { return cut({nearest(a.low), nearest(a.high)}); }
  static Floats widen_f16(Halves a) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
  }
  static Floats widen(Halves a) {
    return {widen_eight(_mm256_castsi256_si128(a)), widen_eight(_mm256_extracti128_si256(a, 1))};
  }

  static Packed load_packed(const std::uint16_t* p) { return {load_halves(p), load_halves(p + 16)}; }
  static void store_packed(std::uint16_t* p, const Packed& a, bool stream) { store_pair(p, a.low, a.high, stream); }
  // Returns the even and the odd elements, widened.
  static Two split(const Packed& a) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
    return {
        {_mm256_castsi256_ps(_mm256_slli_epi32(a.low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(a.high, 16))},
        {_mm256_castsi256_ps(_mm256_and_si256(a.low, upper)), _mm256_castsi256_ps(_mm256_and_si256(a.high, upper))}};
  }
  static Two deinterleave(Floats first, Floats last) {
    return {{every_second<0x88>(first), every_second<0x88>(last)},
            {every_second<0xDD>(first), every_second<0xDD>(last)}};
  }
  static Two interleave(Floats even, Floats odd) { return {zip(even.low, odd.low), zip(even.high, odd.high)}; }
  static Packed round(Floats even, Floats odd, const Packed& noise) {
    return {round_half(even.low, odd.low, noise.low), round_half(even.high, odd.high, noise.high)};
  }

  static Noise noise(std::uint64_t first_block, const AdamWFactors& f) {
    const __m128i first = counter(first_block, f);
    __m128i block[4];
    for (int k = 0; k < 4; ++k) {
      block[k] = _mm_xor_si128(_mm_add_epi64(first, _mm_set_epi64x(0, k)), key(f, 0));
    }
    for (int round = 1; round < kArsRounds; ++round) {
      for (__m128i& one : block) {
        one = _mm_aesenc_si128(one, key(f, round));
      }
    }
    __m128i next[4];
    for (int k = 0; k < 4; ++k) {
      block[k] = _mm_aesenclast_si128(block[k], key(f, kArsRounds));
      next[k] = _mm_aesenc_si128(block[k], key(f, kArsRounds + 1));
    }
    return with_momentum({_mm256_set_m128i(block[1], block[0]), _mm256_set_m128i(block[3], block[2])},
                         {_mm256_set_m128i(next[1], next[0]), _mm256_set_m128i(next[3], next[2])});
  }

  static Codes load_codes(const std::uint8_t* p) {
    const auto* in = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(in)), _mm256_cvtepu16_epi32(_mm_loadu_si128(in + 1))};
  }
  static void store_codes(std::uint8_t* p, const Codes& a) {
    const __m256i packed = _mm256_packus_epi32(a.low, a.high);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
  }
  // Returns the even and the odd elements, times 2 to the (biased) exponent.
  static Two decode_signed(const Codes& a, std::uint32_t exponent) {
    const auto low = decode_signed_half(a.low, exponent);
    const auto high = decode_signed_half(a.high, exponent);
    return {{low.even, high.even}, {low.odd, high.odd}};
  }
  static Two decode_unsigned(const Codes& a, std::uint32_t exponent) {
    constexpr std::uint32_t kMask = 0xFFu << kRootShift;
    return {{decoded(_mm256_slli_epi32(a.low, kRootShift), kMask, exponent),
             decoded(_mm256_slli_epi32(a.high, kRootShift), kMask, exponent)},
            {decoded(_mm256_slli_epi32(a.low, kRootShift - 8), kMask, exponent),
             decoded(_mm256_slli_epi32(a.high, kRootShift - 8), kMask, exponent)}};
  }
  // Returns the upper 16 bits of the largest root, and below them those of the largest momentum without its sign.
  static std::uint32_t largest(Floats m_even, Floats m_odd, Floats r_even, Floats r_odd) {
    const __m256i momentum =
        top({magnitude(m_even.low), magnitude(m_even.high)}, {magnitude(m_odd.low), magnitude(m_odd.high)});
    const __m256i both = _mm256_blend_epi16(_mm256_srli_epi32(momentum, 16), top(r_even, r_odd), 0xAA);
    __m128i four = _mm_max_epu16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    four = _mm_max_epu16(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epu16(four, _mm_shuffle_epi32(four, 0xB1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
  }
  // All numbers must be below 2 to the (biased) exponent + 1, by at least the last step between codes.
  static Codes encode_signed(const Two& values, std::uint32_t exponent, const Packed& noise) {
    return {encode_signed_half({values.a.low, values.b.low}, exponent, noise.low),
            encode_signed_half({values.a.high, values.b.high}, exponent, noise.high)};
  }
  // The smallest code is one, since a root of zero would make a step infinite.
  static Codes encode_unsigned(const Two& values, std::uint32_t exponent, const Packed& noise) {
    return {encode_unsigned_half({values.a.low, values.b.low}, exponent, noise.low),
            encode_unsigned_half({values.a.high, values.b.high}, exponent, noise.high)};
  }

  static Doubles zero_sums() {
    Doubles sums;
    for (__m256d& part : sums.part) {
      part = _mm256_setzero_pd();
    }
    return sums;
  }
  static void add_squares(Doubles& sums, Floats low, Floats high) {
    add_square(sums.part, low.low);
    add_square(sums.part + 2, low.high);
    add_square(sums.part + 4, high.low);
    add_square(sums.part + 6, high.high);
  }
  static double total(const Doubles& sums) {
    __m256d left[8];
    for (int k = 0; k < 8; ++k) {
      left[k] = sums.part[k];
    }
    for (int half = 4; half > 0; half /= 2) {
      for (int k = 0; k < half; ++k) {
        left[k] = _mm256_add_pd(left[k], left[k + half]);
      }
    }
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(left[0]), _mm256_extractf128_pd(left[0], 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }

 protected:
  static Noise with_momentum(const Packed& param, const Packed& variance) {
    return {param, {_mm256_xor_si256(param.low, variance.low), _mm256_xor_si256(param.high, variance.high)}, variance};
  }
  static __m128i counter(std::uint64_t block, const AdamWFactors& f) {
    return _mm_set_epi64x(static_cast<long long>(f.step), static_cast<long long>(block));
  }
  static __m128i key(const AdamWFactors& f, int round) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(f.round_key[round]));
  }

 private:
  struct Eights {
    __m256 even, odd;
  };
  static __m256i ones(std::uint32_t mask) { return _mm256_set1_epi32(static_cast<int>(mask)); }
  static __m256i masked(__m256i a, std::uint32_t mask) { return _mm256_and_si256(a, ones(mask)); }
  static __m256 magnitude(__m256 a) { return _mm256_and_ps(a, _mm256_castsi256_ps(ones(0x7FFFFFFFu))); }
  static __m256i top(Floats a, Floats b) {
    return _mm256_max_epu32(_mm256_max_epu32(_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)),
                            _mm256_max_epu32(_mm256_castps_si256(b.low), _mm256_castps_si256(b.high)));
  }
  static __m256 decoded(__m256i code, std::uint32_t mask, std::uint32_t exponent) {
    const __m256 z = _mm256_castsi256_ps(_mm256_add_epi32(masked(code, mask), ones(code_base(exponent))));
    const __m256 linear = _mm256_castsi256_ps(ones(linear_bits(exponent)));
    return _mm256_min_ps(z, _mm256_fmsub_ps(z, _mm256_set1_ps(2), linear));
  }
  // Returns `value` with the sign bit of `top`.
  static __m256 with_sign(__m256 value, __m256i top) {
    return _mm256_or_ps(value, _mm256_castsi256_ps(masked(top, 0x80000000u)));
  }
  static Eights decode_signed_half(__m256i a, std::uint32_t exponent) {
    constexpr std::uint32_t kMask = 0x7Fu << kMomentumShift;
    return {with_sign(decoded(_mm256_slli_epi32(a, kMomentumShift), kMask, exponent), _mm256_slli_epi32(a, 24)),
            with_sign(decoded(_mm256_slli_epi32(a, kMomentumShift - 8), kMask, exponent), _mm256_slli_epi32(a, 16))};
  }
  static Words encoded(const Eights& values, std::uint32_t exponent, __m256i noise, int up) {
    const __m256 half = _mm256_set1_ps(0.5f);
    const __m256 half_linear = _mm256_castsi256_ps(ones(half_linear_bits(exponent)));
    const __m256i unscale = ones(unscaling(exponent));
    const __m256i even = _mm256_or_si256(masked(_mm256_slli_epi32(noise, up), 0xFFFFu << up), unscale);
    const __m256i odd = _mm256_or_si256(masked(_mm256_srli_epi32(noise, 16 - up), 0xFFFFu << up), unscale);
    const __m256 a = _mm256_max_ps(values.even, _mm256_fmadd_ps(values.even, half, half_linear));
    const __m256 b = _mm256_max_ps(values.odd, _mm256_fmadd_ps(values.odd, half, half_linear));
    return {_mm256_add_epi32(_mm256_castps_si256(a), even), _mm256_add_epi32(_mm256_castps_si256(b), odd)};
  }
  static __m256i encode_signed_half(const Eights& values, std::uint32_t exponent, __m256i noise) {
    const Words bits = encoded({magnitude(values.even), magnitude(values.odd)}, exponent, noise, kMomentumShift - 16);
    const __m256i codes = _mm256_or_si256(masked(_mm256_srli_epi32(bits.low, kMomentumShift), 0x7Fu),
                                          masked(_mm256_srli_epi32(bits.high, kMomentumShift - 8), 0x7F00u));
    const __m256i signs = _mm256_or_si256(masked(_mm256_srli_epi32(_mm256_castps_si256(values.even), 24), 0x80u),
                                          masked(_mm256_srli_epi32(_mm256_castps_si256(values.odd), 16), 0x8000u));
    return _mm256_or_si256(codes, signs);
  }
  static __m256i encode_unsigned_half(const Eights& values, std::uint32_t exponent, __m256i noise) {
    const __m256i one = ones(kCodeBase + (1u << kRootShift));
    const Words bits = encoded(values, exponent, noise, kRootShift - 16);
    return _mm256_or_si256(masked(_mm256_srli_epi32(_mm256_max_epu32(bits.low, one), kRootShift), 0xFFu),
                           masked(_mm256_srli_epi32(_mm256_max_epu32(bits.high, one), kRootShift - 8), 0xFF00u));
  }
  template <int kWhich>
  static __m256 every_second(Floats a) {
    const __m256 mixed = _mm256_shuffle_ps(a.low, a.high, kWhich);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xD8));
  }
  static Floats zip(__m256 even, __m256 odd) {
    const __m256 low = _mm256_unpacklo_ps(even, odd);
    const __m256 high = _mm256_unpackhi_ps(even, odd);
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
  }
  static __m256i round_half(__m256 even, __m256 odd, __m256i noise) {
    const __m256i below = _mm256_and_si256(noise, _mm256_set1_epi32(0xFFFF));
    const __m256i a = _mm256_add_epi32(_mm256_castps_si256(even), below);
    const __m256i b = _mm256_add_epi32(_mm256_castps_si256(odd), _mm256_srli_epi32(noise, 16));
    return _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xAA);
  }
  static Halves load_halves(const std::uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_halves(std::uint16_t* p, Halves a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
  static __m256 widen_eight(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static __m256i nearest(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, quiet, nan);
  }
  static Halves cut(Words bits) {
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(bits.low, 16), _mm256_srli_epi32(bits.high, 16));
    return _mm256_permute4x64_epi64(packed, 0xD8);
  }
  static void add_square(__m256d* sums, __m256 eight) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(eight));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(eight, 1));
    sums[0] = _mm256_fmadd_pd(low, low, sums[0]);
    sums[1] = _mm256_fmadd_pd(high, high, sums[1]);
  }
};

}  // namespace
}  // namespace memascend

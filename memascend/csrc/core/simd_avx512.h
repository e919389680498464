// 16 lanes in one AVX-512 register (F, BW, DQ, VL, VAES). Include this after the target pragma.
#pragma once

#include <cstdint>

#include "simd_kernels.h"
#include "simd_x86.h"

namespace memascend {
namespace {

struct Avx512 {
  static constexpr int kTogether = 8;  // groups with 8-bit moments that are stepped before any is coded
  using Floats = __m512;
  using Halves = __m256i;
  struct Doubles {
    __m512d part[4];
  };
  struct Two {
    Floats a, b;
  };
  using Packed = __m512i;  // a group of bf16
  struct Noise {
    Packed param, momentum, variance;
  };
  using Codes =
      __m512i;  // of a group: each 32-bit lane has the code of an even element and above it that of the odd one

  static Floats set(float value) { return _mm512_set1_ps(value); }
  static Floats load_f32(const float* p) { return _mm512_loadu_ps(p); }
  static Floats load_f16(const std::uint16_t* p) { return widen_f16(load_halves(p)); }
  static Floats load_bf16(const std::uint16_t* p) { return widen(load_halves(p)); }
  static void store_f32(float* p, Floats a) { _mm512_storeu_ps(p, a); }
  static void store_f16(std::uint16_t* p, Floats a) { store_halves(p, to_f16(a)); }
  static void store_bf16(std::uint16_t* p, Floats a) { store_halves(p, to_bf16(a)); }
  static void store_pair(std::uint16_t* p, Halves low, Halves high, bool stream) {
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    if (stream) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), both);
    } else {
      _mm512_storeu_si512(p, both);
    }
  }
  static void fence() { _mm_sfence(); }

  static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats sqrt(Floats a) { return _mm512_sqrt_ps(a); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  // Zero times a number is zero, but NaN if the number is infinite or NaN.
  template <class... More>
  static bool any_not_finite(Floats first, More... rest) {
    const __m512 zero = _mm512_setzero_ps();
    __m512 sum = _mm512_mul_ps(first, zero);
    ((sum = _mm512_fmadd_ps(rest, zero, sum)), ...);
    return _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q) != 0;
  }
  // For bf16: tests whether any exponent is all ones.
  static bool any_packed_not_finite(Packed a, Packed b) {
    const __m512i exponent = _mm512_set1_epi16(0x7F80);
    const auto full = [&](__m512i x) { return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent); };
    return (full(a) | full(b)) != 0;
  }

  static Halves to_f16(Floats a) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // Does not use vcvtneps2bf16, which treats subnormal numbers as zero.
  static Halves to_bf16(Floats a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
  static Floats widen_f16(Halves a) { return _mm512_cvtph_ps(a); }
  static Floats widen(Halves a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16)); }

  static Packed load_packed(const std::uint16_t* p) { return _mm512_loadu_si512(p); }
  static void store_packed(std::uint16_t* p, Packed a, bool stream) {
    if (stream) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), a);
    } else {
      _mm512_storeu_si512(p, a);
    }
  }
  // Returns the even and the odd elements, widened.
  static Two split(Packed a) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_and_si512(a, upper))};
  }
  static Two deinterleave(Floats first, Floats last) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return {_mm512_permutex2var_ps(first, even, last), _mm512_permutex2var_ps(first, odd, last)};
  }
  static Two interleave(Floats even, Floats odd) {
    const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    return {_mm512_permutex2var_ps(even, first, odd), _mm512_permutex2var_ps(even, last, odd)};
  }
  static Packed round(Floats even, Floats odd, Packed noise) {
    const __m512i below = _mm512_and_si512(noise, _mm512_set1_epi32(0xFFFF));
    const __m512i a = _mm512_add_epi32(_mm512_castps_si512(even), below);
    const __m512i b = _mm512_add_epi32(_mm512_castps_si512(odd), _mm512_srli_epi32(noise, 16));
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(a, 16), b);
  }

  static Noise noise(std::uint64_t first_block, const AdamWFactors& f) {
    const __m512i first =
        _mm512_broadcast_i64x2(_mm_set_epi64x(static_cast<long long>(f.step), static_cast<long long>(first_block)));
    __m512i block = _mm512_xor_si512(_mm512_add_epi64(first, _mm512_set_epi64(0, 3, 0, 2, 0, 1, 0, 0)), key(f, 0));
    for (int round = 1; round < kArsRounds; ++round) {
      block = _mm512_aesenc_epi128(block, key(f, round));
    }
    const Packed param = _mm512_aesenclast_epi128(block, key(f, kArsRounds));
    const Packed variance = _mm512_aesenc_epi128(param, key(f, kArsRounds + 1));
    return {param, _mm512_xor_si512(param, variance), variance};
  }

  static Codes load_codes(const std::uint8_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_codes(std::uint8_t* p, Codes a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
  }
  // Returns the even and the odd elements, times 2 to the (biased) exponent.
  static Two decode_signed(Codes a, std::uint32_t exponent) {
    constexpr std::uint32_t kMask = 0x7Fu << kMomentumShift;
    const __m512i sign = ones(0x80000000u);
    const __m512 even = decoded(_mm512_slli_epi32(a, kMomentumShift), kMask, exponent);
    const __m512 odd = decoded(_mm512_slli_epi32(a, kMomentumShift - 8), kMask, exponent);
    return {_mm512_castsi512_ps(and_or(_mm512_slli_epi32(a, 24), sign, _mm512_castps_si512(even))),
            _mm512_castsi512_ps(and_or(_mm512_slli_epi32(a, 16), sign, _mm512_castps_si512(odd)))};
  }
  static Two decode_unsigned(Codes a, std::uint32_t exponent) {
    constexpr std::uint32_t kMask = 0xFFu << kRootShift;
    return {decoded(_mm512_slli_epi32(a, kRootShift), kMask, exponent),
            decoded(_mm512_slli_epi32(a, kRootShift - 8), kMask, exponent)};
  }
  // Returns the upper 16 bits of the largest root, and below them those of the largest momentum without its sign.
  static std::uint32_t largest(Floats m_even, Floats m_odd, Floats r_even, Floats r_odd) {
    const __m512i momentum =
        _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(m_even)), _mm512_castps_si512(_mm512_abs_ps(m_odd)));
    const __m512i root = _mm512_max_epu32(_mm512_castps_si512(r_even), _mm512_castps_si512(r_odd));
    const __m512i both = _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(momentum, 16), root);
    const __m256i eight = _mm256_max_epu16(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    __m128i four = _mm_max_epu16(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epu16(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epu16(four, _mm_shuffle_epi32(four, 0xB1));
    return static_cast<std::uint32_t>(_mm_cvtsi128_si32(four));
  }
  // All numbers must be below 2 to the (biased) exponent + 1, by at least the last step between codes.
  static Codes encode_signed(const Two& values, std::uint32_t exponent, Packed noise) {
    const Pair bits = encoded({_mm512_abs_ps(values.a), _mm512_abs_ps(values.b)}, exponent, noise, kMomentumShift - 16);
    const __m512i even = choose(0x7F, _mm512_srli_epi32(bits.even, kMomentumShift),
                                _mm512_srli_epi32(_mm512_castps_si512(values.a), 24));
    const __m512i odd = choose(0x7F00, _mm512_srli_epi32(bits.odd, kMomentumShift - 8),
                               _mm512_srli_epi32(_mm512_castps_si512(values.b), 16));
    return choose(0xFF, even, odd);
  }
  // The smallest code is one, since a root of zero would make a step infinite.
  static Codes encode_unsigned(const Two& values, std::uint32_t exponent, Packed noise) {
    const __m512i one = ones(kCodeBase + (1u << kRootShift));
    const Pair bits = encoded(values, exponent, noise, kRootShift - 16);
    return choose(0xFF, _mm512_srli_epi32(_mm512_max_epu32(bits.even, one), kRootShift),
                  _mm512_srli_epi32(_mm512_max_epu32(bits.odd, one), kRootShift - 8));
  }

  static Doubles zero_sums() {
    return {{_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()}};
  }
  static void add_squares(Doubles& sums, Floats low, Floats high) {
    add_square(sums.part[0], _mm512_castps512_ps256(low));
    add_square(sums.part[1], _mm512_extractf32x8_ps(low, 1));
    add_square(sums.part[2], _mm512_castps512_ps256(high));
    add_square(sums.part[3], _mm512_extractf32x8_ps(high, 1));
  }
  static double total(const Doubles& sums) {
    const __m512d eight =
        _mm512_add_pd(_mm512_add_pd(sums.part[0], sums.part[2]), _mm512_add_pd(sums.part[1], sums.part[3]));
    const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }

 private:
  struct Pair {
    __m512i even, odd;
  };
  static __m512i ones(std::uint32_t mask) { return _mm512_set1_epi32(static_cast<int>(mask)); }
  static __m512 float_of(std::uint32_t bits) { return _mm512_castsi512_ps(ones(bits)); }
  // (a & b) | c
  static __m512i and_or(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0xEA); }
  // Returns the bits of `a` where the mask has ones, and those of `b` elsewhere.
  static __m512i choose(std::uint32_t mask, __m512i a, __m512i b) {
    return _mm512_ternarylogic_epi32(ones(mask), a, b, 0xCA);
  }
  static __m512 decoded(__m512i code, std::uint32_t mask, std::uint32_t exponent) {
    const __m512 z =
        _mm512_castsi512_ps(_mm512_add_epi32(_mm512_and_si512(code, ones(mask)), ones(code_base(exponent))));
    return _mm512_min_ps(z, _mm512_fmsub_ps(z, _mm512_set1_ps(2), float_of(linear_bits(exponent))));
  }
  static Pair encoded(const Two& values, std::uint32_t exponent, __m512i noise, int up) {
    const __m512 half = _mm512_set1_ps(0.5f);
    const __m512 half_linear = float_of(half_linear_bits(exponent));
    const __m512i mask = ones(0xFFFFu << up);
    const __m512i unscale = ones(unscaling(exponent));
    const __m512i even = and_or(_mm512_slli_epi32(noise, static_cast<unsigned>(up)), mask, unscale);
    const __m512i odd = and_or(_mm512_srli_epi32(noise, static_cast<unsigned>(16 - up)), mask, unscale);
    const __m512 a = _mm512_max_ps(values.a, _mm512_fmadd_ps(values.a, half, half_linear));
    const __m512 b = _mm512_max_ps(values.b, _mm512_fmadd_ps(values.b, half, half_linear));
    return {_mm512_add_epi32(_mm512_castps_si512(a), even), _mm512_add_epi32(_mm512_castps_si512(b), odd)};
  }
  static __m512i key(const AdamWFactors& f, int round) {
    return _mm512_broadcast_i64x2(_mm_loadu_si128(reinterpret_cast<const __m128i*>(f.round_key[round])));
  }
  static Halves load_halves(const std::uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_halves(std::uint16_t* p, Halves a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
  static void add_square(__m512d& sum, __m256 eight) {
    const __m512d wide = _mm512_cvtps_pd(eight);
    sum = _mm512_fmadd_pd(wide, wide, sum);
  }
};

}  // namespace
}  // namespace memascend

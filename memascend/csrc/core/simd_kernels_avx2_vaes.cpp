#if defined(__x86_64__)

// Standard headers come before the target pragma: their inline functions must be compiled for the baseline only.
#include <cstdint>
#include <string>

#include "simd_kernels.h"
#include "simd_x86.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,aes,vaes")
#include "simd_avx2.h"
#include "simd_kernels_template.h"

namespace memascend {
namespace {

struct Avx2Vaes : Avx2 {
  static Noise noise(std::uint64_t first_block, const AdamWFactors& f) {
    const __m256i first = _mm256_add_epi64(two(counter(first_block, f)), _mm256_set_epi64x(0, 1, 0, 0));
    __m256i low = _mm256_xor_si256(first, two(key(f, 0)));
    __m256i high = _mm256_xor_si256(_mm256_add_epi64(first, _mm256_set_epi64x(0, 2, 0, 2)), two(key(f, 0)));
    for (int round = 1; round < kArsRounds; ++round) {
      low = _mm256_aesenc_epi128(low, two(key(f, round)));
      high = _mm256_aesenc_epi128(high, two(key(f, round)));
    }
    low = _mm256_aesenclast_epi128(low, two(key(f, kArsRounds)));
    high = _mm256_aesenclast_epi128(high, two(key(f, kArsRounds)));
    return with_momentum({low, high}, {_mm256_aesenc_epi128(low, two(key(f, kArsRounds + 1))),
                                       _mm256_aesenc_epi128(high, two(key(f, kArsRounds + 1)))});
  }

 private:
  static __m256i two(__m128i same) { return _mm256_broadcastsi128_si256(same); }
};

}  // namespace

const SimdKernels& simd_kernels_avx2_vaes() {
  static constexpr SimdKernels kernels = make_kernels<Avx2Vaes>();
  return kernels;
}

}  // namespace memascend
#pragma GCC pop_options

#endif

#if defined(__x86_64__)

// Standard headers come before the target pragma: their inline functions must be compiled for the baseline only.
#include <cstdint>
#include <string>

#include "simd_kernels.h"
#include "simd_x86.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,aes")
#include "simd_avx2.h"
#include "simd_kernels_template.h"

namespace memascend {

const SimdKernels& simd_kernels_avx2() {
  static constexpr SimdKernels kernels = make_kernels<Avx2>();
  return kernels;
}

}  // namespace memascend
#pragma GCC pop_options

#endif

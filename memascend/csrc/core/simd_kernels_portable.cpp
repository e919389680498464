#include "simd_kernels.h"
#include "simd_kernels_template.h"
#include "simd_portable.h"

namespace memascend {

const SimdKernels& simd_kernels_portable() {
  static constexpr SimdKernels kernels = make_kernels<Portable>();
  return kernels;
}

const SimdKernels& simd_kernels(SimdLevel level) {
#if defined(__x86_64__)
  if (level == SimdLevel::kAvx512) {
    return simd_kernels_avx512();
  }
  if (level == SimdLevel::kAvx2Vaes) {
    return simd_kernels_avx2_vaes();
  }
  if (level == SimdLevel::kAvx2) {
    return simd_kernels_avx2();
  }
#endif
  (void)level;
  return simd_kernels_portable();
}

}  // namespace memascend

#include "simd.h"

#include "errors.h"

namespace memascend {

SimdLevel best_simd_level() {
#if defined(__x86_64__)
  static const SimdLevel level = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("aes");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool vaes = __builtin_cpu_supports("vaes");
    if (!avx2) {
      return SimdLevel::kPortable;
    }
    return !vaes ? SimdLevel::kAvx2 : avx512 ? SimdLevel::kAvx512 : SimdLevel::kAvx2Vaes;
  }();
  return level;
#else
  return SimdLevel::kPortable;
#endif
}

std::string simd_level_name(SimdLevel level) {
  switch (level) {
    case SimdLevel::kAvx512:
      return "avx512";
    case SimdLevel::kAvx2Vaes:
      return "avx2_vaes";
    case SimdLevel::kAvx2:
      return "avx2";
    case SimdLevel::kPortable:
      break;
  }
  return "portable";
}

void require_runnable(const char* what, SimdLevel level, int threads) {
  if (threads < 1) {
    throw Error(ErrorKind::kInvalidArgument,
                std::string(what) + ": " + std::to_string(threads) + " threads: use at least one");
  }
  if (level > best_simd_level()) {
    throw Error(ErrorKind::kInvalidArgument, std::string(what) + ": this processor has no " + simd_level_name(level) +
                                                 ": use " + simd_level_name(best_simd_level()));
  }
}

}  // namespace memascend

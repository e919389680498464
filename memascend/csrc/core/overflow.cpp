#include "overflow.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>

#include "errors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace memascend {
namespace {

// Between two looks at the shared flag a thread scans this much: small enough to stop early, large enough to stream.
constexpr std::int64_t kChunkBytes = 256 * 1024;

template <typename Word>
bool scan_portable(const void* data, std::int64_t count, Word mask) {
  const auto* words = static_cast<const Word*>(data);
  constexpr std::int64_t kBlock = 1024;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t end = std::min(count, begin + kBlock);
    unsigned found = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      found |= static_cast<unsigned>((words[i] & mask) == mask);
    }
    if (found != 0) {
      return true;
    }
  }
  return false;
}

#if defined(__x86_64__)

#define MEMASCEND_TARGET(features) __attribute__((target(features)))

MEMASCEND_TARGET("avx2")
bool scan_avx2(const void* data, std::int64_t bytes, std::uint32_t mask, int word_bytes) {
  const auto* cursor = static_cast<const char*>(data);
  const __m256i wanted = _mm256_set1_epi32(static_cast<int>(mask));
  const std::int64_t vectors = bytes / 32;
  constexpr std::int64_t kBlock = 64;
  for (std::int64_t begin = 0; begin < vectors; begin += kBlock) {
    const std::int64_t end = std::min(vectors, begin + kBlock);
    __m256i found = _mm256_setzero_si256();
    for (std::int64_t i = begin; i < end; ++i) {
      const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(cursor + 32 * i));
      const __m256i exponent = _mm256_and_si256(value, wanted);
      found = _mm256_or_si256(found, word_bytes == 4 ? _mm256_cmpeq_epi32(exponent, wanted)
                                                     : _mm256_cmpeq_epi16(exponent, wanted));
    }
    if (_mm256_movemask_epi8(found) != 0) {
      return true;
    }
  }
  return false;
}

MEMASCEND_TARGET("avx512f,avx512bw")
bool scan_avx512(const void* data, std::int64_t bytes, std::uint32_t mask, int word_bytes) {
  const auto* cursor = static_cast<const char*>(data);
  const __m512i wanted = _mm512_set1_epi32(static_cast<int>(mask));
  const std::int64_t vectors = bytes / 64;
  constexpr std::int64_t kBlock = 32;
  for (std::int64_t begin = 0; begin < vectors; begin += kBlock) {
    const std::int64_t end = std::min(vectors, begin + kBlock);
    std::uint64_t found = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const __m512i value = _mm512_loadu_si512(cursor + 64 * i);
      const __m512i exponent = _mm512_and_si512(value, wanted);
      found |= word_bytes == 4 ? _mm512_cmpeq_epi32_mask(exponent, wanted) : _mm512_cmpeq_epi16_mask(exponent, wanted);
    }
    if (found != 0) {
      return true;
    }
  }
  return false;
}

#endif

struct Layout {
  int word_bytes;
  std::uint32_t mask;  // exponent bits, repeated to fill 32
};

Layout layout_of(FloatFormat format) {
  switch (format) {
    case FloatFormat::kFloat32:
      return {4, 0x7F800000u};
    case FloatFormat::kFloat16:
      return {2, 0x7C007C00u};
    case FloatFormat::kBFloat16:
      return {2, 0x7F807F80u};
  }
  throw Error(ErrorKind::kInvalidArgument, "overflow check: unknown floating-point format");
}

bool scan_words(const void* data, std::int64_t count, const Layout& layout) {
  return layout.word_bytes == 4
             ? scan_portable<std::uint32_t>(data, count, layout.mask)
             : scan_portable<std::uint16_t>(data, count, static_cast<std::uint16_t>(layout.mask));
}

// One thread's piece: whole vectors by the widest instructions, the rest word by word.
bool scan(const char* data, std::int64_t count, const Layout& layout, SimdLevel level) {
#if defined(__x86_64__)
  const std::int64_t bytes = count * layout.word_bytes;
  const std::int64_t vector_bytes = level == SimdLevel::kAvx512 ? 64 : 32;
  const std::int64_t whole = level == SimdLevel::kPortable ? 0 : bytes / vector_bytes * vector_bytes;
  if (level == SimdLevel::kAvx512 && scan_avx512(data, whole, layout.mask, layout.word_bytes)) {
    return true;
  }
  if (level == SimdLevel::kAvx2 && scan_avx2(data, whole, layout.mask, layout.word_bytes)) {
    return true;
  }
  return scan_words(data + whole, count - whole / layout.word_bytes, layout);
#else
  (void)level;
  return scan_words(data, count, layout);
#endif
}

void check(const void* data, std::int64_t count, int threads, SimdLevel level) {
  if (count < 0 || (count > 0 && data == nullptr)) {
    throw Error(ErrorKind::kInvalidArgument, "overflow check: no data for " + std::to_string(count) + " elements");
  }
  if (threads < 1) {
    throw Error(ErrorKind::kInvalidArgument,
                "overflow check: " + std::to_string(threads) + " threads: use at least one");
  }
  if (level > best_simd_level()) {
    throw Error(ErrorKind::kInvalidArgument,
                "overflow check: this processor has no " + simd_level_name(level) + ": use " +
                    simd_level_name(best_simd_level()));
  }
}

struct Dimension {
  std::int64_t size;
  std::int64_t stride;
};

// Drops repeated dimensions, sorts by stride (outermost first) and joins neighbours that lie one behind the other.
std::vector<Dimension> coalesce(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides) {
  std::vector<Dimension> kept;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && strides[i] != 0) {
      kept.push_back({sizes[i], strides[i]});
    }
  }
  std::sort(kept.begin(), kept.end(), [](const auto& a, const auto& b) { return a.stride > b.stride; });
  std::vector<Dimension> joined;
  for (const Dimension& dimension : kept) {
    if (!joined.empty() && joined.back().stride == dimension.size * dimension.stride) {
      joined.back() = {joined.back().size * dimension.size, dimension.stride};
    } else {
      joined.push_back(dimension);
    }
  }
  return joined;
}

bool scan_spread(const char* data, const Dimension& inner, const Layout& layout) {
  for (std::int64_t i = 0; i < inner.size; ++i) {
    if (scan_words(data + i * inner.stride * layout.word_bytes, 1, layout)) {
      return true;
    }
  }
  return false;
}

bool walk(const char* data, const std::vector<Dimension>& dimensions, std::size_t depth, FloatFormat format,
          int threads) {
  const Layout layout = layout_of(format);
  if (depth == dimensions.size()) {
    return scan_words(data, 1, layout);
  }
  const Dimension& dimension = dimensions[depth];
  if (depth + 1 == dimensions.size()) {
    return dimension.stride == 1 ? has_overflow(data, dimension.size, format, threads)
                                 : scan_spread(data, dimension, layout);
  }
  for (std::int64_t i = 0; i < dimension.size; ++i) {
    if (walk(data + i * dimension.stride * layout.word_bytes, dimensions, depth + 1, format, threads)) {
      return true;
    }
  }
  return false;
}

}  // namespace

SimdLevel best_simd_level() {
#if defined(__x86_64__)
  static const SimdLevel level = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) {
      return SimdLevel::kAvx512;
    }
    return __builtin_cpu_supports("avx2") ? SimdLevel::kAvx2 : SimdLevel::kPortable;
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
    case SimdLevel::kAvx2:
      return "avx2";
    case SimdLevel::kPortable:
      break;
  }
  return "portable";
}

bool has_overflow(const void* data, std::int64_t count, FloatFormat format, int threads, SimdLevel level) {
  check(data, count, threads, level);
  const Layout layout = layout_of(format);
  const auto* bytes = static_cast<const char*>(data);
  const std::int64_t chunk = kChunkBytes / layout.word_bytes;
  const std::int64_t chunks = (count + chunk - 1) / chunk;
  const int team = static_cast<int>(std::min<std::int64_t>(threads, chunks));
  if (team <= 1) {
    for (std::int64_t i = 0; i < chunks; ++i) {
      if (scan(bytes + i * chunk * layout.word_bytes, std::min(chunk, count - i * chunk), layout, level)) {
        return true;
      }
    }
    return false;
  }
  std::atomic<bool> found{false};
#pragma omp parallel for num_threads(team) schedule(static)
  for (std::int64_t i = 0; i < chunks; ++i) {
    if (!found.load(std::memory_order_relaxed) &&
        scan(bytes + i * chunk * layout.word_bytes, std::min(chunk, count - i * chunk), layout, level)) {
      found.store(true, std::memory_order_relaxed);
    }
  }
  return found.load();
}

bool has_overflow_strided(const void* data, std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides,
                          FloatFormat format, int threads) {
  if (sizes.size() != strides.size()) {
    throw Error(ErrorKind::kInvalidArgument, "overflow check: as many strides as sizes are needed");
  }
  if (std::any_of(strides.begin(), strides.end(), [](std::int64_t stride) { return stride < 0; })) {
    throw Error(ErrorKind::kInvalidArgument, "overflow check: negative strides are not supported");
  }
  if (std::any_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size == 0; })) {
    return false;
  }
  return walk(static_cast<const char*>(data), coalesce(sizes, strides), 0, format, threads);
}

}  // namespace memascend

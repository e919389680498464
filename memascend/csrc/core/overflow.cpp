#include "overflow.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "errors.h"
#include "simd_x86.h"
#include "threads.h"

namespace memascend {
namespace {

// A thread scans one chunk between two checks of the shared flag: small enough to stop early, large enough to stream.
// Chunks of a small tensor are smaller, so that every thread has several.
constexpr std::int64_t kLeastChunkBytes = 256 * 1024;
constexpr std::int64_t kMostChunkBytes = 1024 * 1024;
constexpr std::int64_t kChunksAThread = 4;

std::int64_t chunk_bytes(std::int64_t bytes, int threads) {
  const std::int64_t shared = bytes / (kChunksAThread * threads) / kLeastChunkBytes * kLeastChunkBytes;
  return std::clamp(shared, kLeastChunkBytes, kMostChunkBytes);
}

// A block is scanned without branches; its result is checked at its end.
constexpr std::int64_t kBlockBytes = 4096;

template <typename Word>
bool scan_portable(const void* data, std::int64_t count, Word mask) {
  const auto* words = static_cast<const Word*>(data);
  constexpr std::int64_t kBlock = kBlockBytes / sizeof(Word);
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

std::uint64_t read_portable(const void* data, std::int64_t bytes) {
  const auto* cursor = static_cast<const char*>(data);
  std::uint64_t all = 0;
  for (std::int64_t i = 0; i + 8 <= bytes; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, cursor + i, 8);
    all |= word;
  }
  for (std::int64_t i = bytes / 8 * 8; i < bytes; ++i) {
    all |= static_cast<unsigned char>(cursor[i]);
  }
  return all;
}

#if defined(__x86_64__)

#define MEMASCEND_TARGET(features) __attribute__((target(features)))

// The vector kernels keep the largest exponent: one AND (which also loads) and one MAX per vector, no branch within a
// block. With the sign masked away the signed maximum equals the unsigned one, and a value is not finite if and only if
// it equals the mask. There are four maxima, so that no instruction waits for the one before.

MEMASCEND_TARGET("avx2")
inline __m256i max256(__m256i a, __m256i b, bool wide) {
  return wide ? _mm256_max_epi32(a, b) : _mm256_max_epi16(a, b);
}

inline const __m256i* vector_at(const char* data) { return reinterpret_cast<const __m256i*>(data); }

// Hardware prefetchers stop at the end of a page, so a core that reads one stream waits at every page until they start
// again. Therefore four quarters are read concurrently. Measured with two cores: on Zen 3 one stream reaches two thirds
// to three quarters of the bandwidth of four, on Zen 4 0.84 to 0.92 of it. Two or eight streams are no better. Software
// prefetching (half a kilobyte to a page ahead) costs bandwidth: a tenth to a quarter on Zen 3 with one stream, 2 to
// 10 % on Zen 4 with one and with four.
constexpr int kStreams = 4;
constexpr std::int64_t kLine = 64;

template <bool kWide>
MEMASCEND_TARGET("avx2")
bool scan_avx2(const char* data, std::int64_t bytes, std::uint32_t mask) {
  const __m256i wanted = _mm256_set1_epi32(static_cast<int>(mask));
  const std::int64_t quarter = bytes / (kStreams * kLine) * kLine;
  __m256i most[kStreams] = {};
  const auto keep = [&](__m256i& most_here, const char* at) MEMASCEND_TARGET("avx2") {
    most_here = max256(most_here, _mm256_and_si256(_mm256_loadu_si256(vector_at(at)), wanted), kWide);
  };
  const auto hit = [&]() MEMASCEND_TARGET("avx2") {
    const __m256i all = max256(max256(most[0], most[1], kWide), max256(most[2], most[3], kWide), kWide);
    return _mm256_movemask_epi8(kWide ? _mm256_cmpeq_epi32(all, wanted) : _mm256_cmpeq_epi16(all, wanted)) != 0;
  };
  for (std::int64_t begin = 0; begin < quarter; begin += kBlockBytes / kStreams) {
    const std::int64_t end = std::min(quarter, begin + kBlockBytes / kStreams);
    for (std::int64_t i = begin; i < end; i += kLine) {
      for (int k = 0; k < kStreams; ++k) {
        keep(most[k], data + k * quarter + i);
        keep(most[k], data + k * quarter + i + kLine / 2);
      }
    }
    if (hit()) {
      return true;
    }
  }
  for (std::int64_t i = kStreams * quarter; i < bytes; i += kLine / 2) {
    keep(most[0], data + i);
  }
  return hit();
}

MEMASCEND_TARGET("avx512f,avx512bw")
inline __m512i max512(__m512i a, __m512i b, bool wide) {
  return wide ? _mm512_max_epi32(a, b) : _mm512_max_epi16(a, b);
}

template <bool kWide>
MEMASCEND_TARGET("avx512f,avx512bw")
bool scan_avx512(const char* data, std::int64_t bytes, std::uint32_t mask) {
  const __m512i wanted = _mm512_set1_epi32(static_cast<int>(mask));
  const std::int64_t quarter = bytes / (kStreams * kLine) * kLine;
  __m512i most[kStreams] = {};
  const auto keep = [&](__m512i& most_here, const char* at) MEMASCEND_TARGET("avx512f,avx512bw") {
    most_here = max512(most_here, _mm512_and_si512(_mm512_loadu_si512(at), wanted), kWide);
  };
  const auto hit = [&]() MEMASCEND_TARGET("avx512f,avx512bw") {
    const __m512i all = max512(max512(most[0], most[1], kWide), max512(most[2], most[3], kWide), kWide);
    return (kWide ? _mm512_cmpeq_epi32_mask(all, wanted) : _mm512_cmpeq_epi16_mask(all, wanted)) != 0;
  };
  for (std::int64_t begin = 0; begin < quarter; begin += kBlockBytes / kStreams) {
    const std::int64_t end = std::min(quarter, begin + kBlockBytes / kStreams);
    for (std::int64_t i = begin; i < end; i += kLine) {
      for (int k = 0; k < kStreams; ++k) {
        keep(most[k], data + k * quarter + i);
      }
    }
    if (hit()) {
      return true;
    }
  }
  return false;
}

MEMASCEND_TARGET("avx2")
std::uint64_t read_avx2(const char* data, std::int64_t bytes) {
  const std::int64_t quarter = bytes / (kStreams * kLine) * kLine;
  __m256i all[kStreams] = {};
  for (std::int64_t i = 0; i < quarter; i += kLine) {
    for (int k = 0; k < kStreams; ++k) {
      const char* at = data + k * quarter + i;
      const __m256i both =
          _mm256_or_si256(_mm256_loadu_si256(vector_at(at)), _mm256_loadu_si256(vector_at(at + kLine / 2)));
      all[k] = _mm256_or_si256(all[k], both);
    }
  }
  for (std::int64_t i = kStreams * quarter; i < bytes; i += kLine / 2) {
    all[0] = _mm256_or_si256(all[0], _mm256_loadu_si256(vector_at(data + i)));
  }
  const __m256i one = _mm256_or_si256(_mm256_or_si256(all[0], all[1]), _mm256_or_si256(all[2], all[3]));
  return static_cast<std::uint64_t>(_mm256_extract_epi64(one, 0) | _mm256_extract_epi64(one, 1) |
                                    _mm256_extract_epi64(one, 2) | _mm256_extract_epi64(one, 3));
}

MEMASCEND_TARGET("avx512f")
std::uint64_t read_avx512(const char* data, std::int64_t bytes) {
  const std::int64_t quarter = bytes / (kStreams * kLine) * kLine;
  __m512i all[kStreams] = {};
  for (std::int64_t i = 0; i < quarter; i += kLine) {
    for (int k = 0; k < kStreams; ++k) {
      all[k] = _mm512_or_si512(all[k], _mm512_loadu_si512(data + k * quarter + i));
    }
  }
  const __m512i one = _mm512_or_si512(_mm512_or_si512(all[0], all[1]), _mm512_or_si512(all[2], all[3]));
  return static_cast<std::uint64_t>(_mm512_reduce_or_epi64(one));
}

#endif

// Returns the bytes of an unrolled step; the remainder after the last whole step is scanned one element at a time.
std::int64_t step_bytes(SimdLevel level) { return level == SimdLevel::kAvx512 ? 256 : 128; }

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
  return layout.word_bytes == 4 ? scan_portable<std::uint32_t>(data, count, layout.mask)
                                : scan_portable<std::uint16_t>(data, count, static_cast<std::uint16_t>(layout.mask));
}

// Scans one chunk: whole steps with the widest instructions, the remainder one element at a time.
bool scan(const char* data, std::int64_t count, const Layout& layout, SimdLevel level) {
  std::int64_t whole = 0;
#if defined(__x86_64__)
  if (level != SimdLevel::kPortable) {
    const bool wide = layout.word_bytes == 4;
    whole = count * layout.word_bytes / step_bytes(level) * step_bytes(level);
    const auto kernel = level == SimdLevel::kAvx512 ? (wide ? scan_avx512<true> : scan_avx512<false>)
                                                    : (wide ? scan_avx2<true> : scan_avx2<false>);
    if (kernel(data, whole, layout.mask)) {
      return true;
    }
  }
#else
  (void)level;
#endif
  return scan_words(data + whole, count - whole / layout.word_bytes, layout);
}

std::uint64_t read_piece(const char* data, std::int64_t bytes, SimdLevel level) {
  std::int64_t whole = 0;
  std::uint64_t all = 0;
#if defined(__x86_64__)
  if (level != SimdLevel::kPortable) {
    whole = bytes / step_bytes(level) * step_bytes(level);
    all = level == SimdLevel::kAvx512 ? read_avx512(data, whole) : read_avx2(data, whole);
  }
#else
  (void)level;
#endif
  return all | read_portable(data + whole, bytes - whole);
}

void check(const void* data, std::int64_t count, int threads, SimdLevel level) {
  if (count < 0 || (count > 0 && data == nullptr)) {
    throw Error(ErrorKind::kInvalidArgument, "overflow check: no data for " + std::to_string(count) + " elements");
  }
  require_runnable("overflow check", level, threads);
}

struct Dimension {
  std::int64_t size;
  std::int64_t stride;
};

// Drops dimensions of size 1 or stride 0, sorts by stride (outermost first) and joins neighbours that are contiguous.
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

bool has_overflow(const void* data, std::int64_t count, FloatFormat format, int threads, SimdLevel level) {
  check(data, count, threads, level);
  const Layout layout = layout_of(format);
  const auto* bytes = static_cast<const char*>(data);
  const std::int64_t each = chunk_bytes(count * layout.word_bytes, threads);
  const std::int64_t chunk = each / layout.word_bytes;
  std::atomic<bool> found{false};
  parallel_chunks((count + chunk - 1) / chunk, threads, [&](std::int64_t i) {
    if (scan(bytes + i * each, std::min(chunk, count - i * chunk), layout, level)) {
      found.store(true, std::memory_order_relaxed);
      return false;
    }
    return true;
  });
  return found.load();
}

std::uint64_t read_all(const void* data, std::int64_t bytes, int threads, SimdLevel level) {
  check(data, bytes, threads, level);
  const auto* cursor = static_cast<const char*>(data);
  std::atomic<std::uint64_t> all{0};
  const std::int64_t each = chunk_bytes(bytes, threads);
  parallel_chunks((bytes + each - 1) / each, threads, [&](std::int64_t i) {
    all |= read_piece(cursor + i * each, std::min(each, bytes - i * each), level);
    return true;
  });
  return all.load();
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

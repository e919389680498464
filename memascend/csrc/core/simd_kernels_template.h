// The kernels, over a vector class V of 16 lanes (simd_portable.h, simd_avx2.h, simd_avx512.h). Included by one source
// file for each instruction set, behind that file's target pragma: so everything here has internal linkage.
//
// Stochastic rounding. fp32 to bf16 adds a uniform 16-bit number to the bits and cuts the low half off: the result is
// the neighbour above with the probability that makes the expectation exact. Element e of the whole tensor takes word
// e % 4 of the ARS-5 block (Salmon et al., SC'11: five rounds of AES, one instruction each) with the counter (e / 4, step)
// and the key (seed, 0), all of 64 bits. Its low half rounds the parameter, its high half the variance, and the exclusive
// or of the two the momentum: all three are uniform, and any two of them independent.
// Nothing else enters, so slices, threads and instruction sets change no bit.

#include <cstdint>

#include "simd_kernels.h"

namespace memascend {
namespace {

template <class V, FloatFormat F>
inline typename V::Floats load(const void* data, std::int64_t i) {
  if constexpr (F == FloatFormat::kFloat32) {
    return V::load_f32(static_cast<const float*>(data) + i);
  } else if constexpr (F == FloatFormat::kFloat16) {
    return V::load_f16(static_cast<const std::uint16_t*>(data) + i);
  } else {
    return V::load_bf16(static_cast<const std::uint16_t*>(data) + i);
  }
}

// Rounds to nearest, ties to even.
template <class V, FloatFormat F>
inline void store(void* data, std::int64_t i, typename V::Floats value) {
  if constexpr (F == FloatFormat::kFloat32) {
    V::store_f32(static_cast<float*>(data) + i, value);
  } else if constexpr (F == FloatFormat::kFloat16) {
    V::store_f16(static_cast<std::uint16_t*>(data) + i, value);
  } else {
    V::store_bf16(static_cast<std::uint16_t*>(data) + i, value);
  }
}

template <class V>
struct Updated {
  typename V::Floats param, momentum, variance;
};

template <class V, FloatFormat State, FloatFormat Grad>
inline Updated<V> update(const AdamWFactors& f, const AdamWPiece& piece, std::int64_t i) {
  const auto grad = V::mul(load<V, Grad>(piece.grad, i), V::set(f.grad_scale));
  auto momentum = load<V, State>(piece.momentum, i);
  auto variance = load<V, State>(piece.variance, i);
  auto param = load<V, State>(piece.param, i);
  momentum = V::fma(V::sub(grad, momentum), V::set(f.one_minus_beta1), momentum);
  variance = V::fma(V::mul(grad, grad), V::set(f.one_minus_beta2), V::mul(variance, V::set(f.beta2)));
  const auto divisor = V::fma(V::sqrt(variance), V::set(f.inverse_root_correction2), V::set(f.epsilon));
  const auto step = V::div(momentum, divisor);
  param = V::fma(step, V::set(-f.step_size), V::mul(param, V::set(f.decay)));
  return {param, momentum, variance};
}

template <class V, CopyFormat Copy>
inline void store_copy(void* copy, std::int64_t i, typename V::Floats low, typename V::Floats high, bool stream) {
  if constexpr (Copy == CopyFormat::kFloat16) {
    V::store_pair(static_cast<std::uint16_t*>(copy) + i, V::to_f16(low), V::to_f16(high), stream);
  } else if constexpr (Copy == CopyFormat::kBFloat16) {
    V::store_pair(static_cast<std::uint16_t*>(copy) + i, V::to_bf16(low), V::to_bf16(high), stream);
  }
}

template <class V, FloatFormat State, FloatFormat Grad, CopyFormat Copy>
std::int64_t adamw(const AdamWFactors& factors, const AdamWPiece& given) {
  const AdamWPiece piece = given;
  const AdamWFactors f = factors;  // a copy: no store can change it, so its numbers stay in registers
  std::int64_t bad_group = -1;
  // The copy is only written: past the caches, or its old content would be read first.
  const bool stream = Copy != CopyFormat::kNone && reinterpret_cast<std::uintptr_t>(piece.copy) % 64 == 0;
  for (std::int64_t group = 0; group < piece.groups; ++group) {
    const std::int64_t i = group * kGroup;
    auto low = update<V, State, Grad>(f, piece, i);
    auto high = update<V, State, Grad>(f, piece, i + 16);
    if (V::any_not_finite(low.param, low.momentum, low.variance, high.param, high.momentum, high.variance))
        [[unlikely]] {
      bad_group = bad_group < 0 ? group : bad_group;
      continue;
    }
    if constexpr (State == FloatFormat::kFloat32) {
      V::store_f32(static_cast<float*>(piece.param) + i, low.param);
      V::store_f32(static_cast<float*>(piece.param) + i + 16, high.param);
      V::store_f32(static_cast<float*>(piece.momentum) + i, low.momentum);
      V::store_f32(static_cast<float*>(piece.momentum) + i + 16, high.momentum);
      V::store_f32(static_cast<float*>(piece.variance) + i, low.variance);
      V::store_f32(static_cast<float*>(piece.variance) + i + 16, high.variance);
    } else {
      const auto words = V::random_words(static_cast<std::uint64_t>(piece.first_group + group) * 8, f);
      const auto noise = V::split(words);
      const auto put = [&](void* data, typename V::Floats a, typename V::Floats b, const typename V::Pair& random) {
        V::store_rounded(static_cast<std::uint16_t*>(data) + i, a, b, random);
      };
      if constexpr (Copy != CopyFormat::kNone) {  // of the parameter as it is kept
        low.param = V::widen(V::round(low.param, noise.param.low));
        high.param = V::widen(V::round(high.param, noise.param.high));
        V::store_pair(static_cast<std::uint16_t*>(piece.param) + i, V::to_bf16(low.param), V::to_bf16(high.param),
                      false);
      } else {
        put(piece.param, low.param, high.param, noise.param);
      }
      put(piece.momentum, low.momentum, high.momentum, noise.momentum);
      put(piece.variance, low.variance, high.variance, noise.variance);
    }
    store_copy<V, Copy>(piece.copy, i, low.param, high.param, stream);
  }
  if (stream) {
    V::fence();
  }
  return bad_group;
}

template <class V, FloatFormat In, FloatFormat Out>
double unscale(const void* data, void* out, std::int64_t groups, float scale, bool* finite) {
  typename V::Doubles sums = V::zero_sums();
  const auto factor = V::set(scale);
  const bool write = !(scale == 1.0f && data == out);
  bool good = true;
  for (std::int64_t i = 0; i < groups * kGroup; i += kGroup) {
    auto low = V::mul(load<V, In>(data, i), factor);
    auto high = V::mul(load<V, In>(data, i + 16), factor);
    if constexpr (Out == FloatFormat::kFloat16) {  // the norm is that of what is kept
      low = V::widen_f16(V::to_f16(low));
      high = V::widen_f16(V::to_f16(high));
    } else if constexpr (Out == FloatFormat::kBFloat16) {
      low = V::widen(V::to_bf16(low));
      high = V::widen(V::to_bf16(high));
    }
    good &= !V::any_not_finite(low, high);
    V::add_squares(sums, low, high);
    if (write) {
      store<V, Out>(out, i, low);
      store<V, Out>(out, i + 16, high);
    }
  }
  *finite = *finite && good;
  return V::total(sums);
}

template <class V, FloatFormat State, FloatFormat Grad>
constexpr void fill_copies(AdamWKernel (&kernels)[3]) {
  kernels[0] = &adamw<V, State, Grad, CopyFormat::kNone>;
  kernels[1] = &adamw<V, State, Grad, CopyFormat::kFloat16>;
  kernels[2] = &adamw<V, State, Grad, CopyFormat::kBFloat16>;
}

template <class V, FloatFormat State>
constexpr void fill_gradients(AdamWKernel (&kernels)[3][3]) {
  fill_copies<V, State, FloatFormat::kFloat32>(kernels[0]);
  fill_copies<V, State, FloatFormat::kFloat16>(kernels[1]);
  fill_copies<V, State, FloatFormat::kBFloat16>(kernels[2]);
}

template <class V>
constexpr SimdKernels make_kernels() {
  SimdKernels all{};
  fill_gradients<V, FloatFormat::kFloat32>(all.adamw[0]);
  fill_gradients<V, FloatFormat::kBFloat16>(all.adamw[1]);
  all.unscale[0][0] = all.unscale[0][1] = &unscale<V, FloatFormat::kFloat32, FloatFormat::kFloat32>;
  all.unscale[1][0] = &unscale<V, FloatFormat::kFloat16, FloatFormat::kFloat16>;
  all.unscale[1][1] = &unscale<V, FloatFormat::kFloat16, FloatFormat::kFloat32>;
  all.unscale[2][0] = &unscale<V, FloatFormat::kBFloat16, FloatFormat::kBFloat16>;
  all.unscale[2][1] = &unscale<V, FloatFormat::kBFloat16, FloatFormat::kFloat32>;
  return all;
}

}  // namespace
}  // namespace memascend

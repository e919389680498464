// The kernels, written for a vector class V of 16 lanes (simd_portable.h, simd_avx2.h, simd_avx512.h). One source file
// per instruction set includes this after its target pragma, so everything here has internal linkage.
//
// Stochastic rounding. To round fp32 to bf16, a uniform 16-bit number is added to the bits and the low half is cut off.
// The result is rounded up with the probability that makes its expectation exact. For the parameter, element e of the
// whole tensor uses half word e % 8 of the ARS-5 block (Salmon et al., SC'11: five rounds of AES, one instruction each)
// with the counter (e / 8, step) and the key (seed, 0), all of 64 bits. For the variance, it uses the same half word of
// that block after one more AES round; for the momentum, the exclusive or of the two. If a block is uniform, so is each
// of the three, and any two numbers of a block are independent: a round mixes every half word from two columns' worth
// of other bytes by a matrix whose square submatrices are all invertible. The random numbers depend on nothing else,
// so slices, threads and instruction sets do not change a bit.
//
// 8-bit codes are rounded in the same way and by the same numbers, three bits (momentum) or two (root of the variance)
// further up.
//
// Kernels with 16-bit or 8-bit states split a group into its even and its odd elements: a shift and a mask turn one
// vector of bf16 into two of fp32, and a shift and a blend turn two into one, whereas first and last halves would need
// shuffles.

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

template <class V>
inline Updated<V> update(const AdamWFactors& f, typename V::Floats grad, Updated<V> old) {
  grad = V::mul(grad, V::set(f.grad_scale));
  const auto momentum = V::fma(V::sub(grad, old.momentum), V::set(f.one_minus_beta1), old.momentum);
  const auto variance = V::fma(V::mul(grad, grad), V::set(f.one_minus_beta2), V::mul(old.variance, V::set(f.beta2)));
  const auto divisor = V::fma(V::sqrt(variance), V::set(f.inverse_root_correction2), V::set(f.epsilon));
  const auto step = V::div(momentum, divisor);
  return {V::fma(step, V::set(-f.step_size), V::mul(old.param, V::set(f.decay))), momentum, variance};
}

// The momentum need not be checked: if it is not finite, neither is the parameter computed from it.
template <class V>
inline bool bad(const Updated<V>& a, const Updated<V>& b) {
  return V::any_not_finite(a.param, b.param, a.variance, b.variance);
}

// Loads the even and the odd elements of a group.
template <class V, FloatFormat F>
inline typename V::Two split(const void* data, std::int64_t i) {
  if constexpr (F == FloatFormat::kBFloat16) {
    return V::split(V::load_packed(static_cast<const std::uint16_t*>(data) + i));
  } else {
    return V::deinterleave(load<V, F>(data, i), load<V, F>(data, i + 16));
  }
}

template <class V, CopyFormat Copy>
inline void store_copy(void* copy, std::int64_t i, typename V::Floats low, typename V::Floats high, bool stream) {
  if constexpr (Copy == CopyFormat::kFloat16) {
    V::store_pair(static_cast<std::uint16_t*>(copy) + i, V::to_f16(low), V::to_f16(high), stream);
  } else if constexpr (Copy == CopyFormat::kBFloat16) {
    V::store_pair(static_cast<std::uint16_t*>(copy) + i, V::to_bf16(low), V::to_bf16(high), stream);
  }
}

// Updates one group with fp32 states. Returns false if it is left unchanged.
template <class V, FloatFormat Grad, CopyFormat Copy>
inline bool step_f32(const AdamWFactors& f, const AdamWPiece& piece, std::int64_t group, bool stream) {
  constexpr FloatFormat kState = FloatFormat::kFloat32;
  const std::int64_t i = group * kGroup;
  const std::int64_t j = i + 16;
  const auto low = update<V>(
      f, load<V, Grad>(piece.grad, i),
      {load<V, kState>(piece.param, i), load<V, kState>(piece.momentum, i), load<V, kState>(piece.variance, i)});
  const auto high = update<V>(
      f, load<V, Grad>(piece.grad, j),
      {load<V, kState>(piece.param, j), load<V, kState>(piece.momentum, j), load<V, kState>(piece.variance, j)});
  if (bad<V>(low, high)) [[unlikely]] {
    return false;
  }
  V::store_f32(static_cast<float*>(piece.param) + i, low.param);
  V::store_f32(static_cast<float*>(piece.param) + j, high.param);
  V::store_f32(static_cast<float*>(piece.momentum) + i, low.momentum);
  V::store_f32(static_cast<float*>(piece.momentum) + j, high.momentum);
  V::store_f32(static_cast<float*>(piece.variance) + i, low.variance);
  V::store_f32(static_cast<float*>(piece.variance) + j, high.variance);
  store_copy<V, Copy>(piece.copy, i, low.param, high.param, stream);
  return true;
}

// Updates one group with bf16 states. Returns false if it is left unchanged.
template <class V, FloatFormat Grad, CopyFormat Copy>
inline bool step_bf16(const AdamWFactors& f, const AdamWPiece& piece, std::int64_t group, bool stream) {
  const std::int64_t i = group * kGroup;
  constexpr FloatFormat kState = FloatFormat::kBFloat16;
  const auto grad = split<V, Grad>(piece.grad, i);
  const auto param = split<V, kState>(piece.param, i);
  const auto momentum = split<V, kState>(piece.momentum, i);
  const auto variance = split<V, kState>(piece.variance, i);
  const auto even = update<V>(f, grad.a, {param.a, momentum.a, variance.a});
  const auto odd = update<V>(f, grad.b, {param.b, momentum.b, variance.b});
  const auto noise = V::noise(static_cast<std::uint64_t>(piece.first_group + group) * 4, f);
  const auto kept = V::round(even.param, odd.param, noise.param);
  const auto kept_momentum = V::round(even.momentum, odd.momentum, noise.momentum);
  const auto kept_variance = V::round(even.variance, odd.variance, noise.variance);
  // Adding noise cannot turn a NaN that came from bf16 into a number, as its low half is zero. A NaN of a wider
  // gradient may have all bits set.
  if (V::any_packed_not_finite(kept, kept_variance) || (Grad != FloatFormat::kBFloat16 && bad<V>(even, odd)))
      [[unlikely]] {
    return false;
  }
  const auto put = [&](void* data, const auto& packed, bool past_caches) {
    V::store_packed(static_cast<std::uint16_t*>(data) + i, packed, past_caches);
  };
  put(piece.param, kept, false);
  put(piece.momentum, kept_momentum, false);
  put(piece.variance, kept_variance, false);
  if constexpr (Copy == CopyFormat::kBFloat16) {  // the copy is of the parameter as it is stored
    put(piece.copy, kept, stream);
  } else if constexpr (Copy == CopyFormat::kFloat16) {
    const auto wide = V::split(kept);
    const auto both = V::interleave(wide.a, wide.b);
    store_copy<V, Copy>(piece.copy, i, both.a, both.b, stream);
  }
  return true;
}

template <class V, FloatFormat State, FloatFormat Grad, CopyFormat Copy>
std::int64_t adamw(const AdamWFactors& factors, const AdamWPiece& given) {
  const AdamWPiece piece = given;
  const AdamWFactors f = factors;  // a local copy: stores cannot alias it, so its numbers stay in registers
  std::int64_t bad_group = -1;
  // The copy is only written. Non-temporal stores avoid reading its old contents into the caches first.
  const bool stream = Copy != CopyFormat::kNone && reinterpret_cast<std::uintptr_t>(piece.copy) % 64 == 0;
  for (std::int64_t group = 0; group < piece.groups; ++group) {
    bool good = false;
    if constexpr (State == FloatFormat::kFloat32) {
      good = step_f32<V, Grad, Copy>(f, piece, group, stream);
    } else {
      good = step_bf16<V, Grad, Copy>(f, piece, group, stream);
    }
    if (!good && bad_group < 0) [[unlikely]] {
      bad_group = group;
    }
  }
  if (stream) {
    V::fence();
  }
  return bad_group;
}

inline std::uint32_t at_least(std::uint32_t exponent) { return exponent < kLeastExponent ? kLeastExponent : exponent; }

template <class V>
struct Updated8 {
  typename V::Floats param, momentum, root;
};

template <class V>
inline Updated8<V> update8(const AdamWFactors& f, typename V::Floats grad, Updated8<V> old) {
  grad = V::mul(grad, V::set(f.grad_scale));
  const auto momentum = V::fma(V::sub(grad, old.momentum), V::set(f.one_minus_beta1), old.momentum);
  const auto variance =
      V::fma(V::mul(grad, grad), V::set(f.one_minus_beta2), V::mul(V::mul(old.root, old.root), V::set(f.beta2)));
  const auto root = V::sqrt(variance);
  const auto divisor = V::fma(root, V::set(f.inverse_root_correction2), V::set(f.epsilon));
  const auto step = V::div(momentum, divisor);
  return {V::fma(step, V::set(-f.step_size), V::mul(old.param, V::set(f.decay))), momentum, root};
}

// A group after its step, before its codes are computed.
template <class V>
struct Uncoded8 {
  typename V::Two momentum, root;
  typename V::Packed momentum_noise, root_noise;
  std::uint32_t momentum_exponent, root_exponent;
  bool good;
};

// Updates one group with 8-bit moments, except for its codes. `out.good` is false if it is left unchanged.
template <class V, FloatFormat Grad>
inline void step_int8(const AdamWFactors& f, const AdamW8Piece& piece, std::int64_t group, Uncoded8<V>& out) {
  const std::int64_t i = group * kGroup;
  const std::uint8_t* scales = piece.scales + 2 * group;
  const auto grad = split<V, Grad>(piece.grad, i);
  const auto param = split<V, FloatFormat::kBFloat16>(piece.param, i);
  const auto momentum = V::decode_signed(V::load_codes(piece.momentum + i), at_least(scales[0]));
  const auto root = V::decode_unsigned(V::load_codes(piece.root + i), at_least(scales[1]));
  const auto even = update8<V>(f, grad.a, {param.a, momentum.a, root.a});
  const auto odd = update8<V>(f, grad.b, {param.b, momentum.b, root.b});
  const auto noise = V::noise(static_cast<std::uint64_t>(piece.first_group + group) * 4, f);
  const auto kept = V::round(even.param, odd.param, noise.param);
  // Upper halves of the largest numbers. A number in the last step below a power of two counts as that power, because
  // noise may round it up.
  const std::uint32_t largest = V::largest(even.momentum, odd.momentum, even.root, odd.root);
  out.momentum_exponent = at_least(((largest & 0xFFFFu) + (1u << (kMomentumShift - 16))) >> 7);
  out.root_exponent = at_least(((largest >> 16) + (1u << (kRootShift - 16))) >> 7);
  // A gradient that is not finite makes the momentum not finite. Otherwise only the parameter can have a NaN, which
  // comes from bf16, where noise cannot hide it.
  out.good = (scales[0] < kExponentLimit) & (scales[1] < kExponentLimit) & (out.momentum_exponent < kExponentLimit) &
             (out.root_exponent < kExponentLimit) & !V::any_packed_not_finite(kept, kept);
  out.momentum = {even.momentum, odd.momentum};
  out.root = {even.root, odd.root};
  out.momentum_noise = noise.momentum;
  out.root_noise = noise.variance;
  if (out.good) [[likely]] {
    V::store_packed(static_cast<std::uint16_t*>(piece.param) + i, kept, false);
  }
}

template <class V>
inline void encode_int8(const AdamW8Piece& piece, std::int64_t group, const Uncoded8<V>& from) {
  const std::int64_t i = group * kGroup;
  V::store_codes(piece.momentum + i, V::encode_signed(from.momentum, from.momentum_exponent, from.momentum_noise));
  V::store_codes(piece.root + i, V::encode_unsigned(from.root, from.root_exponent, from.root_noise));
  piece.scales[2 * group] = static_cast<std::uint8_t>(from.momentum_exponent);
  piece.scales[2 * group + 1] = static_cast<std::uint8_t>(from.root_exponent);
}

// A scale depends on all numbers of its group, so one group alone is a long chain of dependent instructions. Where
// registers suffice, several groups are stepped before they are encoded, so that their chains overlap (AVX-512 on Zen
// 4: 12 % faster; AVX2 would be 20 % slower).
template <class V, FloatFormat Grad>
std::int64_t adamw8(const AdamWFactors& factors, const AdamW8Piece& given) {
  const AdamW8Piece piece = given;
  const AdamWFactors f = factors;  // a local copy: stores cannot alias it, so its numbers stay in registers
  std::int64_t bad_group = -1;
  Uncoded8<V> uncoded[V::kTogether];
  for (std::int64_t first = 0; first < piece.groups; first += V::kTogether) {
    const std::int64_t count = first + V::kTogether < piece.groups ? V::kTogether : piece.groups - first;
    for (std::int64_t k = 0; k < count; ++k) {
      step_int8<V, Grad>(f, piece, first + k, uncoded[k]);
    }
    for (std::int64_t k = 0; k < count; ++k) {
      if (uncoded[k].good) [[likely]] {
        encode_int8<V>(piece, first + k, uncoded[k]);
      } else if (bad_group < 0) {
        bad_group = first + k;
      }
    }
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
    if constexpr (Out == FloatFormat::kFloat16) {  // the norm is of the rounded values that are stored
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
  all.adamw8[0] = &adamw8<V, FloatFormat::kFloat32>;
  all.adamw8[1] = &adamw8<V, FloatFormat::kFloat16>;
  all.adamw8[2] = &adamw8<V, FloatFormat::kBFloat16>;
  all.unscale[0][0] = all.unscale[0][1] = &unscale<V, FloatFormat::kFloat32, FloatFormat::kFloat32>;
  all.unscale[1][0] = &unscale<V, FloatFormat::kFloat16, FloatFormat::kFloat16>;
  all.unscale[1][1] = &unscale<V, FloatFormat::kFloat16, FloatFormat::kFloat32>;
  all.unscale[2][0] = &unscale<V, FloatFormat::kBFloat16, FloatFormat::kBFloat16>;
  all.unscale[2][1] = &unscale<V, FloatFormat::kBFloat16, FloatFormat::kFloat32>;
  return all;
}

}  // namespace
}  // namespace memascend

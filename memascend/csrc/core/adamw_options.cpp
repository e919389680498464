#include "adamw_options.h"

#include <cmath>
#include <string>

#include "errors.h"
#include "simd_portable.h"

namespace memascend {

void require_options(const char* what, const AdamWOptions& o) {
  const auto require = [&](bool good, const std::string& message) {
    if (!good) {
      throw Error(ErrorKind::kInvalidArgument, std::string(what) + ": " + message);
    }
  };
  require(o.step >= 1, "step " + std::to_string(o.step) + ": steps are counted from one");
  require(o.element_offset >= 0, "element offset " + std::to_string(o.element_offset) + " is negative");
  require(std::isfinite(o.lr) && o.lr >= 0, "learning rate " + std::to_string(o.lr) + ": use zero or more");
  require(o.beta1 >= 0 && o.beta1 < 1, "beta1 " + std::to_string(o.beta1) + " is outside [0, 1)");
  require(o.beta2 >= 0 && o.beta2 < 1, "beta2 " + std::to_string(o.beta2) + " is outside [0, 1)");
  require(std::isfinite(o.epsilon) && o.epsilon >= 0, "epsilon " + std::to_string(o.epsilon) + ": use zero or more");
  require(std::isfinite(o.weight_decay) && o.weight_decay >= 0,
          "weight decay " + std::to_string(o.weight_decay) + ": use zero or more");
  require(std::isfinite(o.grad_scale), "gradient scale " + std::to_string(o.grad_scale) + " is not finite");
}

AdamWFactors factors_of(const AdamWOptions& o) {
  const auto step = static_cast<double>(o.step);
  AdamWFactors f{};
  f.grad_scale = static_cast<float>(o.grad_scale);
  f.one_minus_beta1 = static_cast<float>(1 - o.beta1);
  f.beta2 = static_cast<float>(o.beta2);
  f.one_minus_beta2 = static_cast<float>(1 - o.beta2);
  f.inverse_root_correction2 = static_cast<float>(1 / std::sqrt(1 - std::pow(o.beta2, step)));
  f.epsilon = static_cast<float>(o.epsilon);
  f.decay = static_cast<float>(1 - o.lr * o.weight_decay);
  f.step_size = static_cast<float>(o.lr / (1 - std::pow(o.beta1, step)));
  for (std::uint64_t round = 0; round <= kArsRounds + 1;
       ++round) {  // Weyl sequences with the constants of Salmon et al. (SC'11)
    f.round_key[round][0] = o.seed + round * 0x9E3779B97F4A7C15u;
    f.round_key[round][1] = round * 0xBB67AE8584CAA73Bu;
  }
  f.step = static_cast<std::uint64_t>(o.step);
  return f;
}

float value_at(const void* data, FloatFormat format, std::int64_t i) {
  if (format == FloatFormat::kFloat32) {
    return static_cast<const float*>(data)[i];
  }
  const std::uint16_t half = static_cast<const std::uint16_t*>(data)[i];
  return format == FloatFormat::kFloat16 ? float_of_f16(half) : float_of(static_cast<std::uint32_t>(half) << 16);
}

}  // namespace memascend

// Bindings of the kernels: overflow check, unscale, AdamW. Most are operators of torch.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "bindings.h"
#include "core/adamw.h"
#include "core/adamw8.h"
#include "core/errors.h"
#include "core/overflow.h"
#include "core/unscale.h"

namespace memascend::bindings {
namespace {

// --------------------------------------------------------------------------------------------- overflow check

FloatFormat format_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return FloatFormat::kFloat32;
    case at::kHalf:
      return FloatFormat::kFloat16;
    case at::kBFloat16:
      return FloatFormat::kBFloat16;
    default:
      throw py::value_error(std::string("overflow check: dtype ") + c10::toString(tensor.scalar_type()) +
                            " is not supported: use float32, float16 or bfloat16");
  }
}

bool tensor_has_overflow(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || !tensor.device().is_cpu()) {
    throw py::value_error("overflow check: the fused check reads dense CPU tensors: use has_overflow_aminmax for a " +
                          tensor.device().str() + " tensor");
  }
  const FloatFormat format = format_of(tensor);
  if (tensor.numel() == 0) {
    return false;
  }
  const void* data = tensor.const_data_ptr();
  const int threads = at::get_num_threads();
  if (tensor.is_non_overlapping_and_dense()) {  // contiguous up to a permutation of dimensions
    return has_overflow(data, tensor.numel(), format, threads);
  }
  return has_overflow_strided(data, tensor.sizes().vec(), tensor.strides().vec(), format, threads);
}

at::Tensor has_overflow_op(const at::Tensor& tensor) {
  return at::scalar_tensor(tensor_has_overflow(tensor), at::TensorOptions().dtype(at::kBool));
}

at::Tensor has_overflow_meta(const at::Tensor& tensor) { return at::empty({}, tensor.options().dtype(at::kBool)); }

std::uint64_t read_all_bytes(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous(), "read_all: give a contiguous CPU tensor");
  return read_all(tensor.const_data_ptr(), static_cast<std::int64_t>(tensor.nbytes()), at::get_num_threads());
}

// ------------------------------------------------------------------------------------ unscale, norm and overflow

// Converts errors to torch's own types, which pass the dispatcher without the GIL and without our translator.
template <class Body>
void with_torch_errors(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    TORCH_CHECK_VALUE(error.kind() != ErrorKind::kInvalidArgument, error.what());
    TORCH_CHECK(false, error.what());
  }
}

FloatFormat checked_format(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, op, ": ", name, " is sparse: give a dense tensor");
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, op, ": ", name, " has dtype ",
                    type, ": use float32, float16 or bfloat16");
  return type == at::kFloat  ? FloatFormat::kFloat32
         : type == at::kHalf ? FloatFormat::kFloat16
                             : FloatFormat::kBFloat16;
}

using NormAndOverflow = std::tuple<at::Tensor, at::Tensor>;

void check_unscale(const at::Tensor& grad, const at::Tensor& out) {
  constexpr const char* kOp = "unscale_norm_overflow";
  const FloatFormat in_format = checked_format(kOp, "grad", grad);
  const FloatFormat out_format = checked_format(kOp, "out", out);
  TORCH_CHECK_VALUE(grad.sizes() == out.sizes(), kOp, ": grad has shape ", grad.sizes(), ", out ", out.sizes());
  TORCH_CHECK_VALUE(out_format == FloatFormat::kFloat32 || out_format == in_format, kOp,
                    ": out is float32 or has the dtype of grad");
  const bool dense =
      grad.is_same(out) ? grad.is_non_overlapping_and_dense() : grad.is_contiguous() && out.is_contiguous();
  TORCH_CHECK_VALUE(dense, kOp, ": the gradient is not one dense run of memory: give a contiguous tensor");
}

NormAndOverflow unscale(const at::Tensor& grad, double inverse_scale, const at::Tensor& out) {
  check_unscale(grad, out);
  UnscaleResult result{};
  with_torch_errors([&] {
    result = unscale_norm_overflow(grad.const_data_ptr(), format_of(grad), out.mutable_data_ptr(), format_of(out),
                                   grad.numel(), inverse_scale, at::get_num_threads());
  });
  return {at::scalar_tensor(result.sum_squares, at::TensorOptions().dtype(at::kDouble)),
          at::scalar_tensor(result.overflow, at::TensorOptions().dtype(at::kBool))};
}

NormAndOverflow unscale_in_place(at::Tensor& grad, double inverse_scale) { return unscale(grad, inverse_scale, grad); }

NormAndOverflow unscale_to(const at::Tensor& grad, double inverse_scale, at::Tensor& out) {
  TORCH_CHECK_VALUE(!grad.is_alias_of(out),
                    "unscale_norm_overflow: out shares memory with grad: use the in-place form");
  return unscale(grad, inverse_scale, out);
}

NormAndOverflow unscale_result_meta(const at::Tensor& like) {
  return {at::empty({}, like.options().dtype(at::kDouble)), at::empty({}, like.options().dtype(at::kBool))};
}

NormAndOverflow unscale_in_place_meta(at::Tensor& grad, double) {
  check_unscale(grad, grad);
  return unscale_result_meta(grad);
}

NormAndOverflow unscale_to_meta(const at::Tensor& grad, double, at::Tensor& out) {
  check_unscale(grad, out);
  return unscale_result_meta(grad);
}

// ------------------------------------------------------------------------------------------------------ AdamW

void check_adamw_tensor(const char* name, const at::Tensor& tensor, const at::Tensor& param) {
  TORCH_CHECK_VALUE(tensor.sizes() == param.sizes(), "adamw: ", name, " has shape ", tensor.sizes(), ", param ",
                    param.sizes());
  (void)checked_format("adamw", name, tensor);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "adamw: ", name, " is not contiguous");
}

void check_adamw(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& half_copy) {
  check_adamw_tensor("param", param, param);
  check_adamw_tensor("grad", grad, param);
  check_adamw_tensor("exp_avg", exp_avg, param);
  check_adamw_tensor("exp_avg_sq", exp_avg_sq, param);
  const at::ScalarType state = param.scalar_type();
  TORCH_CHECK_VALUE(state != at::kHalf && exp_avg.scalar_type() == state && exp_avg_sq.scalar_type() == state,
                    "adamw: param, exp_avg and exp_avg_sq are all float32 or all bfloat16, not ", state, ", ",
                    exp_avg.scalar_type(), ", ", exp_avg_sq.scalar_type());
  if (half_copy) {
    check_adamw_tensor("half_copy", *half_copy, param);
    TORCH_CHECK_VALUE(half_copy->scalar_type() != at::kFloat, "adamw: half_copy is float16 or bfloat16, not float32");
  }
}

void adamw_op(at::Tensor& param, const at::Tensor& grad, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
              const std::optional<at::Tensor>& half_copy, std::int64_t step, double lr, double beta1, double beta2,
              double eps, double weight_decay, double grad_scale, std::int64_t seed, std::int64_t element_offset) {
  check_adamw(param, grad, exp_avg, exp_avg_sq, half_copy);
  AdamWTensors tensors{param.mutable_data_ptr(),
                       grad.const_data_ptr(),
                       exp_avg.mutable_data_ptr(),
                       exp_avg_sq.mutable_data_ptr(),
                       nullptr,
                       format_of(param),
                       format_of(grad),
                       CopyFormat::kNone,
                       param.numel()};
  if (half_copy && half_copy->numel() > 0) {
    tensors.copy = half_copy->mutable_data_ptr();
    tensors.copy_format = half_copy->scalar_type() == at::kHalf ? CopyFormat::kFloat16 : CopyFormat::kBFloat16;
  }
  const AdamWOptions options{
      step, lr, beta1, beta2, eps, weight_decay, grad_scale, static_cast<std::uint64_t>(seed), element_offset};
  with_torch_errors([&] { adamw(tensors, options, at::get_num_threads()); });
}

void adamw_meta(at::Tensor& param, const at::Tensor& grad, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
                const std::optional<at::Tensor>& half_copy, std::int64_t, double, double, double, double, double,
                double, std::int64_t, std::int64_t) {
  check_adamw(param, grad, exp_avg, exp_avg_sq, half_copy);
}

void check_codes(const char* name, const at::Tensor& tensor, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kByte, "adamw8: ", name, " has dtype ", tensor.scalar_type(),
                    ": use uint8");
  TORCH_CHECK_VALUE(tensor.sizes() == shape, "adamw8: ", name, " has shape ", tensor.sizes(), ", expected ", shape);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "adamw8: ", name, " is not contiguous");
}

void check_adamw8(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& exp_avg,
                  const at::Tensor& exp_avg_sq, const at::Tensor& scales) {
  TORCH_CHECK_VALUE(param.scalar_type() == at::kBFloat16, "adamw8: param has dtype ", param.scalar_type(),
                    ": use bfloat16");
  TORCH_CHECK_VALUE(param.is_contiguous(), "adamw8: param is not contiguous");
  (void)checked_format("adamw8", "grad", grad);
  TORCH_CHECK_VALUE(grad.sizes() == param.sizes(), "adamw8: grad has shape ", grad.sizes(), ", param ", param.sizes());
  TORCH_CHECK_VALUE(grad.is_contiguous(), "adamw8: grad is not contiguous");
  check_codes("exp_avg", exp_avg, param.sizes());
  check_codes("exp_avg_sq", exp_avg_sq, param.sizes());
  // Computed from the sizes, which a tensor that is being traced has too.
  const std::int64_t numel = c10::multiply_integers(param.sizes());
  check_codes("scales", scales, {(numel + kBlock - 1) / kBlock, 2});
}

void adamw8_op(at::Tensor& param, const at::Tensor& grad, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
               at::Tensor& scales, std::int64_t step, double lr, double beta1, double beta2, double eps,
               double weight_decay, double grad_scale, std::int64_t seed, std::int64_t element_offset) {
  check_adamw8(param, grad, exp_avg, exp_avg_sq, scales);
  const AdamW8Tensors tensors{param.mutable_data_ptr(),
                              grad.const_data_ptr(),
                              static_cast<std::uint8_t*>(exp_avg.mutable_data_ptr()),
                              static_cast<std::uint8_t*>(exp_avg_sq.mutable_data_ptr()),
                              static_cast<std::uint8_t*>(scales.mutable_data_ptr()),
                              format_of(grad),
                              param.numel()};
  const AdamWOptions options{
      step, lr, beta1, beta2, eps, weight_decay, grad_scale, static_cast<std::uint64_t>(seed), element_offset};
  with_torch_errors([&] { adamw8(tensors, options, at::get_num_threads()); });
}

void adamw8_meta(at::Tensor& param, const at::Tensor& grad, at::Tensor& exp_avg, at::Tensor& exp_avg_sq,
                 at::Tensor& scales, std::int64_t, double, double, double, double, double, double, std::int64_t,
                 std::int64_t) {
  check_adamw8(param, grad, exp_avg, exp_avg_sq, scales);
}

}  // namespace

void bind_kernels(py::module_& module) {
  module.def("has_overflow", &tensor_has_overflow, NoGil());
  module.def("read_all", &read_all_bytes, NoGil());
  module.def("simd_level", [] { return simd_level_name(best_simd_level()); });
}

TORCH_LIBRARY(memascend, library) {
  library.def("has_overflow(Tensor self) -> Tensor");
  library.def("unscale_norm_overflow_(Tensor(a!) grad, float inverse_scale) -> (Tensor, Tensor)");
  library.def("unscale_norm_overflow(Tensor grad, float inverse_scale, Tensor(a!) out) -> (Tensor, Tensor)");
  library.def(
      "adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? half_copy=None, *, "
      "int step, float lr, float beta1, float beta2, float eps, float weight_decay, float grad_scale=1.0, int seed=0, "
      "int element_offset=0) -> ()");
  library.def(
      "adamw8_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) scales, *, "
      "int step, float lr, float beta1, float beta2, float eps, float weight_decay, float grad_scale=1.0, int seed=0, "
      "int element_offset=0) -> ()");
}
TORCH_LIBRARY_IMPL(memascend, CPU, library) {
  library.impl("has_overflow", &has_overflow_op);
  library.impl("unscale_norm_overflow_", &unscale_in_place);
  library.impl("unscale_norm_overflow", &unscale_to);
  library.impl("adamw_", &adamw_op);
  library.impl("adamw8_", &adamw8_op);
}
TORCH_LIBRARY_IMPL(memascend, Meta, library) {
  library.impl("has_overflow", &has_overflow_meta);
  library.impl("unscale_norm_overflow_", &unscale_in_place_meta);
  library.impl("unscale_norm_overflow", &unscale_to_meta);
  library.impl("adamw_", &adamw_meta);
  library.impl("adamw8_", &adamw8_meta);
}

}  // namespace memascend::bindings

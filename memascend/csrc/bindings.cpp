// The one file that knows both torch and the core. It converts, and decides nothing.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/version.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <unistd.h>

#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/adamw.h"
#include "core/adamw8.h"
#include "core/clock.h"
#include "core/completion.h"
#include "core/crc32c.h"
#include "core/direct_engine.h"
#include "core/errors.h"
#include "core/fault_layer.h"
#include "core/file_engine.h"
#include "core/latency.h"
#include "core/numa_threads.h"
#include "core/overflow.h"
#include "core/pinned.h"
#include "core/placement.h"
#include "core/store.h"
#include "core/tracking.h"
#include "core/unscale.h"
#include "released_gil.h"

namespace py = pybind11;

// Read from the file before it is loaded (memascend/extension.py).
extern "C" __attribute__((used, visibility("default"))) const char memascend_built_against[] =
    "memascend extension built against torch " TORCH_VERSION;

namespace {

using namespace memascend;

using NoGil = py::call_guard<ReleasedGil>;

// ---------------------------------------------------------------------------------------------- pinned memory

// Leaked on purpose: it is called from tensor deleters, which may run after the interpreter has gone.
py::function* unregister_callback = nullptr;

bool call_unregister(void* address) {
  if (unregister_callback == nullptr || !Py_IsInitialized()) {
    return false;
  }
#if PY_VERSION_HEX >= 0x030D0000
  if (Py_IsFinalizing()) {
#else
  if (_Py_IsFinalizing()) {
#endif
    return false;
  }
  py::gil_scoped_acquire gil;
  try {
    (*unregister_callback)(reinterpret_cast<std::uintptr_t>(address));
    return true;
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("unregistering pinned memory");
    return false;
  }
}

py::dict as_dict(const PinnedBlock& block) {
  py::dict out;
  out["id"] = block.id;
  out["address"] = block.address;
  out["requested_bytes"] = block.requested_bytes;
  out["reserved_bytes"] = block.reserved_bytes;
  out["locked"] = block.locked;
  out["born_ns"] = block.born_ns;
  return out;
}

PageKind page_kind(const std::string& name) {
  if (name == "transparent") {
    return PageKind::kTransparent;
  }
  if (name == "reserved") {
    return PageKind::kReserved;
  }
  if (name != "small") {
    throw py::value_error("pinned_empty: unknown pages '" + name + "': use small, transparent or reserved");
  }
  return PageKind::kSmall;
}

// Mode, nodes, and their weights where they are striped; none: where the thread that touches runs.
using NamedPlacement = std::optional<std::tuple<std::string, std::vector<int>, std::vector<std::int64_t>>>;

Placement placement_of(const NamedPlacement& named) {
  if (!named) {
    return {};
  }
  static const std::map<std::string, PlacementMode> modes = {
      {"bind", PlacementMode::kBind},
      {"preferred", PlacementMode::kPreferred},
      {"preferred_many", PlacementMode::kPreferredMany},
      {"interleaved", PlacementMode::kInterleaved},
      {"weighted", PlacementMode::kWeighted},
      {"striped", PlacementMode::kStriped},
  };
  const auto& [mode, nodes, weights] = *named;
  const auto found = modes.find(mode);
  if (found == modes.end()) {
    throw py::value_error("unknown placement '" + mode +
                          "': use bind, preferred, preferred_many, interleaved, weighted or striped");
  }
  return {found->second, nodes, weights};
}

std::map<int, std::int64_t> named_pages_by_node(std::uintptr_t address, std::int64_t bytes) {
  return pages_by_node(reinterpret_cast<const void*>(address), bytes);
}

void named_move_pages(std::uintptr_t address, std::int64_t bytes, const NamedPlacement& named) {
  const Placement placement = placement_of(named);
  const ReleasedGil no_gil;
  move_pages_to(reinterpret_cast<void*>(address), bytes, placement);
}

std::pair<at::Tensor, py::dict> pinned_empty(std::int64_t numel, const py::object& dtype, std::int64_t reserved_bytes,
                                             bool lock, bool require_lock, const std::string& pages,
                                             const NamedPlacement& named) {
  if (!THPDtype_Check(dtype.ptr())) {
    throw py::type_error("pinned_empty: dtype must be a torch.dtype");
  }
  const at::ScalarType type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
  const auto item_bytes = static_cast<std::int64_t>(c10::elementSize(type));
  const PageKind kind = page_kind(pages);
  const Placement placement = placement_of(named);
  PinnedBlock block;
  {
    const ReleasedGil no_gil;
    block =
        PinnedRegistry::instance().allocate(numel * item_bytes, reserved_bytes, lock, require_lock, kind, placement);
  }
  // The lambda is held by the storage: it runs once, after the last view has gone, with or without the GIL.
  at::Tensor tensor = at::from_blob(
      reinterpret_cast<void*>(block.address), {numel},
      [](void* data) { PinnedRegistry::instance().release(reinterpret_cast<std::uintptr_t>(data)); },
      at::TensorOptions().dtype(type).device(at::kCPU));
  return {tensor, as_dict(block)};
}

py::list drain_pinned_events() {
  py::list out;
  for (const PinnedEvent& event : PinnedRegistry::instance().drain_events()) {
    py::dict item = as_dict(event.block);
    item["kind"] = event.is_free ? "free" : "alloc";
    item["t_ns"] = event.t_ns;
    out.append(std::move(item));
  }
  return out;
}

py::list live_pinned_blocks() {
  py::list out;
  for (const PinnedBlock& block : PinnedRegistry::instance().live()) {
    out.append(as_dict(block));
  }
  return out;
}

void set_unregister_callback(py::function callback) {
  unregister_callback = new py::function(std::move(callback));
  PinnedRegistry::instance().set_unregister_hook(call_unregister);
}

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
  if (tensor.is_non_overlapping_and_dense()) {  // contiguous, or a permutation of it: one run of memory
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

// Errors cross the dispatcher as torch's own types, which need no GIL and no translator of ours.
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
  // From the sizes, which a tensor that is traced has too.
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

// --------------------------------------------------------------------------------------- what both engines share

// (cancelled, failure or None)
py::tuple as_tuple(const RequestOutcome& outcome) {
  if (!outcome.failure) {
    return py::make_tuple(outcome.cancelled, py::none());
  }
  const RequestFailure& failure = *outcome.failure;
  const py::object key = failure.key.empty() ? py::object(py::none()) : py::object(py::str(failure.key));
  return py::make_tuple(outcome.cancelled,
                        py::make_tuple(failure.op, key, failure.path, failure.offset, failure.expected, failure.got,
                                       failure.error, failure.reason));
}

// (request, cancelled, failure or None) of each
py::list as_list(const std::vector<EndedRequest>& ended) {
  py::list out;
  for (const auto& [request, outcome] : ended) {
    out.append(py::make_tuple(request) + as_tuple(outcome));
  }
  return out;
}

// Ctrl-C and other signals that Python handles end a wait for a drive that hangs. Python runs their handlers in the
// main thread alone; another one may still wait when the interpreter has ended.
void raise_pending_signals() {
  if (gettid() != getpid()) {
    return;
  }
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

template <typename Engine>
py::object wait_for_request(Engine& engine, std::uint64_t request, double seconds) {
  std::optional<RequestOutcome> outcome;
  {
    const ReleasedGil no_gil;
    outcome = engine.wait_for(request, seconds);
  }
  return outcome ? py::object(as_tuple(*outcome)) : py::object(py::none());
}

template <typename Engine>
py::object wait_for_all(Engine& engine, double seconds) {
  std::optional<std::vector<EndedRequest>> ended;
  {
    const ReleasedGil no_gil;
    ended = engine.wait(seconds);
  }
  return ended ? py::object(as_list(*ended)) : py::object(py::none());
}

py::list histogram_of(const LatencyHistogram& histogram) {
  py::list out;
  for (std::size_t bucket = 0; bucket < LatencyHistogram::kBuckets; ++bucket) {
    if (histogram.counts()[bucket] > 0) {
      out.append(py::make_tuple(LatencyHistogram::bucket_floor_us(bucket), histogram.counts()[bucket]));
    }
  }
  return out;
}

py::dict as_dict(const IoStatistics& counted) {
  py::dict out;
  out["bytes_read"] = counted.bytes_read;
  out["bytes_written"] = counted.bytes_written;
  out["requests"] = counted.requests;
  out["failed"] = counted.failed;
  out["cancelled"] = counted.cancelled;
  out["commands"] = counted.commands;
  out["short_transfers"] = counted.short_transfers;
  out["repeated"] = counted.repeated;
  out["reread"] = counted.reread;
  out["bounced_bytes"] = counted.bounced_bytes;
  out["buffered_bytes"] = counted.buffered_bytes;
  out["max_queue_depth"] = counted.max_queue_depth;
  out["mean_queue_depth"] = counted.mean_queue_depth;
  out["reading_s"] = counted.reading_s;
  out["writing_s"] = counted.writing_s;
  out["read_latency_us"] = py::tuple(histogram_of(counted.read_latency));
  out["write_latency_us"] = py::tuple(histogram_of(counted.write_latency));
  return out;
}

// Joining the workers may take as long as the requests in flight: others should run meanwhile.
template <typename Engine>
struct EndingDeleter {
  void operator()(Engine* engine) const {
    {
      const ReleasedGil no_gil;
      engine->shutdown();
    }
    delete engine;  // drops the references to tensors, with the GIL
  }
};

template <typename Engine, typename Class>
void bind_completions(Class& type) {
  type.def("wait_for", &wait_for_request<Engine>)
      .def("wait", &wait_for_all<Engine>)
      .def("take_ended", [](Engine& self) { return as_list(self.take_ended()); })
      .def("cancel", &Engine::cancel, NoGil())
      .def("refuse", &Engine::refuse, NoGil())
      .def("shutdown", &Engine::shutdown, NoGil())
      // For good: nothing of it is freed, nor its faults, since a worker may be in the kernel, or come back from there.
      .def("leave", [](const py::object& self) { self.inc_ref(); })
      .def("statistics", [](const Engine& self) { return as_dict(self.statistics()); })
      .def_property_readonly("buffered_path", &Engine::buffered_path)
      .def_property_readonly("completion_fd", &Engine::completion_fd)
      .def_property_readonly("pending", &Engine::pending);
}

void bind_faults(py::module_& module) {
  py::class_<IoSyscalls>(module, "IoSyscalls");
  py::class_<FaultLayer, IoSyscalls>(module, "FaultLayer")
      .def(py::init<>())
      .def(
          "add",
          [](FaultLayer& self, std::string op, std::int64_t after, std::int64_t times, int error, std::int64_t at_most,
             std::int64_t delay_us,
             int signal) { self.add({std::move(op), after, times, error, at_most, delay_us, signal}); },
          py::arg("op"), py::kw_only(), py::arg("after") = 0, py::arg("times") = -1, py::arg("error") = 0,
          py::arg("at_most") = -1, py::arg("delay_us") = 0, py::arg("signal") = 0)
      .def("calls", &FaultLayer::calls, py::arg("op"))
      .def("log_writes", &FaultLayer::log_writes, py::arg("path"))
      .def("demand_alignment", &FaultLayer::demand_alignment, py::arg("bytes"), py::arg("told") = true)
      .def("clear", &FaultLayer::clear)
      .def_property_readonly("injected", &FaultLayer::injected);
}

// ------------------------------------------------------------------------------------------------ file engine

std::uint64_t submit(FileEngine& engine, IoOp op, const at::Tensor& tensor, std::string path, std::int64_t offset) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    throw py::value_error("file engine: " + path + ": give a contiguous CPU tensor (got " + tensor.toString() +
                          (tensor.is_contiguous() ? "" : ", not contiguous") + ")");
  }
  void* data = op == IoOp::kRead ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
  return engine.submit(op, data, static_cast<std::int64_t>(tensor.nbytes()), std::move(path), offset,
                       std::make_shared<at::Tensor>(tensor));
}

void bind_file_engine(py::module_& module) {
  using Owner = std::unique_ptr<FileEngine, EndingDeleter<FileEngine>>;
  py::class_<FileEngine, Owner> type(module, "FileEngine");
  type.def(py::init([](int threads, std::int64_t block_bytes, bool require_direct, IoSyscalls* faults) {
             return Owner(
                 new FileEngine(threads, block_bytes, faults != nullptr ? *faults : kernel_syscalls(), require_direct));
           }),
           py::arg("threads"), py::arg("block_bytes"), py::arg("require_direct") = false, py::arg("faults") = nullptr,
           py::keep_alive<1, 5>())
      .def("read", [](FileEngine& self, const at::Tensor& tensor, std::string path,
                      std::int64_t offset) { return submit(self, IoOp::kRead, tensor, std::move(path), offset); })
      .def("write", [](FileEngine& self, const at::Tensor& tensor, std::string path,
                       std::int64_t offset) { return submit(self, IoOp::kWrite, tensor, std::move(path), offset); })
      .def_property_readonly("pending_path", &FileEngine::pending_path)
      .def_property_readonly("bounce_buffer_bytes", &FileEngine::bounce_buffer_bytes);
  bind_completions<FileEngine>(type);
}

// ---------------------------------------------------------------------------------------------- direct engine

py::dict as_dict(const Superblock& block) {
  py::dict out;
  out["uuid"] = uuid_text(block.uuid);
  out["owner"] = block.owner;
  out["member"] = block.member;
  out["members"] = block.members;
  out["weight"] = block.weight;
  out["chunk_bytes"] = block.chunk_bytes;
  out["log_bytes"] = block.log_bytes;
  out["data_offset"] = block.data_offset;
  out["size_bytes"] = block.size_bytes;
  out["generation"] = block.generation;
  out["epoch"] = block.epoch;
  out["scratch_pid"] = block.scratch_pid;
  return out;
}

py::object as_object(const RecordPointer& record) {
  if (!record) {
    return py::none();
  }
  py::list extents;
  for (const Extent& extent : record->extents) {
    extents.append(py::make_tuple(extent.member, extent.offset, extent.bytes));
  }
  py::dict out;
  out["bytes"] = record->bytes;
  out["dtype"] = record->dtype;
  out["shape"] = py::tuple(py::cast(record->shape));
  out["checksum"] = record->checksum;
  out["generation"] = record->generation;
  out["extents"] = py::tuple(extents);
  return out;
}

py::dict as_dict(const StoreSpace& space) {
  py::dict out;
  out["data_bytes"] = space.data_bytes;
  out["free_bytes"] = space.free_bytes;
  out["reserved_bytes"] = space.reserved_bytes;
  out["log_bytes"] = space.log_bytes;
  out["log_used_bytes"] = space.log_used_bytes;
  out["processes"] = space.processes;
  return out;
}

std::shared_ptr<Store> open_store(const std::vector<std::string>& paths, const std::string& owner,
                                  const std::string& control_folder, std::int64_t stripe_bytes, bool any_owner,
                                  bool require_direct, IoSyscalls* faults) {
  return std::make_shared<Store>(paths, StoreOptions{owner, control_folder, stripe_bytes, any_owner, require_direct},
                                 faults != nullptr ? *faults : kernel_syscalls());
}

// Of a store, or of an engine.
template <typename Index>
py::list list_records(Index& index) {
  std::vector<std::pair<std::string, RecordPointer>> found;
  {
    const ReleasedGil no_gil;
    found = index.list();
  }
  py::list out;
  for (const auto& [key, record] : found) {
    out.append(py::make_tuple(key, as_object(record)));
  }
  return out;
}

template <typename Index>
py::object find_record(Index& index, const std::string& key) {
  RecordPointer record;
  {
    const ReleasedGil no_gil;
    record = index.find(key);
  }
  return as_object(record);
}

std::string verify_record(Store& store, const RecordPointer& record) {
  return record ? store.verify(*record) : "no such tensor";
}

void bind_store(py::module_& module) {
  py::class_<Store, std::shared_ptr<Store>>(module, "Store")
      .def(py::init(&open_store), py::arg("paths"), py::arg("owner"), py::arg("control_folder"),
           py::arg("stripe_bytes"), py::arg("any_owner"), py::arg("require_direct") = false,
           py::arg("faults") = nullptr, py::keep_alive<1, 8>(), NoGil())
      .def("find", &find_record<Store>)
      .def("list", &list_records<Store>)
      .def("grow", &Store::grow, py::arg("data_bytes"), py::arg("allocate"), NoGil())
      .def("erase", &Store::erase, NoGil())
      .def("commit", &Store::commit, NoGil())
      .def("uncommitted", &Store::uncommitted)
      .def("collect", &Store::collect, NoGil())
      .def(
          "verify", [](Store& self, const std::string& key) { return verify_record(self, self.find(key)); }, NoGil())
      .def("space", [](Store& self) { return as_dict(self.space()); })
      .def("superblock", [](const Store& self, std::size_t member) { return as_dict(self.superblock(member)); })
      .def("paths", [](const Store& self) {
        std::vector<std::string> out;
        for (const auto& device : self.devices()) {
          out.push_back(device->path());
        }
        return out;
      });
  module.def(
      "storage_format",
      [](const std::vector<std::string>& paths, const std::string& owner, std::vector<std::uint32_t> weights,
         std::int64_t chunk_bytes, std::int64_t log_bytes, std::int64_t scratch_pid) {
        format_store(paths, FormatOptions{owner, std::move(weights), chunk_bytes, log_bytes, scratch_pid});
      },
      py::arg("paths"), py::arg("owner"), py::arg("weights"), py::arg("chunk_bytes"), py::arg("log_bytes"),
      py::arg("scratch_pid") = 0, NoGil());
  module.def("storage_destroy", [](const std::vector<std::string>& paths) { destroy_store(paths); });
  module.def("direct_limits", [](const std::string& path) {
    const Device device(path, kernel_syscalls(), true);
    return py::make_tuple(device.direct(), device.memory_alignment());
  });
  module.def("storage_superblock", [](const std::string& path) -> py::object {
    const auto block = read_superblock(Device(path, kernel_syscalls(), true));
    return block ? py::object(as_dict(*block)) : py::object(py::none());
  });
  module.def(
      "crc32c",
      [](const py::bytes& data, std::uint32_t start, bool portable) {
        const std::string_view view = data;
        return portable ? crc32c_portable(start, view.data(), view.size()) : crc32c(start, view.data(), view.size());
      },
      py::arg("data"), py::arg("start") = 0, py::arg("portable") = false);
  module.def("crc32c_join", &crc32c_join);
  module.def("aio_missing", [](const std::string& name) {
    return aio_missing(name == "libaio" ? AioKind::kLibaio : AioKind::kUring, kernel_syscalls());
  });
}

Checksums checksums_of(const std::string& name) {
  if (name != "off" && name != "write" && name != "full") {
    throw py::value_error("storage engine: checksums '" + name + "': use off, write or full");
  }
  return name == "off" ? Checksums::kOff : name == "write" ? Checksums::kWrite : Checksums::kFull;
}

const at::Tensor& require_plain(const std::string& key, const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    throw py::value_error("storage engine: '" + key + "': give a contiguous CPU tensor (got " + tensor.toString() +
                          (tensor.is_contiguous() ? "" : ", not contiguous") + ")");
  }
  return tensor;
}

std::uint64_t direct_write(DirectEngine& engine, const std::string& key, const at::Tensor& tensor,
                           const std::string& dtype, int priority) {
  const void* data = require_plain(key, tensor).const_data_ptr();
  TensorRecord record;
  record.bytes = static_cast<std::int64_t>(tensor.nbytes());
  record.dtype = dtype;
  record.shape = tensor.sizes().vec();
  auto keep_alive = std::make_shared<at::Tensor>(tensor);
  const ReleasedGil no_gil;
  return engine.write(key, data, std::move(record), priority, std::move(keep_alive));
}

std::uint64_t direct_write_part(DirectEngine& engine, const std::string& key, const at::Tensor& tensor,
                                std::int64_t offset, int priority) {
  const void* data = require_plain(key, tensor).const_data_ptr();
  auto keep_alive = std::make_shared<at::Tensor>(tensor);
  const ReleasedGil no_gil;
  return engine.write_part(key, data, static_cast<std::int64_t>(tensor.nbytes()), offset, priority,
                           std::move(keep_alive));
}

std::uint64_t direct_read(DirectEngine& engine, const std::string& key, const at::Tensor& tensor, std::int64_t offset,
                          int priority) {
  void* data = require_plain(key, tensor).mutable_data_ptr();
  auto keep_alive = std::make_shared<at::Tensor>(tensor);
  const ReleasedGil no_gil;
  return engine.read(key, data, static_cast<std::int64_t>(tensor.nbytes()), offset, priority, std::move(keep_alive));
}

py::list direct_trace(DirectEngine& engine) {
  py::list out;
  for (const TraceRow& row : engine.drain_trace()) {
    out.append(py::make_tuple(row.request, row.write ? "write" : "read", row.key, row.bytes, row.priority,
                              row.submitted_ns, row.started_ns, row.ended_ns, row.status));
  }
  return out;
}

void bind_direct_engine(py::module_& module) {
  using Owner = std::unique_ptr<DirectEngine, EndingDeleter<DirectEngine>>;
  py::class_<DirectEngine, Owner> type(module, "DirectEngine");
  type.def(py::init([](std::shared_ptr<Store> store, int workers, std::int64_t block_bytes, int depth,
                       std::string backend, const std::string& checksums, bool trace, bool is_volatile,
                       IoSyscalls* faults) {
             EngineOptions options{workers, block_bytes, depth, std::move(backend), checksums_of(checksums),
                                   trace,   is_volatile};
             return Owner(new DirectEngine(std::move(store), options, faults != nullptr ? *faults : kernel_syscalls()));
           }),
           py::arg("store"), py::arg("workers"), py::arg("block_bytes"), py::arg("depth"), py::arg("backend"),
           py::arg("checksums"), py::arg("trace"), py::arg("is_volatile"), py::arg("faults") = nullptr,
           py::keep_alive<1, 10>())
      .def("write", &direct_write)
      .def("write_part", &direct_write_part)
      .def("find", &find_record<DirectEngine>)
      .def("list", &list_records<DirectEngine>)
      .def("erase", &DirectEngine::erase, NoGil())
      .def(
          "verify",
          [](DirectEngine& self, const std::string& key) { return verify_record(self.store(), self.find(key)); },
          NoGil())
      .def("read", &direct_read)
      .def("register_buffer",
           [](DirectEngine& self, const at::Tensor& tensor) {
             auto keep_alive = std::make_shared<at::Tensor>(tensor);
             void* data = require_plain("buffer", tensor).mutable_data_ptr();
             const ReleasedGil no_gil;
             return self.register_buffer(data, static_cast<std::int64_t>(tensor.nbytes()), std::move(keep_alive));
           })
      .def("unregister_buffer",
           [](DirectEngine& self, const at::Tensor& tensor) {
             std::shared_ptr<void> owner;  // released with the GIL
             const ReleasedGil no_gil;
             owner = self.unregister_buffer(const_cast<void*>(tensor.const_data_ptr()));
             return owner != nullptr;
           })
      .def("drain_trace", &direct_trace)
      .def_property_readonly("backend", [](const DirectEngine& self) { return aio_kind_name(self.backend()); })
      .def_property_readonly("bounce_buffers", &DirectEngine::bounce_buffers);
  bind_completions<DirectEngine>(type);
}

// ----------------------------------------------------------------------------------------- tracking allocator

void free_tracked(void* pointer) {
  c10::profiledCPUMemoryReporter().Delete(pointer);
  TrackingHeap::instance().deallocate(pointer);
}

// Takes the place of PyTorch's CPU allocator. Blocks that the stock one has handed out keep their own deleter.
struct TrackingAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = nullptr;
    try {
      data = TrackingHeap::instance().allocate(bytes);
    } catch (const Error& error) {
      c10::profiledCPUMemoryReporter().OutOfMemory(bytes);
      TORCH_CHECK(false, error.what());
    }
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &free_tracked, at::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_tracked; }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

constexpr std::uint8_t kAllocatorPriority = 10;  // the stock allocator has 0

TrackingAllocator& tracking_allocator() {
  static auto* allocator = new TrackingAllocator();  // never destroyed: the registration keeps its address
  return *allocator;
}

const char* role_name(Role role) { return role == Role::kDevice ? "device" : "host"; }

void set_role(const std::string& role) {
  if (role != "host" && role != "device") {
    throw py::value_error("tracking allocator: unknown role '" + role + "': use 'host' or 'device'");
  }
  TrackingHeap::instance().set_role(role == "device" ? Role::kDevice : Role::kHost);
}

py::dict as_dict(const TrackedBlock& block) {
  py::dict out;
  out["id"] = block.id;
  out["address"] = block.address;
  out["bytes"] = block.bytes;
  out["role"] = role_name(block.role);
  out["born_ns"] = block.born_ns;
  return out;
}

py::list drain_tracking_events() {
  const std::vector<TrackingEvent> events = TrackingHeap::instance().drain_events();
  py::list out;
  for (const TrackingEvent& event : events) {
    out.append(py::make_tuple(event.is_free ? "free" : "alloc", event.block.id, event.block.address, event.block.bytes,
                              role_name(event.block.role), event.t_ns));
  }
  return out;
}

py::list live_tracked_blocks() {
  py::list out;
  for (const TrackedBlock& block : TrackingHeap::instance().live()) {
    out.append(as_dict(block));
  }
  return out;
}

py::dict tracking_totals() {
  const TrackingTotals totals = TrackingHeap::instance().totals();
  py::dict out;
  for (const Role role : {Role::kHost, Role::kDevice}) {
    const auto index = static_cast<std::size_t>(role);
    out[(std::string(role_name(role)) + "_live_bytes").c_str()] = totals.live_bytes[index];
    out[(std::string(role_name(role)) + "_peak_bytes").c_str()] = totals.peak_bytes[index];
  }
  out["dropped_events"] = totals.dropped_events;
  return out;
}

void bind_tracking(py::module_& module) {
  module.def("tracking_allocator_install",
             [] { c10::SetAllocator(at::kCPU, &tracking_allocator(), kAllocatorPriority); });
  module.def("tracking_allocator_uninstall",
             [] { c10::SetAllocator(at::kCPU, c10::GetDefaultCPUAllocator(), kAllocatorPriority); });
  module.def("tracking_allocator_installed", [] { return c10::GetAllocator(at::kCPU) == &tracking_allocator(); });
  module.def("tracking_allocator_set_role", &set_role);
  module.def("tracking_allocator_role", [] { return role_name(TrackingHeap::instance().role()); });
  module.def("tracking_allocator_events", &drain_tracking_events);
  module.def("tracking_allocator_live", &live_tracked_blocks);
  module.def("tracking_allocator_totals", &tracking_totals);
  module.def("tracking_allocator_reset_peaks", [] { TrackingHeap::instance().reset_peaks(); });
  module.attr("TRACKED_FROM_BYTES") = kTrackedFromBytes;
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) {
      std::rethrow_exception(pointer);
    }
  } catch (const StorageFailure& failure) {
    const py::object error =
        py::module_::import("memascend.storage.errors")
            .attr("StorageError")(failure.op, failure.device, failure.offset, failure.expected, failure.got,
                                  failure.error != 0 ? py::object(py::int_(failure.error)) : py::object(py::none()),
                                  failure.reason);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  } catch (const Error& error) {
    PyObject* type = error.kind() == ErrorKind::kInvalidArgument ? PyExc_ValueError
                     : error.kind() == ErrorKind::kOutOfMemory   ? PyExc_MemoryError
                                                                 : PyExc_RuntimeError;
    PyErr_SetString(type, error.what());
  }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "Native parts of memascend; use the Python modules that wrap them.";
  py::register_exception_translator(&translate);
  set_poll_while_waiting(&raise_pending_signals);

  module.def("pinned_empty", &pinned_empty, py::arg("numel"), py::arg("dtype"), py::arg("reserved_bytes"),
             py::arg("lock"), py::arg("require_lock"), py::arg("pages") = "small", py::arg("placement") = py::none());
  module.def("pages_by_node", &named_pages_by_node, py::arg("address"), py::arg("bytes"), NoGil());
  module.def("compute_alone", [] {
    (void)at::get_num_threads();  // the first call of a thread sets what it may use
#if defined(_OPENMP)
    omp_set_num_threads(1);
#endif
  });
  module.def("end_team", [] {
#if defined(_OPENMP) && defined(__GNUC__) && __GNUC__ >= 9
    omp_pause_resource(omp_pause_soft, omp_get_initial_device());
#endif
  });
  module.def("numa_chunk_counts", [] {
    const ChunkCounts counts = numa_chunk_counts();
    return std::pair(counts.near, counts.elsewhere);
  });
  module.def("move_pages", &named_move_pages, py::arg("address"), py::arg("bytes"), py::arg("placement"));
  module.def(
      "load_latency_ns",
      [](std::uintptr_t address, std::int64_t bytes, std::int64_t hops, std::uint64_t seed) {
        return load_latency_ns(reinterpret_cast<void*>(address), bytes, hops, seed);
      },
      py::arg("address"), py::arg("bytes"), py::arg("hops"), py::arg("seed") = 0, NoGil());
  module.def("pinned_contains", [](std::uintptr_t address, std::int64_t bytes) {
    return PinnedRegistry::instance().contains(address, bytes);
  });
  module.def("pinned_events", &drain_pinned_events);
  module.def("pinned_live", &live_pinned_blocks);
  module.def("pinned_mark_registered", [](std::uint64_t id) { PinnedRegistry::instance().mark_registered(id); });
  module.def("pinned_set_unregister_callback", &set_unregister_callback);
  module.def("memlock_limit_bytes", &memlock_limit_bytes);
  module.attr("PAGE_BYTES") = kPageBytes;
  module.attr("HUGE_PAGE_BYTES") = kHugePageBytes;

  module.def("has_overflow", &tensor_has_overflow, NoGil());
  module.def("read_all", &read_all_bytes, NoGil());
  module.def("simd_level", [] { return simd_level_name(best_simd_level()); });

  bind_faults(module);
  bind_file_engine(module);
  bind_store(module);
  bind_direct_engine(module);
  bind_tracking(module);
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

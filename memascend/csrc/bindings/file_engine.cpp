// Bindings of the engine for plain files.

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "completions.h"
#include "core/file_engine.h"

namespace memascend::bindings {
namespace {

std::uint64_t submit(FileEngine& engine, IoOp op, const at::Tensor& tensor, std::string path, std::int64_t offset) {
  if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    throw py::value_error("file engine: " + path + ": give a contiguous CPU tensor (got " + tensor.toString() +
                          (tensor.is_contiguous() ? "" : ", not contiguous") + ")");
  }
  void* data = op == IoOp::kRead ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
  return engine.submit(op, data, static_cast<std::int64_t>(tensor.nbytes()), std::move(path), offset,
                       std::make_shared<at::Tensor>(tensor));
}

}  // namespace

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

}  // namespace memascend::bindings

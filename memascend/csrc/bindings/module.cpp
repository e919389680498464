// The module memascend._C. Only the files of this folder use both torch and the core: they only convert between them.

#include <torch/version.h>

#include <exception>

#include "bindings.h"
#include "completions.h"
#include "core/device.h"
#include "core/errors.h"

// Read from the file before it is loaded (memascend/extension.py).
extern "C" __attribute__((used, visibility("default"))) const char memascend_built_against[] =
    "memascend extension built against torch " TORCH_VERSION;

namespace memascend::bindings {
namespace {

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
}  // namespace memascend::bindings

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace memascend::bindings;
  module.doc() = "Native parts of memascend; use the Python modules that wrap them.";
  pybind11::register_exception_translator(&translate);
  memascend::set_poll_while_waiting(&raise_pending_signals);

  bind_memory(module);
  bind_kernels(module);
  bind_faults(module);
  bind_file_engine(module);
  bind_direct_engine(module);
  bind_tracking(module);
}

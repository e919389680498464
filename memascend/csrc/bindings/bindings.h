// Declarations for the binding files: one function per subject, which adds it to the module.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "released_gil.h"

namespace memascend::bindings {

namespace py = pybind11;
using NoGil = py::call_guard<ReleasedGil>;

void bind_memory(py::module_& module);         // pinned memory and its placement
void bind_kernels(py::module_& module);        // functions that are not operators of torch
void bind_faults(py::module_& module);         // fault injection for tests
void bind_file_engine(py::module_& module);
void bind_direct_engine(py::module_& module);  // with its store
void bind_tracking(py::module_& module);       // the tracking allocator

}  // namespace memascend::bindings

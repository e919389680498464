// Others run Python while this thread is in the core.

#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace memascend {

// As pybind11::gil_scoped_release, but for a thread that comes back when the interpreter has ended meanwhile: up to
// Python 3.13 that thread is ended there by unwinding its stack, which no destructor survives (std::terminate, status
// 134 in place of the script's). It stays here instead, as in Python 3.14, until the process has ended.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) {
        pause();
      }
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace memascend

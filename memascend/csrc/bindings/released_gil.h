// Lets other threads run Python while this one is in the core.

#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace memascend {

// Like pybind11::gil_scoped_release, except for a thread that returns after the interpreter has ended. Up to Python
// 3.13, Python ends such a thread by unwinding its stack, which a destructor turns into std::terminate (status 134
// instead of the script's). Here the thread waits until the process has ended, as in Python 3.14.
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

// Bindings that both engines share: outcomes of requests, and statistics.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bindings.h"
#include "core/completion.h"
#include "core/io_statistics.h"

namespace memascend::bindings {

py::tuple as_tuple(const RequestOutcome& outcome);            // (cancelled, failure or None)
py::list as_list(const std::vector<EndedRequest>& ended);     // (request, cancelled, failure or None) for each
py::dict as_dict(const IoStatistics& counted);

// Raises the exceptions of pending signal handlers, so that Ctrl-C and other signals that Python handles end a wait for
// a drive that hangs.
void raise_pending_signals();

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

// Releases the GIL while it joins the workers, since that may take as long as the requests in flight.
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
      // Leaks the engine and its fault layer for good, since a worker may be in the kernel and still return from there.
      .def("leave", [](const py::object& self) { self.inc_ref(); })
      .def("statistics", [](const Engine& self) { return as_dict(self.statistics()); })
      .def_property_readonly("buffered_path", &Engine::buffered_path)
      .def_property_readonly("completion_fd", &Engine::completion_fd)
      .def_property_readonly("pending", &Engine::pending);
}

}  // namespace memascend::bindings

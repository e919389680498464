#include "completions.h"

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "core/fault_layer.h"

namespace memascend::bindings {

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

py::list as_list(const std::vector<EndedRequest>& ended) {
  py::list out;
  for (const auto& [request, outcome] : ended) {
    out.append(py::make_tuple(request) + as_tuple(outcome));
  }
  return out;
}

// Python runs signal handlers only in the main thread. Other threads return at once, without taking the GIL: they may
// still be waiting when the interpreter has ended.
void raise_pending_signals() {
  if (gettid() != getpid()) {
    return;
  }
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

namespace {

py::list histogram_of(const LatencyHistogram& histogram) {
  py::list out;
  for (std::size_t bucket = 0; bucket < LatencyHistogram::kBuckets; ++bucket) {
    if (histogram.counts()[bucket] > 0) {
      out.append(py::make_tuple(LatencyHistogram::bucket_floor_us(bucket), histogram.counts()[bucket]));
    }
  }
  return out;
}

}  // namespace

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
      .def("demand_alignment", &FaultLayer::demand_alignment, py::arg("bytes"), py::arg("reported") = true)
      .def("clear", &FaultLayer::clear)
      .def_property_readonly("injected", &FaultLayer::injected);
}

}  // namespace memascend::bindings

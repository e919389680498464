// Bindings of the tracking allocator, which replaces PyTorch's and records its blocks.

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings.h"
#include "core/errors.h"
#include "core/tracking.h"

namespace memascend::bindings {
namespace {

void free_tracked(void* pointer) {
  c10::profiledCPUMemoryReporter().Delete(pointer);
  TrackingHeap::instance().deallocate(pointer);
}

// Replaces PyTorch's CPU allocator. Blocks that the stock allocator has allocated keep their own deleter.
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

}  // namespace

void bind_tracking(py::module_& module) {
  module.def(
      "tracking_allocator_install",
      [](bool events) {
        TrackingHeap::instance().set_logging(events);
        c10::SetAllocator(at::kCPU, &tracking_allocator(), kAllocatorPriority);
      },
      py::arg("events"));
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

}  // namespace memascend::bindings

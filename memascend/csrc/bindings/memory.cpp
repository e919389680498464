// Bindings of pinned memory, the placement of its pages, and memory latency.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/Dtype.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "core/latency.h"
#include "core/numa_threads.h"
#include "core/pinned.h"
#include "core/placement.h"

namespace memascend::bindings {
namespace {

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

// Mode, nodes, and their weights for striped memory. None: on the node of the thread that touches a page.
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
  // The storage owns the lambda: it runs once, after the last view has been destroyed, with or without the GIL.
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

}  // namespace

void bind_memory(py::module_& module) {
  module.def("pinned_empty", &pinned_empty, py::arg("numel"), py::arg("dtype"), py::arg("reserved_bytes"),
             py::arg("lock"), py::arg("require_lock"), py::arg("pages") = "small", py::arg("placement") = py::none());
  module.def("pages_by_node", &named_pages_by_node, py::arg("address"), py::arg("bytes"), NoGil());
  module.def("compute_alone", [] {
    (void)at::get_num_threads();  // the first call in a thread sets its number of threads
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
}

}  // namespace memascend::bindings

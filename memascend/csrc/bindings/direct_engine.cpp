// Bindings of the direct engine and its store.

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "completions.h"
#include "core/crc32c.h"
#include "core/direct_engine.h"
#include "core/store.h"

namespace memascend::bindings {
namespace {

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

// Lists the records of a store or of an engine.
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

void bind_store(py::module_& module) {
  py::class_<Store, std::shared_ptr<Store>>(module, "Store")
      .def(py::init(&open_store), py::arg("paths"), py::arg("owner"), py::arg("control_folder"),
           py::arg("stripe_bytes"), py::arg("any_owner"), py::arg("require_direct") = false,
           py::arg("faults") = nullptr, py::keep_alive<1, 8>(), NoGil())
      .def("find", &find_record<Store>)
      .def("list", &list_records<Store>)
      .def("grow", &Store::grow, py::arg("data_bytes"), py::arg("allocate"), NoGil())
      .def("erase", &Store::erase, py::arg("key"), py::arg("generation") = py::none(), NoGil())
      .def("commit", &Store::commit, NoGil())
      .def("uncommitted", &Store::uncommitted)
      .def("collect", &Store::collect, NoGil())
      .def("verify",
           [](Store& self, const std::string& key) {
             Verified found;
             {
               const ReleasedGil no_gil;
               found = self.verify(key);
             }
             return py::make_tuple(as_object(found.record), found.problem);
           })
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

}  // namespace

void bind_direct_engine(py::module_& module) {
  bind_store(module);
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
          [](DirectEngine& self, const std::string& key) {
            return self.store().verify(key, [&] { return self.find(key); }).problem;
          },
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

}  // namespace memascend::bindings

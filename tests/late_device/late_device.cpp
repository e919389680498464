// A device for tests, `late:0`: its memory is the host's and its operators are the CPU's, but what is copied without
// blocking is copied as late as its order allows, as a GPU may do. A copy that nobody waits for is not there; memory
// that is freed is filled with NaN.
//
// The current stream computes at once, after what it was told to wait for. Other streams keep their copies until an
// event of theirs is waited for or synchronised with, or has been asked for `lateness` times.
//
// torch/extension.h is not included: with it the compiler takes 21 s instead of 9.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>

namespace {

constexpr auto kLate = c10::DeviceType::PrivateUse1;

// -- memory --------------------------------------------------------------------------------------------

std::atomic<int64_t> allocated{0}, most_allocated{0};
constexpr size_t kHeader = 64;

void release(void* data) {
  if (data == nullptr)
    return;
  auto* block = static_cast<char*>(data) - kHeader;
  const auto bytes = *reinterpret_cast<size_t*>(block);
  std::memset(data, 0xff, bytes);
  allocated -= static_cast<int64_t>(bytes);
  std::free(block);
}

struct LateAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kLate, 0);
    if (bytes == 0)
      return {nullptr, nullptr, &release, device};
    auto* block = static_cast<char*>(std::aligned_alloc(kHeader, (bytes + 2 * kHeader - 1) / kHeader * kHeader));
    TORCH_CHECK(block != nullptr, "late: no memory");
    *reinterpret_cast<size_t*>(block) = bytes;
    const auto now = allocated += static_cast<int64_t>(bytes);
    auto most = most_allocated.load();
    while (now > most && !most_allocated.compare_exchange_weak(most, now)) {
    }
    std::memset(block + kHeader, 0xff, bytes);
    return {block + kHeader, block + kHeader, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
};

LateAllocator allocator;
const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

// -- streams --------------------------------------------------------------------------------------------

struct Task {
  std::function<void()> run;
  int64_t event = -1;  // reached by this task
};

struct Event {
  int64_t stream;
  bool reached = false;
  int64_t asked = 0;
};

std::recursive_mutex mutex;
std::deque<std::deque<Task>> streams(1);  // the first one computes
std::deque<Event> events;
int64_t lateness = 3;
thread_local int64_t current_stream = 0;

void run_one(int64_t stream) {
  auto task = std::move(streams[stream].front());
  streams[stream].pop_front();
  if (task.run)
    task.run();
  if (task.event >= 0)
    events[task.event].reached = true;
}

void reach(int64_t event) {
  while (!events[event].reached) run_one(events[event].stream);
}

void catch_up(int64_t stream) {
  while (!streams[stream].empty()) run_one(stream);
}

void catch_up_all() {
  const std::lock_guard lock(mutex);
  for (size_t stream = 0; stream < streams.size(); ++stream) catch_up(static_cast<int64_t>(stream));
}

int64_t new_stream() {
  const std::lock_guard lock(mutex);
  streams.emplace_back();
  return static_cast<int64_t>(streams.size()) - 1;
}

int64_t record_event(int64_t stream) {
  const std::lock_guard lock(mutex);
  events.push_back({stream});
  const auto event = static_cast<int64_t>(events.size()) - 1;
  if (streams[stream].empty())
    events[event].reached = true;
  else
    streams[stream].push_back({nullptr, event});
  return event;
}

void wait_event(int64_t stream, int64_t event) {
  const std::lock_guard lock(mutex);
  streams[stream].push_back({[event] { reach(event); }});
}

bool query_event(int64_t event) {
  const std::lock_guard lock(mutex);
  if (++events[event].asked > lateness)
    reach(event);
  return events[event].reached;
}

void synchronize_event(int64_t event) {
  const std::lock_guard lock(mutex);
  reach(event);
}

// -- operators --------------------------------------------------------------------------------------------

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu())
    return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const at::AutoDispatchBelowAutograd guard;
  const auto from = on_host(source), to = on_host(target);
  const std::lock_guard lock(mutex);
  if (non_blocking && current_stream != 0 && from.scalar_type() == to.scalar_type()) {
    // Of the host's memory and of the device's nothing is kept alive: that is the caller's to do.
    const auto a = at::from_blob(from.data_ptr(), from.sizes(), from.strides(), from.options());
    const auto b = at::from_blob(to.data_ptr(), to.sizes(), to.strides(), to.options());
    streams[current_stream].push_back({[a, b] { b.copy_(a); }});
    return target;
  }
  catch_up(current_stream);
  to.copy_(from);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  int64_t numel = 1;
  for (const auto each : size) numel *= each;
  const auto bytes = static_cast<size_t>(numel + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) {
    auto data = allocator.allocate(bytes);
    if (self.storage().nbytes() != 0)
      std::memcpy(data.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr_noswap(std::move(data));
    self.storage().set_nbytes(bytes);
  }
  tensor->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor strided_view(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                        std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                       self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(offset.value_or(self.storage_offset()));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  const auto host = on_host(self).view(size);
  return strided_view(self, host.sizes(), host.strides(), self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return strided_view(self, size, stride, self.storage_offset());
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  {
    const std::lock_guard lock(mutex);
    catch_up(0);
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("as_strided", &strided_view);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

// -- the device --------------------------------------------------------------------------------------------

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kLate> {
  c10::Device exchangeDevice(c10::Device) const override { return {kLate, 0}; }
  c10::Device getDevice() const override { return {kLate, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kLate, 0));
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kLate, 0));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // Whoever runs copies may need Python's lock meanwhile.
  using unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("new_stream", &new_stream, unlocked());
  m.def("current_stream", [] { return current_stream; });
  m.def("use_stream", [](int64_t stream) {
    std::swap(current_stream, stream);
    return stream;
  });
  m.def("record_event", &record_event, unlocked());
  m.def("wait_event", &wait_event, unlocked());
  m.def("query_event", &query_event, unlocked());
  m.def("synchronize_event", &synchronize_event, unlocked());
  m.def("synchronize", &catch_up_all, unlocked());
  m.def("allocated_bytes", [] { return allocated.load(); });
  m.def("most_allocated_bytes", [] { return most_allocated.load(); });
  m.def("forget_peak", [] { most_allocated = allocated.load(); });
  m.def("set_lateness", [](int64_t queries) { lateness = queries; });
}

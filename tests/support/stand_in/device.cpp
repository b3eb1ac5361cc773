// A GPU that needs none: PyTorch's kernels for CPUs behind a device of its own (PrivateUse1, "fakegpu").
//
// It is as strict as CUDA where programs err: devices do not mix, what a copy without blocking brings to the host is
// not there before somebody has waited for it, and each operation that stops the host is told, with its name. The
// device lags LAG kernels behind the host; who looks at a copy later than that does not stop. Streams are numbers only.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IntArrayRef;
using c10::Stream;

constexpr DeviceType FAKE = DeviceType::PrivateUse1;
constexpr long LAG = 16;

std::atomic<long> launched{0};  // kernels
std::atomic<long> allocated{0}, peak{0};  // bytes
std::mutex guard;
std::map<std::string, long> counts;  // of kernels, by name
PyObject* listener = nullptr;
thread_local int inside = 0;  // a kernel, or a copy: what it calls itself is not told
thread_local DeviceIndex current = 0;
thread_local std::map<DeviceIndex, c10::StreamId> streams;
std::atomic<c10::StreamId> last_stream{0};

DeviceIndex num_devices() {
  static const char* given = std::getenv("FAKEGPU_DEVICES");
  return given ? static_cast<DeviceIndex>(std::atoi(given)) : 1;
}

void tell(const std::string& what) {
  if (!listener || inside) return;
  pybind11::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallFunction(listener, "s", what.c_str());
  if (!result) PyErr_Clear();
  Py_XDECREF(result);
}

// Copies to the host that have been asked for and are not there yet.
struct Copy {
  long kernel;
  std::string bytes;
  void* to;  // null where that memory has been freed; no tensor: to let go of one takes Python's lock
};
std::deque<Copy> pending;
long copied = 0;  // that have left `pending`

void arrive_locked() {
  Copy& copy = pending.front();
  if (copy.to) std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
  pending.pop_front();
  copied++;
}

void forget_copies_to(const char* first, const char* end) {
  std::lock_guard<std::mutex> lock(guard);
  for (Copy& copy : pending)
    if (first <= copy.to && copy.to < end) copy.to = nullptr;
}

// Lets the first `end` copies arrive; returns whether the host had to wait for one.
bool arrive(long end) {
  std::lock_guard<std::mutex> lock(guard);
  bool waited = false;
  while (!pending.empty() && copied < end) {
    waited |= launched - pending.front().kernel < LAG;
    arrive_locked();
  }
  return waited;
}

long asked_for() {
  std::lock_guard<std::mutex> lock(guard);
  return copied + static_cast<long>(pending.size());
}

void stop(const std::string& what) {  // the host waits for all
  arrive(asked_for());
  tell(what + " SYNC");
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = static_cast<size_t*>(std::malloc(size + 64));
    *block = size;
    allocated += static_cast<long>(size);
    peak = std::max(peak.load(), allocated.load());
    void* data = reinterpret_cast<char*>(block) + 64;
    return {size ? data : nullptr, block, &release, Device(FAKE, current)};
  }
  static void release(void* block) {
    allocated -= static_cast<long>(*static_cast<size_t*>(block));
    std::free(block);
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(FAKE, &memory);

std::mutex pinned_guard;
std::set<std::pair<const char*, const char*>> pinned_blocks;

struct Pinned final : c10::Allocator {
  struct Block {
    char* data;
    size_t size;
  };
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{static_cast<char*>(std::malloc(size + 1)), size};
    std::lock_guard<std::mutex> lock(pinned_guard);
    pinned_blocks.insert({block->data, block->data + size});
    return {block->data, block, &release, Device(DeviceType::CPU)};
  }
  static void release(void* given) {
    auto* block = static_cast<Block*>(given);
    {
      std::lock_guard<std::mutex> lock(pinned_guard);
      pinned_blocks.erase({block->data, block->data + block->size});
    }
    forget_copies_to(block->data, block->data + block->size);
    std::free(block->data);
    delete block;
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Pinned pinned;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_guard);
  auto* place = static_cast<const char*>(data);
  auto after = pinned_blocks.upper_bound({place, reinterpret_cast<const char*>(UINTPTR_MAX)});
  return after != pinned_blocks.begin() && place < std::max(std::prev(after)->second, std::prev(after)->first + 1);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return FAKE; }
  Device exchangeDevice(Device device) const override {
    Device before(FAKE, current);
    current = device.index();
    return before;
  }
  Device getDevice() const override { return Device(FAKE, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  Stream getStream(Device device) const override { return Stream(Stream::UNSAFE, device, streams[device.index()]); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, Device(FAKE, device.has_index() ? device.index() : current), ++last_stream);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { stop("stream"); }
  void synchronizeDevice(const DeviceIndex) const override { stop("device"); }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new long(0);
    *static_cast<long*>(*event) = asked_for();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* event) const override {
    if (!event) return true;
    std::lock_guard<std::mutex> lock(guard);
    while (!pending.empty() && launched - pending.front().kernel >= LAG) arrive_locked();
    return copied >= *static_cast<long*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event && arrive(*static_cast<long*>(event))) tell("event SYNC");
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<long*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices(); }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

Tensor on_host(const Tensor& tensor) {  // the same memory
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
}

Tensor empty(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(device.value_or(Device(FAKE, current)));
  return at::detail::empty_generic(sizes, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard on(device.value_or(Device(FAKE, current)));
  return at::detail::empty_strided_generic(sizes, strides, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())));
}

void copy_later(const Tensor& from, const Tensor& to) {
  size_t size = to.nbytes();
  std::lock_guard<std::mutex> lock(guard);
  pending.push_back({launched, std::string(static_cast<const char*>(from.data_ptr()), size), to.data_ptr()});
  std::memset(to.data_ptr(), 0xff, size);  // NaN, -1, True: wrong until it has arrived
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool without_blocking) {
  if (!inside && !from.is_cpu() && to.is_cpu()) {
    bool is_plain = from.is_contiguous() && to.is_contiguous() && from.dtype() == to.dtype();
    if (without_blocking && is_plain && is_pinned(to.data_ptr())) {
      tell("d2h async");
      copy_later(from, to);
      return to;
    }
    stop("d2h");
  } else if (!inside && from.is_cpu() && !to.is_cpu()) {
    if (!without_blocking) stop("h2d");
    else tell(from.numel() == 0 || is_pinned(from.data_ptr()) ? "h2d async" : "h2d pageable");
  }
  launched++;
  inside++;
  (to.is_cpu() ? to : on_host(to)).copy_(from.is_cpu() ? from : on_host(from));
  inside--;
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) {
  if (!inside) stop("item");
  return on_host(tensor).item();
}

const std::set<std::string> STOPS{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                  "aten::unique_consecutive", "aten::repeat_interleave.Tensor", "aten::bincount",
                                  "aten::is_nonzero", "aten::equal"};
const std::set<std::string> TAKES_HOST_INDICES{"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"};

// Refuses tensors of different devices, as CUDA does: numbers in a tensor without dimensions may come from the CPU.
void check_devices(const std::string& name, const torch::jit::Stack& stack, size_t arguments) {
  std::optional<Device> device;
  bool host = false;
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.device().type() == FAKE) {
      TORCH_CHECK(!device || *device == tensor.device(), name, ": tensors are on ", *device, " and ", tensor.device());
      device = tensor.device();
    } else if (tensor.dim() > 0) {
      host = true;
    }
  };
  for (size_t i = stack.size() - arguments; i < stack.size(); i++) {
    if (stack[i].isTensor()) look(stack[i].toTensor());
    else if (stack[i].isTensorList()) for (const Tensor& each : stack[i].toTensorVector()) look(each);
  }
  if (!device || !host) return;
  if (TAKES_HOST_INDICES.count(name)) {
    stop("index on the host, h2d");
    return;
  }
  TORCH_CHECK(name == "aten::_foreach_copy_", "Expected all tensors to be on the same device, but found at least two ",
              "devices, ", *device, " and cpu! (in ", name, ")");
}

// Kernels that CPUs have and CUDA has not.
void check_dtypes(const std::string& name, const torch::jit::Stack& stack, size_t arguments) {
  if (name != "aten::_amp_foreach_non_finite_check_and_unscale_") return;
  for (const Tensor& each : stack[stack.size() - arguments].toTensorVector())
    TORCH_CHECK(each.scalar_type() != at::kBFloat16,
                "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'");
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!inside) {
    const std::string& name = op.schema().operator_name().name;
    std::string overload = op.schema().overload_name();
    std::string whole = overload.empty() ? name : name + "." + overload;
    check_devices(TAKES_HOST_INDICES.count(whole) ? whole : name, *stack, op.schema().arguments().size());
    check_dtypes(name, *stack, op.schema().arguments().size());
    bool knows_size = whole == "aten::repeat_interleave.Tensor" && !stack->back().isNone();
    if ((STOPS.count(name) || STOPS.count(whole)) && !knows_size) stop(name);
    std::lock_guard<std::mutex> lock(guard);
    counts[name]++;
  }
  launched++;
  inside++;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    inside--;
    throw;
  }
  inside--;
}

// Its schema does not say that it changes the running statistics, so a fallback would not bring them back.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                              const std::optional<Tensor>& bias, const std::optional<Tensor>& mean,
                                              const std::optional<Tensor>& variance, bool training, double momentum,
                                              double epsilon) {
  auto host = [](const std::optional<Tensor>& tensor) {
    TORCH_CHECK(!tensor || !tensor->defined() || !tensor->is_cpu(), "Expected all tensors to be on the same device");
    return tensor && tensor->defined() ? std::optional<Tensor>(on_host(*tensor)) : std::nullopt;
  };
  launched++;
  inside++;
  auto [output, saved_mean, saved_inverse] = at::native_batch_norm(
      on_host(input), host(weight), host(bias), host(mean), host(variance), training, momentum, epsilon);
  std::tuple<Tensor, Tensor, Tensor> result{output.to(input.device()), saved_mean.to(input.device()),
                                            saved_inverse.to(input.device())};
  inside--;
  return result;
}

// Convolutions have no fallback: a backend brings its own.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
                   int64_t groups) {
  bool has_bias = bias && bias->defined();
  TORCH_CHECK(!input.is_cpu() && !weight.is_cpu() && !(has_bias && bias->is_cpu()),
              "Expected all tensors to be on the same device");
  launched++;
  inside++;
  Tensor result = at::convolution(on_host(input), on_host(weight), has_bias ? on_host(*bias) : Tensor(), stride,
                                  padding, dilation, transposed, output_padding, groups)
                      .to(input.device());
  inside--;
  return result;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                                        IntArrayRef dilation, bool transposed,
                                                        IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  TORCH_CHECK(!gradient.is_cpu() && !input.is_cpu() && !weight.is_cpu(),
              "Expected all tensors to be on the same device");
  int64_t channels = gradient.size(1);
  launched++;
  inside++;
  auto [to_input, to_weight, to_bias] =
      at::convolution_backward(on_host(gradient), on_host(input), on_host(weight), IntArrayRef{channels}, stride,
                               padding, dilation, transposed, output_padding, groups, wanted);
  auto on_device = [&](const Tensor& tensor) { return tensor.defined() ? tensor.to(input.device()) : tensor; };
  std::tuple<Tensor, Tensor, Tensor> result{on_device(to_input), on_device(to_weight), on_device(to_bias)};
  inside--;
  return result;
}

Tensor strided_view(const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                         tensor.key_set(), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.value_or(tensor.storage_offset()));
  return result;
}

Tensor view(const Tensor& tensor, IntArrayRef sizes) {
  auto found = at::infer_size_dv(sizes, tensor.numel());
  auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), found);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with the tensor's strides. Use .reshape(...) instead.");
  return strided_view(tensor, found, *strides, tensor.storage_offset());
}

Tensor reshape_alias(const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides) {
  return strided_view(tensor, sizes, strides, tensor.storage_offset());
}

Tensor& set_(Tensor& tensor, c10::Storage source, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

Tensor& set_all_(Tensor& tensor, c10::Storage source) {
  auto size = static_cast<int64_t>(source.nbytes() / tensor.itemsize());
  return set_(tensor, std::move(source), 0, {size}, {1});
}

const Tensor& resize_(const Tensor& tensor, IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  size_t needed = c10::multiply_integers(sizes) * tensor.itemsize();
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) {
    c10::DeviceGuard on(tensor.device());
    auto data = memory.allocate(needed);
    if (storage->nbytes()) std::memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(needed);
  }
  impl->set_sizes_contiguous(sizes);
  return tensor;
}

void record_stream(Tensor&, Stream) {  // streams are numbers only: it is counted
  std::lock_guard<std::mutex> lock(guard);
  counts["aten::record_stream"]++;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &strided_view);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage", &set_all_);
  m.impl("set_.source_Storage_storage_offset", &set_);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("resize_", &resize_);
  m.impl("record_stream", &record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
namespace at::autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}
}  // namespace at::autocast

#include "fakenccl.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  module.def("listen", [](const pybind11::object& given) { listener = given.is_none() ? nullptr : given.inc_ref().ptr(); });
  module.def("counts", [] {
    std::lock_guard<std::mutex> lock(guard);
    return counts;
  });
  module.def("clear", [] {
    std::lock_guard<std::mutex> lock(guard);
    counts.clear();
  });
  module.def("define_fakenccl", [] {
    auto self = pybind11::module::import("fakedev");
    define_fakenccl(self);
  });
  module.def("device_count", [] { return static_cast<int>(num_devices()); });
  module.def("current_device", [] { return static_cast<int>(current); });
  module.def("set_device", [](int device) { current = static_cast<DeviceIndex>(device); });
  module.def("memory_allocated", [] { return allocated.load(); });
  module.def("max_memory_allocated", [] { return peak.load(); });
  module.def("reset_peak_memory_stats", [] { peak = allocated.load(); });
}

// A CUDA device for a build of torch that has none: memory of its own, and operations that are done by the CPU's kernels.
//
// It refuses what a GPU refuses: tensors of the host beside its own, and generators of the host. It counts the times that
// the host waits for it. Its random numbers are those of the CPU's generator with the same seed.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <set>

using namespace at;

namespace {

// -- waits

bool refuses_waits = false;
int64_t waits = 0;
thread_local bool is_inside = false;  // of an operation, whose copies between host and device are the simulation's

void wait_for(const char* what) {
  if (is_inside) return;
  ++waits;
  TORCH_CHECK(!refuses_waits, "called a synchronizing CUDA operation: ", what);
}

// -- memory, the current device, generators

int from_environment(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text ? atoi(text) : otherwise;
}

// Of torchrun's ranks each has one of its own.
const DeviceIndex COUNT = from_environment("LOCAL_WORLD_SIZE", 1);
const Device DEVICE(kCUDA, from_environment("LOCAL_RANK", 0));

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(!bytes || !posix_memalign(&data, 64, bytes), "CUDA out of memory");
    if (bytes) memset(data, 0xff, bytes);  // NaN, so that what nobody has written is noticed
    return {data, data, &free, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t count) const override { memcpy(to, from, count); }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = kCUDA;
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for("synchronize"); }
  void synchronizeEvent(void*) const override { wait_for("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct DeviceGenerator final : c10::GeneratorImpl {
  Generator host;
  explicit DeviceGenerator(Generator host_)
      : GeneratorImpl(DEVICE, DispatchKeySet(DispatchKey::CUDA)), host(std::move(host_)) {}
  c10::GeneratorImpl* impl() const { return host.unsafeGetGeneratorImpl(); }
  void set_current_seed(uint64_t seed) override { impl()->set_current_seed(seed); }
  void set_offset(uint64_t offset) override { impl()->set_offset(offset); }
  uint64_t get_offset() const override { return impl()->get_offset(); }
  uint64_t current_seed() const override { return impl()->current_seed(); }
  uint64_t seed() override { return impl()->seed(); }
  void set_state(const c10::TensorImpl& state) override { impl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return impl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override { return new DeviceGenerator(host.clone()); }
};

Generator new_generator() {
  return Generator(c10::make_intrusive<DeviceGenerator>(at::detail::createCPUGenerator()));
}

}  // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {  // torch looks for this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    static Generator generator = new_generator();
    return generator;
  }
  Generator getNewGenerator(DeviceIndex) const override { return new_generator(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  DeviceIndex current_device() const override { return DEVICE.index(); }
  DeviceIndex getCurrentDevice() const override { return DEVICE.index(); }
  int getNumGPUs() const override { return COUNT; }
  Device getDeviceFromPtr(void*) const override { return DEVICE; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(kCPU); }
  void deviceSynchronize(DeviceIndex) const override { wait_for("synchronize"); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

namespace {

// -- operations

// Their numbers of results depend on values, which the host has to know.
const std::set<std::string> WAITS = {"aten::nonzero", "aten::masked_select", "aten::unique_consecutive", "aten::_unique2",
                                     "aten::equal", "aten::is_nonzero", "aten::repeat_interleave"};
const std::set<std::string> TAKES_INDICES = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"};
const std::set<std::string> TAKES_NO_NUMBERS = {"aten::cat", "aten::stack"};  // of the host

void check(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.operator_name().name;
  const size_t first = stack->size() - schema.arguments().size();
  bool has_own = false, has_hosts = false;
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    has_own |= tensor.is_cuda();
    has_hosts |= !tensor.is_cuda() && (tensor.dim() || TAKES_NO_NUMBERS.count(name));
  };
  for (size_t i = first; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) look(value.toTensor());
    else if (value.isTensorList()) { for (const Tensor& tensor : value.toTensorList()) look(tensor); }
    else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu': ", name);
      value = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
    }
  }
  TORCH_CHECK(!(has_own && has_hosts), "Expected all tensors to be on the same device, but found cuda:0 and cpu: ", name);
  if (WAITS.count(name)) wait_for(name.c_str());
  if (TAKES_INDICES.count(name))
    for (const IValue& index : (*stack)[first + 1].toList().vec())
      if (index.isTensor() && index.toTensor().defined()) {
        if (index.toTensor().scalar_type() == kBool) wait_for("an index that is a mask");
        if (!index.toTensor().is_cuda()) wait_for("an index of the host");
      }
}

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check(op, stack);
  struct Inside {
    bool before = std::exchange(is_inside, true);
    ~Inside() { is_inside = before; }
  } inside;
  at::native::cpu_fallback(op, stack);
}

Tensor seen_by_the_host(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), TensorOptions().dtype(tensor.dtype()));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.device() != to.device() && (to.is_cpu() || (from.numel() && !non_blocking))) wait_for("copy to or from the host");
  seen_by_the_host(to).copy_(seen_by_the_host(from));
  return to;
}

Tensor& copy(Tensor& self, const Tensor& from, bool non_blocking) {
  copy_from(from, self, non_blocking);
  return self;
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  const size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  auto storage = self.storage();
  if (storage.nbytes() < bytes) {
    auto data = memory.allocate(bytes);
    if (storage.nbytes()) memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  resize(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>,
             std::optional<bool>, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}

Scalar item(const Tensor& self) {
  wait_for("item");
  return at::_local_scalar_dense(seen_by_the_host(self));
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }
Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); }
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

Tensor& set_storage(Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
}

const bool has_allocator = [] {
  c10::SetAllocator(kCUDA, &memory);
  return true;
}();

}  // namespace

extern "C" void refuse_waits(bool refuses) { refuses_waits = refuses; }
extern "C" int64_t num_waits() { return waits; }

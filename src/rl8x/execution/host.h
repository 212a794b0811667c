// The runtime of a compiled program: the functions that Inductor's generated C++ calls. Included after its kernels.
//
// Inductor's own runtime creates a torch tensor for every buffer and view. A small minibatch has a hundred of them, and
// they cost more than its arithmetic. Here a tensor is a pointer and a layout. A program has no branches, so that the
// n-th tensor of each call has the same layout and lifetime: the first call plans the memory, and the later ones find it
// in place, with torch's view of it for the operators that are torch's. Errors are thrown as literals: `<stdexcept>`
// takes a tenth of a build.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

// The calls that Inductor generated.
static void body(AtenTensorHandle* input_handles, AtenTensorHandle* output_handles);

namespace host {

struct View {
  char* data;
  int64_t ndim;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t dtype;
};

struct Tensor : View {
  int32_t references;
  char* block;              // memory of its own, in all calls
  int64_t capacity;         // bytes of that, until the first call no longer needs it
  Tensor* base;             // the tensor that it is a view of
  AtenTensorHandle torchs;  // torch's tensor of the memory at `shown`
  const char* shown;
  bool is_torchs;  // whether an operator made that, which owns the memory
};

void check(AOTITorchError error, const char* message) {
  if (error != AOTI_TORCH_SUCCESS) throw message;
}

// The tensors of one call at a time, in the order in which they come, and their memory.
struct Memory {
  std::deque<Tensor> tensors;
  size_t begun = 0;
  std::vector<void*> blocks;
  std::multimap<int64_t, char*> unused;  // blocks that the first call no longer needs

  ~Memory() {
    for (Tensor& tensor : tensors) aoti_torch_delete_tensor_object(tensor.torchs);
    for (void* block : blocks) std::free(block);
  }

  char* unused_or_new(int64_t capacity) {
    if (auto found = unused.find(capacity); found != unused.end()) return unused.extract(found).mapped();
    blocks.push_back(std::aligned_alloc(64, capacity));
    if (blocks.back() == nullptr) throw std::bad_alloc();
    return static_cast<char*>(blocks.back());
  }
};

// The memory of the call that this thread runs.
static thread_local Memory* memory = nullptr;

void release(Tensor* tensor) {
  if (tensor == nullptr || --tensor->references > 0) return;
  // An operator might have returned a view of what it was given.
  if (tensor->capacity > 0 && !KEEPS_MEMORY) memory->unused.emplace(std::exchange(tensor->capacity, 0), tensor->block);
  if (tensor->is_torchs) aoti_torch_delete_tensor_object(std::exchange(tensor->torchs, nullptr));
  release(std::exchange(tensor->base, nullptr));
}

// The memories that no call has, as many as threads have run the program at once; the list stays until the process ends.
static std::mutex mutex;
static auto& idle = *new std::vector<std::unique_ptr<Memory>>;

std::unique_ptr<Memory> take() {
  std::lock_guard<std::mutex> lock(mutex);
  if (idle.empty()) return std::make_unique<Memory>();
  std::unique_ptr<Memory> last = std::move(idle.back());
  idle.pop_back();
  return last;
}

Tensor* made(View view) {
  if (memory->begun == memory->tensors.size()) memory->tensors.emplace_back();
  Tensor* tensor = &memory->tensors[memory->begun++];
  static_cast<View&>(*tensor) = view;
  tensor->references = 1;
  return tensor;
}

// Return torch's tensor of a tensor, which keeps it.
AtenTensorHandle torchs(Tensor* tensor) {
  if (tensor->torchs != nullptr && tensor->shown == tensor->data) return tensor->torchs;
  aoti_torch_delete_tensor_object(std::exchange(tensor->torchs, nullptr));
  check(
      aoti_torch_create_tensor_from_blob(
          tensor->data, tensor->ndim, tensor->sizes, tensor->strides, 0, tensor->dtype, aoti_torch_device_type_cpu(), 0,
          &tensor->torchs),
      "aoti_torch_create_tensor_from_blob failed");
  tensor->shown = tensor->data;
  return tensor->torchs;
}

// Handles of this file's tensors are odd numbers; torch's are pointers, which are even.
AtenTensorHandle handle_of(Tensor* tensor) {
  return reinterpret_cast<AtenTensorHandle>(reinterpret_cast<uintptr_t>(tensor) | 1);
}

// Take ownership of the tensor of a handle.
Tensor* taken(AtenTensorHandle handle) {
  uintptr_t number = reinterpret_cast<uintptr_t>(handle);
  if (number & 1) return reinterpret_cast<Tensor*>(number ^ 1);
  if (number == 0) return nullptr;
  void* data = nullptr;
  int64_t *sizes = nullptr, *strides = nullptr, ndim = 0;
  int32_t dtype = 0;
  bool failed = aoti_torch_get_data_ptr(handle, &data) || aoti_torch_get_sizes(handle, &sizes) ||
      aoti_torch_get_strides(handle, &strides) || aoti_torch_get_dim(handle, &ndim) ||
      aoti_torch_get_dtype(handle, &dtype);
  check(failed, "an operator's result has no memory");
  Tensor* tensor = made({static_cast<char*>(data), ndim, sizes, strides, dtype});
  tensor->torchs = handle;
  tensor->shown = tensor->data;
  tensor->is_torchs = true;
  return tensor;
}

AOTITorchError empty_strided(
    int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t, int32_t, AtenTensorHandle* made) {
  Tensor* tensor = host::made({nullptr, ndim, sizes, strides, dtype});
  if (tensor->block == nullptr) {
    int64_t last = 0;
    for (int64_t d = 0; d < ndim; d++) last = sizes[d] == 0 || last < 0 ? -1 : last + (sizes[d] - 1) * strides[d];
    tensor->capacity = ((last + 1) * aoti_torch_dtype_element_size(dtype) / 64 + 1) * 64;
    tensor->block = memory->unused_or_new(tensor->capacity);
  }
  tensor->data = tensor->block;
  *made = handle_of(tensor);
  return AOTI_TORCH_SUCCESS;
}

struct Layout {
  std::vector<int64_t> sizes, strides;
  int32_t dtype;
};

// Copy a tensor to a contiguous one of the same shape.
char* copy(char* to, const char* from, const int64_t* sizes, const int64_t* strides, int64_t ndim, int64_t item) {
  bool whole = true;
  int64_t count = 1;
  for (int64_t d = ndim - 1; d >= 0; d--) {
    whole = whole && (sizes[d] == 1 || strides[d] == count);
    count *= sizes[d];
  }
  if (whole || count == 0) {
    std::memcpy(to, from, count * item);
    return to + count * item;
  }
  for (int64_t i = 0; i < sizes[0]; i++)
    to = copy(to, from + i * strides[0] * item, sizes + 1, strides + 1, ndim - 1, item);
  return to;
}

// Flush denormals to 0 while a program runs, as other compilers for machine learning do: on x86 each costs 100 cycles,
// and Adam's moments of weights whose gradient is 0 become denormal within a thousand updates.
class Flushed {
#ifdef __x86_64__
 public:
  Flushed() { set_all(before_ | 0x8040); }
  ~Flushed() { set_all(before_); }

 private:
  static void set_all(unsigned value) {
#pragma omp parallel num_threads(THREADS) if (THREADS > 1)
    __builtin_ia32_ldmxcsr(value);
  }
  unsigned before_ = __builtin_ia32_stmxcsr();
#endif
};

// Run a program once for each of `count` items, or until its last result, a bool, says no if it `ends`.
//
// `given` and `results` are the addresses of inputs, which go on by `steps` bytes for each item, and of outputs, which
// lie one after the other.
void run(char** given, const int64_t* steps, char** results, size_t num_results, int64_t count, bool ends) {
  static const std::vector<Layout> inputs = {INPUTS};
  std::vector<AtenTensorHandle> in(inputs.size()), out(num_results);
  std::vector<Tensor*> from(num_results);
  std::unique_ptr<Memory> own = take();
  memory = own.get();
  [[maybe_unused]] Flushed flushed;
  for (bool more = true; more && count > 0; count--) {
    memory->begun = 0;
    for (size_t i = 0; i < in.size(); i++) {
      const Layout& one = inputs[i];
      in[i] = handle_of(made({given[i], int64_t(one.sizes.size()), one.sizes.data(), one.strides.data(), one.dtype}));
      given[i] += steps[i];
    }
    body(in.data(), out.data());
    for (size_t i = 0; i < num_results; i++) {
      size_t first = 0;
      while (out[first] != out[i]) first++;
      from[i] = first < i ? from[first] : taken(out[i]);
      from[i]->references += first < i;
      const Tensor& one = *from[i];
      results[i] =
          copy(results[i], one.data, one.sizes, one.strides, one.ndim, aoti_torch_dtype_element_size(one.dtype));
    }
    more = !ends || results[num_results - 1][-1];
    for (Tensor* tensor : from) release(tensor);
  }
  std::lock_guard<std::mutex> lock(mutex);
  idle.push_back(std::move(own));
}

}  // namespace host

// From here on: the names that Inductor's generated code uses.

class RAIIAtenTensorHandle {
 public:
  RAIIAtenTensorHandle() = default;
  RAIIAtenTensorHandle(AtenTensorHandle handle) : tensor_(host::taken(handle)) {}
  RAIIAtenTensorHandle(RAIIAtenTensorHandle&& other) noexcept : tensor_(std::exchange(other.tensor_, nullptr)) {}
  RAIIAtenTensorHandle& operator=(RAIIAtenTensorHandle&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  ~RAIIAtenTensorHandle() { host::release(tensor_); }

  host::Tensor* tensor() const { return tensor_; }
  void* data_ptr() const { return tensor_->data; }
  void reset() { host::release(std::exchange(tensor_, nullptr)); }
  AtenTensorHandle release() { return host::handle_of(std::exchange(tensor_, nullptr)); }
  AtenTensorHandle get() const { return host::torchs(tensor_); }
  operator AtenTensorHandle() const { return get(); }

 private:
  host::Tensor* tensor_ = nullptr;
};

#define AOTI_TORCH_ERROR_CODE_CHECK(call) host::check(call, "failed: " #call)

inline AOTITorchError same_tensor(const RAIIAtenTensorHandle& from, AtenTensorHandle* made) {
  from.tensor()->references++;
  *made = host::handle_of(from.tensor());
  return AOTI_TORCH_SUCCESS;
}

#define aoti_torch_empty_strided host::empty_strided
#define aoti_torch_assign_tensors_out same_tensor
#define aoti_torch_new_tensor_handle same_tensor

inline AtenTensorHandle reinterpret_tensor_wrapper(
    const RAIIAtenTensorHandle& of, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset) {
  host::Tensor* base = of.tensor();
  char* data = base->data + offset * static_cast<int64_t>(aoti_torch_dtype_element_size(base->dtype));
  host::Tensor* tensor = host::made({data, ndim, sizes, strides, base->dtype});
  base->references++;
  tensor->base = base;
  return host::handle_of(tensor);
}

inline RAIIAtenTensorHandle wrap_with_raii_handle_if_needed(AtenTensorHandle handle) { return handle; }
inline const RAIIAtenTensorHandle& wrap_with_raii_handle_if_needed(const RAIIAtenTensorHandle& handle) {
  return handle;
}

inline std::vector<RAIIAtenTensorHandle> steal_from_raw_handles_to_raii_handles(AtenTensorHandle* handles, size_t size) {
  return std::vector<RAIIAtenTensorHandle>(handles, handles + size);
}

template <class T>
T& temporary_reference(T&& value) {
  return value;
}

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Run a program, see above; return an error's message.
EXPORTED const char* rl8x_run(
    char** given, const int64_t* steps, char** results, size_t num_results, int64_t count, bool ends) {
  try {
    host::run(given, steps, results, num_results, count, ends);
    return nullptr;
  } catch (const char* message) {
    return message;
  } catch (const std::exception& caught) {
    static thread_local char message[1000];
    return std::strncpy(message, caught.what(), sizeof(message) - 1);
  }
}

// Free the memory of calls that are over.
EXPORTED void rl8x_free() {
  std::lock_guard<std::mutex> lock(host::mutex);
  host::idle.clear();
}

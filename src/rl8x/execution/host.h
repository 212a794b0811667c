// The runtime of a compiled program: the functions that Inductor's generated C++ calls. Included after its kernels.
//
// Inductor's own runtime creates a torch tensor for every buffer and view. A small minibatch has a hundred of them, and
// they cost more than its arithmetic. Here a tensor is a pointer and a layout, and its memory comes from blocks that this
// program keeps by size. A torch tensor is created only for arguments of torch's operators, as a view that is cached:
// without the cache PPO with minibatches of 64 takes 1.1 times as long (CPU time of one thread, Xeon, torch 2.13).
// Errors are thrown as literals: `<stdexcept>` takes a tenth of a build.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

namespace host {

struct Tensor {
  char* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t ndim;
  int32_t dtype;
  int32_t references;
  int64_t capacity;         // bytes of memory that it owns; 0 for a view
  Tensor* base;             // the tensor that it is a view of
  AtenTensorHandle torchs;  // the torch tensor that it is a view of, owned
};

void check(AOTITorchError error, const char* message) {
  if (error != AOTI_TORCH_SUCCESS) throw message;
}

// The blocks and cached torch views of one call at a time. Blocks are kept from call to call, so that neither memory nor
// speed depends on malloc: glibc before 2.38 reuses no large aligned block that it gets back between small ones.
class Memory {
 public:
  ~Memory() {
    release_retired();
    forget_views();
    for (Block* block : small_) free_all(block);
    for (auto [capacity, block] : large_) free_all(block);
    for (Tensor* tensor : tensors_) delete tensor;
  }

  Tensor* tensor() {
    if (tensors_.empty()) return new Tensor;
    Tensor* last = tensors_.back();
    tensors_.pop_back();
    return last;
  }

  void give_back(Tensor* tensor) { tensors_.push_back(tensor); }

  char* allocate(int64_t capacity) {
    Block*& first = blocks_of(capacity);
    if (first != nullptr) return reinterpret_cast<char*>(std::exchange(first, first->next));
    void* found = nullptr;
    if (posix_memalign(&found, kAlignment, capacity) != 0) throw std::bad_alloc();
    return static_cast<char*>(found);
  }

  void free(char* data, int64_t capacity) {
    if (KEEPS_MEMORY) {
      retired_.emplace_back(data, capacity);
    } else {
      release(data, capacity);
    }
  }

  // Free memory whose release was deferred, since an operator might have returned a view of it.
  void release_retired() {
    for (auto [data, capacity] : retired_) release(data, capacity);
    retired_.clear();
  }

  // Return a torch tensor that views a tensor's memory; this object keeps ownership.
  AtenTensorHandle view(const Tensor& tensor) {
    Key key{tensor.data, tensor.sizes, tensor.strides, tensor.dtype};
    AtenTensorHandle& found = views_[key];
    if (found == nullptr)
      check(
          aoti_torch_create_tensor_from_blob(
              tensor.data, tensor.ndim, tensor.sizes, tensor.strides, 0, tensor.dtype, aoti_torch_device_type_cpu(), 0,
              &found),
          "aoti_torch_create_tensor_from_blob failed");
    return found;
  }

  // Drop cached views if there are too many, as arguments get new addresses. Call only while no operator runs.
  void trim_views() {
    if (views_.size() > kViews) forget_views();
  }

  static int64_t rounded(int64_t bytes) {
    return bytes <= kAlignment ? kAlignment : (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  static constexpr int64_t kAlignment = 64, kSmall = 1 << 16;
  static constexpr size_t kViews = 4096;

  struct Block {
    Block* next;
  };
  struct Key {
    const void* data;
    const int64_t* sizes;
    const int64_t* strides;
    int32_t dtype;
    bool operator==(const Key& other) const {
      return data == other.data && sizes == other.sizes && strides == other.strides && dtype == other.dtype;
    }
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      auto number = [](const void* pointer) { return reinterpret_cast<size_t>(pointer) >> 3; };
      return number(key.data) * 31 + number(key.sizes) * 7 + number(key.strides) + key.dtype;
    }
  };

  Block*& blocks_of(int64_t capacity) {
    return capacity <= kSmall ? small_[capacity / kAlignment] : large_[capacity];
  }

  void release(char* data, int64_t capacity) {
    Block*& first = blocks_of(capacity);
    first = new (data) Block{first};
  }

  static void free_all(Block* block) {
    while (block != nullptr) std::free(std::exchange(block, block->next));
  }

  void forget_views() {
    for (auto& [key, handle] : views_) aoti_torch_delete_tensor_object(handle);
    views_.clear();
  }

  Block* small_[kSmall / kAlignment + 1] = {};
  std::unordered_map<int64_t, Block*> large_;
  std::vector<Tensor*> tensors_;
  std::vector<std::pair<char*, int64_t>> retired_;
  std::unordered_map<Key, AtenTensorHandle, Hash> views_;
};

// The memory of the call that this thread runs.
static thread_local Memory* memory = nullptr;

// A call takes one of the program's memories, so that there are as many as threads have ever run it at once.
class Call {
 public:
  Call() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) idle_.push_back(new Memory);
    memory = idle_.back();
    idle_.pop_back();
  }
  ~Call() {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::exchange(memory, nullptr));
  }
  // Free the memories that no call has.
  static void free_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Memory* each : idle_) delete each;
    idle_.clear();
  }

 private:
  static inline std::mutex mutex_;
  static inline std::vector<Memory*>& idle_ = *new std::vector<Memory*>;  // stays until the process ends
};

Tensor* made(char* data, int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  Tensor* tensor = memory->tensor();
  *tensor = {data, sizes, strides, ndim, dtype, 1, 0, nullptr, nullptr};
  return tensor;
}

void release(Tensor* tensor) {
  if (tensor == nullptr || --tensor->references > 0) return;
  if (tensor->capacity > 0) memory->free(tensor->data, tensor->capacity);
  if (tensor->torchs != nullptr) aoti_torch_delete_tensor_object(tensor->torchs);
  release(tensor->base);
  memory->give_back(tensor);
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
  check(aoti_torch_get_data_ptr(handle, &data), "aoti_torch_get_data_ptr failed");
  check(aoti_torch_get_sizes(handle, &sizes), "aoti_torch_get_sizes failed");
  check(aoti_torch_get_strides(handle, &strides), "aoti_torch_get_strides failed");
  check(aoti_torch_get_dim(handle, &ndim), "aoti_torch_get_dim failed");
  check(aoti_torch_get_dtype(handle, &dtype), "aoti_torch_get_dtype failed");
  Tensor* tensor = made(static_cast<char*>(data), ndim, sizes, strides, dtype);
  tensor->torchs = handle;
  return tensor;
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
  const int64_t* sizes() const { return tensor_->sizes; }
  const int64_t* strides() const { return tensor_->strides; }
  int64_t size(int64_t d) const { return tensor_->sizes[d]; }
  int64_t stride(int64_t d) const { return tensor_->strides[d]; }
  void reset() { host::release(std::exchange(tensor_, nullptr)); }
  AtenTensorHandle release() { return host::handle_of(std::exchange(tensor_, nullptr)); }
  AtenTensorHandle get() const { return tensor_->torchs != nullptr ? tensor_->torchs : host::memory->view(*tensor_); }
  operator AtenTensorHandle() const { return get(); }

 private:
  host::Tensor* tensor_ = nullptr;
};

#define AOTI_TORCH_ERROR_CODE_CHECK(call) host::check(call, "failed: " #call)
#define CACHE_TORCH_DTYPE(name) static const int32_t cached_torch_dtype_##name = aoti_torch_dtype_##name()
#define CACHE_TORCH_DEVICE(name) static const int32_t cached_torch_device_type_##name = aoti_torch_device_type_##name()
#define CACHE_TORCH_LAYOUT(name) static const int32_t cached_torch_layout_##name = aoti_torch_layout_##name()
#define CACHE_TORCH_MEMORY_FORMAT(name) \
  static const int32_t cached_torch_memory_format_##name = aoti_torch_memory_format_##name()

namespace host {

AOTITorchError empty_strided(
    int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t, int32_t, AtenTensorHandle* made) {
  int64_t last = 0;
  for (int64_t d = 0; d < ndim; d++) {
    if (sizes[d] == 0) last = -1;
    if (last >= 0) last += (sizes[d] - 1) * strides[d];
  }
  Tensor* tensor = host::made(nullptr, ndim, sizes, strides, dtype);
  tensor->capacity = Memory::rounded((last + 1) * aoti_torch_dtype_element_size(dtype));
  tensor->data = memory->allocate(tensor->capacity);
  *made = handle_of(tensor);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError same(const RAIIAtenTensorHandle& from, AtenTensorHandle* made) {
  from.tensor()->references++;
  *made = handle_of(from.tensor());
  return AOTI_TORCH_SUCCESS;
}

}  // namespace host

#define aoti_torch_empty_strided host::empty_strided
#define aoti_torch_assign_tensors_out host::same
#define aoti_torch_new_tensor_handle host::same

inline AtenTensorHandle reinterpret_tensor_wrapper(
    const RAIIAtenTensorHandle& of, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t offset) {
  host::Tensor* base = of.tensor();
  char* data = base->data + offset * static_cast<int64_t>(aoti_torch_dtype_element_size(base->dtype));
  host::Tensor* tensor = host::made(data, ndim, sizes, strides, base->dtype);
  base->references++;
  tensor->base = base;
  return host::handle_of(tensor);
}

inline RAIIAtenTensorHandle wrap_with_raii_handle_if_needed(AtenTensorHandle handle) { return handle; }
inline const RAIIAtenTensorHandle& wrap_with_raii_handle_if_needed(const RAIIAtenTensorHandle& handle) {
  return handle;
}

inline std::vector<RAIIAtenTensorHandle> steal_from_raw_handles_to_raii_handles(AtenTensorHandle* handles, size_t size) {
  std::vector<RAIIAtenTensorHandle> owned;
  for (size_t i = 0; i < size; i++) owned.emplace_back(handles[i]);
  return owned;
}

template <class T>
T& temporary_reference(T&& value) {
  return value;
}

namespace host {

constexpr int kMostDims = 16;

struct Layout {
  int64_t sizes[kMostDims];
  int64_t strides[kMostDims];
  int64_t ndim;
  int32_t dtype;
  int64_t step;  // bytes from one item to the next; 0 if it is the same for all items
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
 public:
  Flushed() { set_all(before_ | 0x8040); }
  ~Flushed() { set_all(before_); }

 private:
#ifdef __x86_64__
  static void set_all(unsigned value) {
#pragma omp parallel num_threads(THREADS) if (THREADS > 1)
    __builtin_ia32_ldmxcsr(value);
  }
  unsigned before_ = __builtin_ia32_stmxcsr();
#else
  static void set_all(unsigned) {}
  unsigned before_ = 0;
#endif
};

using Body = void (*)(AtenTensorHandle* inputs, AtenTensorHandle* outputs);

// Run a program once for each item.
//
// `given` and `results` are the addresses of inputs and outputs; those of items advance by the step of their layout,
// those of results, `[count, *]`, by their size in bytes. `ends`: whether the last result is a bool that says whether
// the loop continues; results after its end are 0.
void run(
    Body body, const Layout* inputs, size_t num_inputs, const int64_t* output_bytes, size_t num_outputs, char** given,
    char** results, int64_t count, bool ends) {
  std::vector<AtenTensorHandle> in(num_inputs), out(num_outputs);
  std::vector<Tensor*> from(num_outputs);
  Call call;
  Flushed flushed;
  int64_t done = 0;
  for (bool more = true; more && done < count; done++) {
    memory->trim_views();
    for (size_t i = 0; i < num_inputs; i++) {
      const Layout& one = inputs[i];
      in[i] = handle_of(made(given[i] + done * one.step, one.ndim, one.sizes, one.strides, one.dtype));
    }
    body(in.data(), out.data());
    for (size_t i = 0; i < num_outputs; i++) {
      size_t first = 0;
      while (out[first] != out[i]) first++;
      from[i] = first < i ? from[first] : taken(out[i]);
      from[i]->references += first < i;
      const Tensor& one = *from[i];
      char* to = results[i] + done * output_bytes[i];
      copy(to, one.data, one.sizes, one.strides, one.ndim, aoti_torch_dtype_element_size(one.dtype));
      more = !ends || i + 1 < num_outputs || *reinterpret_cast<bool*>(to);
    }
    for (Tensor* tensor : from) release(tensor);
    memory->release_retired();
  }
  for (size_t i = 0; i < num_outputs; i++)
    std::memset(results[i] + done * output_bytes[i], 0, (count - done) * output_bytes[i]);
}

}  // namespace host

// What Inductor's generated kernels use beside vectors: scalars, sums in chunks, maxima with their indices, transposes.
// Included after vectors.h, which says what these are for.

namespace c10 {

template <class To, class From>
inline To convert(From x) {
  return static_cast<To>(x);
}
template <class T>
inline T div_floor_integer(T a, T b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

}  // namespace c10

// Scalars of reductions; NaN if one of them is.
template <class T>
inline T max_propagate_nan(T a, T b) {
  return a > b || a != a ? a : b;
}
template <class T>
inline T min_propagate_nan(T a, T b) {
  return a < b || a != a ? a : b;
}

// Reductions of the first `count` lanes.
#define MASKED(name, type, result)                               \
  template <class T, int N>                                      \
  inline at::vec::type<T, N> name##_masked_reduce(               \
      const at::vec::type<T, N>& a, const at::vec::type<T, N>& b, int64_t count) { \
    return at::vec::type<T, N>::set(a, result, count);           \
  }
MASKED(sum, VectorizedN, a + b)
MASKED(prod, VectorizedN, a * b)
MASKED(max, VectorizedN, maximum(a, b))
MASKED(min, VectorizedN, minimum(a, b))
MASKED(any, VecMask, a | b)

// A sum in chunks, whose sums are added in pairs. Four sums take turns, so that no addition waits for the one before.
template <class T, uint64_t CHUNK>
class CascadeSumHelper {
 public:
  CascadeSumHelper(uint64_t) {}
  ~CascadeSumHelper() { delete pairs_; }
  CascadeSumHelper& operator=(CascadeSumHelper&&) = delete;  // nor any copy, as it owns its pairs

  T add(const T& term) {
    T sum = first_ + term;
    first_ = second_, second_ = third_, third_ = fourth_, fourth_ = sum;
    if (++count_ % CHUNK == 0) {
      pairs_ = with_chunk(pairs_, count_ / CHUNK - 1, chunk());
      first_ = second_ = third_ = fourth_ = T(0);
    }
    return sum;
  }
  T total() const {
    T total = chunk();
    for (size_t level = 0; count_ / CHUNK >> level; level++)
      if (count_ / CHUNK >> level & 1) total = total + (*pairs_)[level];
    return total;
  }

 private:
  // The sum of the last 1, 2, 4, ... chunks, where their number has that bit; apart, so that the rest is in registers.
  typedef std::vector<T> Pairs;
  static __attribute__((noinline)) Pairs* with_chunk(Pairs* pairs, uint64_t before, T sum) {
    if (pairs == nullptr) pairs = new Pairs;
    size_t level = 0;
    for (; before >> level & 1; level++) sum = sum + (*pairs)[level];
    if (level == pairs->size()) pairs->emplace_back(0);
    (*pairs)[level] = sum;
    return pairs;
  }
  T chunk() const { return (first_ + second_) + (third_ + fourth_); }

  T first_ = T(0), second_ = T(0), third_ = T(0), fourth_ = T(0);
  uint64_t count_ = 0;
  Pairs* pairs_ = nullptr;
};

template <class T, uint64_t CHUNK>
inline T cascade_sum_combine(T& term, CascadeSumHelper<T, CHUNK>* sum) {
  return sum->add(term);
}
template <class T, uint64_t CHUNK>
inline T cascade_sum_combine(T& term, int64_t count, CascadeSumHelper<T, CHUNK>* sum) {
  return sum->add(T::set(T(0), term, count));
}
template <class T, uint64_t CHUNK>
inline T cascade_sum_final(CascadeSumHelper<T, CHUNK>* sum) {
  return sum->total();
}

// The largest number and its index, the first of equal ones; NaN if there is one.
template <class T>
struct IndexValue {
  int64_t index;
  T value;
};
template <class T>
inline IndexValue<T>& argmax_combine(IndexValue<T>& most, T value, int64_t index) {
  if (!(most.value >= value || most.value != most.value)) most = {index, value};
  return most;
}
template <class T>
inline IndexValue<T>& argmax_combine(IndexValue<T>& most, const IndexValue<T>& other) {
  bool same = most.value == other.value || (most.value != most.value && other.value != other.value);
  if (same ? other.index < most.index : !(most.value > other.value || most.value != most.value)) most = other;
  return most;
}

template <class T, int N, int M>
struct IndexValueVec {
  at::vec::VectorizedN<T, N> value;
  at::vec::VectorizedN<int64_t, M> index;
  IndexValueVec(T least) : value(least), index(0) {}
};
// `AT_ONCE`: whether the lanes have indices one after the other, rather than all the same.
template <class T, int N, int M, bool AT_ONCE>
inline IndexValueVec<T, N, M>& argmax_combine_vec(
    IndexValueVec<T, N, M>& most, const at::vec::VectorizedN<T, N>& values, int64_t index, int64_t count = 64) {
  typedef at::vec::VecMask<T, N> Mask;
  Mask more = ~(Mask(most.value >= values) | Mask(most.value != most.value));
  more = Mask::set(Mask::from(false), more, count);
  auto indices = at::vec::VectorizedN<int64_t, M>::arange(index, AT_ONCE);
  most.value = most.value.blendv(most.value, values, more);
  most.index = most.index.blendv(most.index, indices, more.template cast<int64_t, M>());
  return most;
}
template <class T, int N, int M>
inline IndexValue<T> argmax_vec_reduce_all(const IndexValueVec<T, N, M>& lanes) {
  IndexValue<T> most{lanes.index.values[0], lanes.value.values[0]};
  for (int i = 1; i < lanes.value.kLanes; i++)
    argmax_combine(most, IndexValue<T>{lanes.index.values[i], lanes.value.values[i]});
  return most;
}

template <class T, int ROWS, int COLUMNS, bool ADDS>
inline std::enable_if_t<!ADDS> transpose_mxn(const T* from, int64_t from_step, T* to, int64_t to_step) {
  for (int j = 0; j < COLUMNS; j++)
    for (int i = 0; i < ROWS; i++) to[j * to_step + i] = from[i * from_step + j];
}

// Kernels set the flag, and read it at their end; those that divide integers are built with torch's header.
inline std::atomic<int>* inductor_cpu_integer_div_error_flag = nullptr;
inline void inductor_cpu_throw_if_integer_div_error(std::atomic<int>&) {}

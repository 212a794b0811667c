// The vectors and masks of Inductor's generated kernels, in place of torch's cpp_prefix.h.
//
// Parsing torch's header takes three fifths of a build, nearly all of it for instructions, types and operators that no
// program uses. Names and results here are those of torch. A kernel that uses a name which is missing here does not
// compile, and is built with torch's header instead.

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#define C10_LIKELY(condition) (__builtin_expect(static_cast<bool>(condition), 1))
#define C10_UNLIKELY(condition) (__builtin_expect(static_cast<bool>(condition), 0))
#define AOTI_TORCH_CHECK(condition, message) \
  if (!(condition)) throw static_cast<const char*>(message)
#define __at_align__ alignas(64)

#if defined(CPU_CAPABILITY_AVX512)
constexpr int kVectorBytes = 64;
#define FLOATS(name, ulp) Sleef_##name##f16_##ulp
#define DOUBLES(name, ulp) Sleef_##name##d8_##ulp
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int kVectorBytes = 32;
#define FLOATS(name, ulp) Sleef_##name##f8_##ulp
#define DOUBLES(name, ulp) Sleef_##name##d4_##ulp
#else
#error "vectors of this processor are left to torch"
#endif

namespace at {

// The upper half of a float32, rounded to even.
struct BFloat16 {
  uint16_t x;
  BFloat16() = default;
  BFloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    x = value != value ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  operator float() const {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

}  // namespace at

namespace at::vec {

// What a lane holds; bfloat16 is only stored and converted.
template <class T>
struct Element {
  typedef T Type;
};
template <>
struct Element<BFloat16> {
  typedef uint16_t Type;
};

template <class T, int LANES>
struct Lanes {
  typedef typename Element<T>::Type Values __attribute__((vector_size(LANES * sizeof(T))));
};

// The signed integer with so many bytes; a lane of a mask has all of its bits set, or none.
template <int BYTES>
using Integer = std::conditional_t<
    BYTES == 8, int64_t, std::conditional_t<BYTES == 4, int32_t, std::conditional_t<BYTES == 2, int16_t, int8_t>>>;

using Floats = Lanes<float, kVectorBytes / 4>::Values;
using Doubles = Lanes<double, kVectorBytes / 8>::Values;
using Words = Lanes<int32_t, kVectorBytes / 4>::Values;

// Elementary functions of one vector, from the library that torch contains, with its choices of accuracy.
namespace one {
#define FUNCTION(name, floats, doubles)        \
  extern "C" Floats floats(Floats);            \
  extern "C" Doubles doubles(Doubles);         \
  inline Floats name(Floats x) { return floats(x); } \
  inline Doubles name(Doubles x) { return doubles(x); }
FUNCTION(exp, FLOATS(exp, u10), DOUBLES(exp, u10))
FUNCTION(expm1, FLOATS(expm1, u10), DOUBLES(expm1, u10))
FUNCTION(log, FLOATS(log, u10), DOUBLES(log, u10))
FUNCTION(log1p, FLOATS(log1p, u10), DOUBLES(log1p, u10))
FUNCTION(sin, FLOATS(sin, u35), DOUBLES(sin, u10))
FUNCTION(cos, FLOATS(cos, u35), DOUBLES(cos, u10))
FUNCTION(tanh, FLOATS(tanh, u10), DOUBLES(tanh, u10))
FUNCTION(erf, FLOATS(erf, u10), DOUBLES(erf, u10))  // torch's own for floats is less accurate
#if defined(CPU_CAPABILITY_AVX512)
inline Floats sqrt(Floats x) { return __builtin_ia32_sqrtps512_mask(x, x, -1, 4); }
inline Doubles sqrt(Doubles x) { return __builtin_ia32_sqrtpd512_mask(x, x, -1, 4); }
#define ROUNDING(name, mode)                                                                              \
  inline Floats name(Floats x) { return __builtin_ia32_rndscaleps_mask(x, mode, x, -1, 4); }               \
  inline Doubles name(Doubles x) { return __builtin_ia32_rndscalepd_mask(x, mode, x, -1, 4); }
#else
inline Floats sqrt(Floats x) { return __builtin_ia32_sqrtps256(x); }
inline Doubles sqrt(Doubles x) { return __builtin_ia32_sqrtpd256(x); }
#define ROUNDING(name, mode)                                                  \
  inline Floats name(Floats x) { return __builtin_ia32_roundps256(x, mode); } \
  inline Doubles name(Doubles x) { return __builtin_ia32_roundpd256(x, mode); }
#endif
ROUNDING(round, 8)
ROUNDING(floor, 9)
ROUNDING(ceil, 10)
ROUNDING(trunc, 11)
}  // namespace one

// The first lanes of a vector, as another type with as many lanes.
template <class To, class From>
inline To first_lanes(const From& values) {
  To made{};
  std::memcpy(&made, &values, sizeof(made) < sizeof(values) ? sizeof(made) : sizeof(values));
  return made;
}

// `N` vectors of the processor as one, which the compiler splits.
template <class T, int N>
struct VectorizedN {
  static constexpr int kLanes = N * kVectorBytes / sizeof(T);
  typedef typename Lanes<T, kLanes>::Values Values;
  typedef typename Lanes<Integer<sizeof(T)>, kLanes>::Values Bits;
  Values values;

  VectorizedN() : values{} {}
  VectorizedN(Values values) : values(values) {}
  VectorizedN(T scalar) {
    if constexpr (std::is_same_v<T, BFloat16>)
      values = scalar.x - Values{};
    else
      values = scalar - Values{};  // the sum of -0 and 0 would be 0
  }
  static constexpr int size() { return kLanes; }
  static VectorizedN of_bits(Bits bits) { return (Values)bits; }
  Bits bits() const { return (Bits)values; }

  static Bits lane() {
    Bits lanes;
    for (int i = 0; i < kLanes; i++) lanes[i] = i;
    return lanes;
  }
  static VectorizedN arange(T first, T step) { return first + step * __builtin_convertvector(lane(), Values); }

  static VectorizedN loadu(const void* from) {
    Values values;
    std::memcpy(&values, from, sizeof(values));
    return values;
  }
  // Load the first `count` lanes, and 0 in the others.
  static VectorizedN loadu(const void* from, int64_t count) {
    if (count >= kLanes) return loadu(from);
    if constexpr (sizeof(T) == 4 && N == 1) return load_where(from, lane() < int32_t(count));
    Values values{};
    std::memcpy(&values, from, count * sizeof(T));
    return values;
  }
  static VectorizedN load_where(const void* from, Bits mask);
  void store(void* to) const { std::memcpy(to, &values, sizeof(values)); }
  void store(void* to, int64_t count) const;

  // The first `count` lanes of `other`, and the rest of `one`.
  static VectorizedN set(const VectorizedN& one, const VectorizedN& other, int64_t count) {
    return lane() < Integer<sizeof(T)>(count) ? other.values : one.values;
  }
  static VectorizedN blendv(const VectorizedN& one, const VectorizedN& other, const VectorizedN& mask) {
    if constexpr (N == 1) return mask.bits() != 0 ? other.values : one.values;
    VectorizedN made;
    for (int i = 0; i < N; i++) made.set_part(i, VectorizedN<T, 1>::blendv(one.part(i), other.part(i), mask.part(i)));
    return made;
  }

  VectorizedN neg() const { return -values; }
  VectorizedN abs() const {
    if constexpr (std::is_integral_v<T>) return values < 0 ? -values : values;
    return of_bits(bits() & std::numeric_limits<Integer<sizeof(T)>>::max());
  }
  VectorizedN reciprocal() const { return 1 / values; }
  VectorizedN rsqrt() const { return 1 / sqrt().values; }
#define METHOD(name) \
  VectorizedN name() const { return each([](const auto& part) { return one::name(part); }); }
  METHOD(exp) METHOD(expm1) METHOD(log) METHOD(log1p) METHOD(sin) METHOD(cos) METHOD(tanh) METHOD(erf)
  METHOD(sqrt) METHOD(round) METHOD(floor) METHOD(ceil) METHOD(trunc)

  VectorizedN<T, 1> part(int i) const {
    return VectorizedN<T, 1>::loadu(reinterpret_cast<const char*>(&values) + i * kVectorBytes);
  }
  void set_part(int i, const VectorizedN<T, 1>& part) {
    part.store(reinterpret_cast<char*>(&values) + i * kVectorBytes);
  }

 private:
  template <class F>
  VectorizedN each(F function) const {
    VectorizedN made;
    for (int i = 0; i < N; i++) made.set_part(i, function(part(i).values));
    return made;
  }
};

template <class T>
using Vectorized = VectorizedN<T, 1>;

#define BINARY(operation, result)                                                                       \
  template <class T, int N>                                                                             \
  inline VectorizedN<T, N> operator operation(const VectorizedN<T, N>& a, const VectorizedN<T, N>& b) { \
    return result;                                                                                      \
  }
BINARY(+, a.values + b.values)
BINARY(-, a.values - b.values)
BINARY(*, a.values * b.values)
BINARY(/, a.values / b.values)
BINARY(&, (VectorizedN<T, N>::of_bits(a.bits() & b.bits())))
BINARY(|, (VectorizedN<T, N>::of_bits(a.bits() | b.bits())))
BINARY(^, (VectorizedN<T, N>::of_bits(a.bits() ^ b.bits())))

// Vector by vector, since GCC compares numbers one by one where they are more than a vector.
#define COMPARISON(operation)                                                                           \
  template <class T, int N>                                                                             \
  inline VectorizedN<T, N> operator operation(const VectorizedN<T, N>& a, const VectorizedN<T, N>& b) { \
    if constexpr (N == 1) return VectorizedN<T, N>::of_bits(a.values operation b.values);               \
    VectorizedN<T, N> made;                                                                             \
    for (int i = 0; i < N; i++) made.set_part(i, a.part(i) operation b.part(i));                        \
    return made;                                                                                        \
  }
COMPARISON(==)
COMPARISON(!=)
COMPARISON(<)
COMPARISON(>)
COMPARISON(<=)
COMPARISON(>=)

// NaN wherever one of them is.
template <class T, int N>
inline VectorizedN<T, N> maximum(const VectorizedN<T, N>& a, const VectorizedN<T, N>& b) {
  return (a.values > b.values) | (a.values != a.values) ? a.values : b.values;
}
template <class T, int N>
inline VectorizedN<T, N> minimum(const VectorizedN<T, N>& a, const VectorizedN<T, N>& b) {
  return (a.values < b.values) | (a.values != a.values) ? a.values : b.values;
}
// NaN where `x` is.
template <class T, int N>
inline VectorizedN<T, N> clamp_min(const VectorizedN<T, N>& x, const VectorizedN<T, N>& least) {
  return least.values > x.values ? least.values : x.values;
}
template <class T, int N>
inline VectorizedN<T, N> clamp_max(const VectorizedN<T, N>& x, const VectorizedN<T, N>& most) {
  return most.values < x.values ? most.values : x.values;
}

// Convert lane by lane: the first ones if the result has fewer, and others 0 if it has more.
template <class U, int M, class T, int N>
inline VectorizedN<U, M> convert(const VectorizedN<T, N>& x) {
  constexpr int kFewer = std::min(VectorizedN<U, M>::kLanes, VectorizedN<T, N>::kLanes);
  typedef typename Lanes<U, kFewer>::Values To;
  typedef Lanes<uint32_t, kFewer> Bits;
  auto from = first_lanes<typename Lanes<T, kFewer>::Values>(x.values);
  To to;
  if constexpr (std::is_same_v<T, U>) {
    to = from;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    auto bits = __builtin_convertvector(from, typename Bits::Values) << 16;
    to = __builtin_convertvector((typename Lanes<float, kFewer>::Values)bits, To);
  } else if constexpr (std::is_same_v<U, BFloat16>) {
    auto floats = __builtin_convertvector(from, typename Lanes<float, kFewer>::Values);
    auto bits = (typename Bits::Values)floats;
    bits = floats != floats ? 0x7fc0 - typename Bits::Values{} : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    to = __builtin_convertvector(bits, To);
  } else {
    to = __builtin_convertvector(from, To);
  }
  return first_lanes<typename VectorizedN<U, M>::Values>(to);
}
template <class U, class T>
inline VectorizedN<U, 1> convert(const VectorizedN<T, 1>& x) {
  return convert<U, 1, T, 1>(x);
}

template <class T, int N>
inline VectorizedN<T, N> VectorizedN<T, N>::load_where(const void* from, Bits mask) {
  if constexpr (sizeof(T) == 4 && N == 1) {
#if defined(CPU_CAPABILITY_AVX512)
    auto where = __builtin_ia32_cvtd2mask512((Words)mask);
    return (Values)__builtin_ia32_loadups512_mask(static_cast<const float*>(from), Floats{}, where);
#else
    return (Values)__builtin_ia32_maskloadps256(static_cast<const Floats*>(from), (Words)mask);
#endif
  } else {
    Values values{};
    for (int i = 0; i < kLanes; i++)
      if (mask[i]) values[i] = static_cast<const typename Element<T>::Type*>(from)[i];
    return values;
  }
}

template <class T, int N>
inline void VectorizedN<T, N>::store(void* to, int64_t count) const {
  if (count >= kLanes) return store(to);
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (sizeof(T) == 4 && N == 1)
    return __builtin_ia32_storeups512_mask(static_cast<float*>(to), (Floats)values, (1u << count) - 1);
#endif
  std::memcpy(to, &values, count * sizeof(T));  // AMD's masked stores of AVX2 take 20 cycles
}

template <class T, int N>
struct VecMask {
  static constexpr int kLanes = VectorizedN<T, N>::kLanes;
  typedef typename VectorizedN<T, N>::Bits Bits;
  typedef int8_t Bools __attribute__((vector_size(kLanes)));
  Bits bits;

  VecMask() : bits{} {}
  VecMask(Bits bits) : bits(bits) {}
  VecMask(const VectorizedN<T, N>& mask) : bits(mask.bits()) {}
  operator VectorizedN<T, N>() const { return VectorizedN<T, N>::of_bits(bits); }
  static constexpr int size() { return kLanes; }

  static VecMask from(bool all) { return Bits{} - Integer<sizeof(T)>(all); }
  static VecMask from(int all) { return from(all != 0); }
  static VecMask from(const bool* from, int64_t count = kLanes) {
    Bools bools{};
    std::memcpy(&bools, from, count);
    return __builtin_convertvector(bools, Bits) != 0;
  }
  template <class U, int M>
  static VecMask from(const VectorizedN<U, M>& values) {
    return VecMask<U, M>(values.values != 0).template cast<T, N>();
  }
  void store(bool* to, int64_t count = kLanes) const {
    Bools bools = __builtin_convertvector(bits & 1, Bools);
    std::memcpy(to, &bools, count);
  }

  template <class U, int M>
  VecMask<U, M> cast() const {
    return convert<Integer<sizeof(U)>, M>(VectorizedN<Integer<sizeof(T)>, N>(bits)).values;
  }
  template <class U, int M>
  VectorizedN<U, M> to() const {
    return convert<U, M>(VectorizedN<Integer<sizeof(T)>, N>(bits & 1));
  }
  // Load the lanes that are set, and 0 in the others.
  template <class U, int M>
  VectorizedN<U, M> loadu(const U* from) const {
    return VectorizedN<U, M>::load_where(from, cast<U, M>().bits);
  }
  static VecMask set(const VecMask& one, const VecMask& other, int64_t count) {
    return VectorizedN<T, N>::set(one, other, count);
  }
  static VecMask blendv(const VecMask& one, const VecMask& other, const VecMask& mask) {
    return (mask.bits & other.bits) | (~mask.bits & one.bits);
  }

  bool all_zero() const {
    int64_t words[sizeof(bits) / 8], any = 0;
    std::memcpy(words, &bits, sizeof(bits));
    for (int64_t word : words) any |= word;
    return any == 0;
  }
  bool all_masked() const { return VecMask(~bits).all_zero(); }
  bool is_masked(int lane) const { return bits[lane] != 0; }
  VecMask operator~() const { return ~bits; }
};

#define LOGICAL(operation, result)                                                               \
  template <class T, int N, class U, int M>                                                      \
  inline VecMask<T, N> operator operation(const VecMask<T, N>& first, const VecMask<U, M>& second) { \
    const auto a = first.bits, b = second.template cast<T, N>().bits;                            \
    return result;                                                                               \
  }
LOGICAL(&, a & b)
LOGICAL(|, a | b)
LOGICAL(^, a ^ b)
LOGICAL(!=, a ^ b)
LOGICAL(==, ~(a ^ b))
LOGICAL(>, a & ~b)
LOGICAL(<, ~a & b)

template <int DISTANCE, class Values, size_t... LANES>
inline Values swapped(Values values, std::index_sequence<LANES...>) {
#if defined(__clang__)
  return __builtin_shufflevector(values, values, (LANES ^ DISTANCE)...);
#else
  typedef Integer<sizeof(values[0])> Lane;
  typedef Lane Order __attribute__((vector_size(sizeof(values))));
  return __builtin_shuffle(values, Order{Lane(LANES ^ DISTANCE)...});
#endif
}

template <int DISTANCE, class T, class F>
inline T combine_lanes(const F& combine, Vectorized<T> values) {
  if constexpr (DISTANCE == Vectorized<T>::kLanes) {
    return values.values[0];
  } else {
    Vectorized<T> others = swapped<DISTANCE>(values.values, std::make_index_sequence<values.kLanes>());
    return combine_lanes<2 * DISTANCE, T>(combine, combine(values, others));
  }
}

// Combine all lanes: vectors first, then pairs.
template <class T, int N, class F>
inline T vec_reduce_all(const F& combine, const VectorizedN<T, N>& values) {
  Vectorized<T> all = values.part(0);
  for (int i = 1; i < N; i++) {
    Vectorized<T> next = values.part(i);
    all = combine(all, next);
  }
  return combine_lanes<1, T>(combine, all);
}

}  // namespace at::vec

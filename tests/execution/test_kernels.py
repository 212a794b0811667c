"""`vectors.h` and `kernels.h` have the bits of torch's own: expressions are built with either headers, and compared."""

import ctypes
import itertools

import numpy as np
import pytest

from rl8x.execution import building, private

FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.7, 1e-3, -1e-40, 1e10, -88.5, 88.9, 1e38, -1e38]
FLOATS += [np.inf, -np.inf, np.nan, 2.0**-126, 20.25, -7.125]
WHOLE = [0, 1, -1, 2, 3, -4, 5, 7, -8, 100, -1000, 2**15, -(2**16), 2**30, -(2**30), 12, 13, -14, 15, 2**31 - 1]

FLOATING = ["x.exp()", "x.expm1()", "x.log()", "x.log1p()", "x.sin()", "x.cos()", "x.tanh()", "x.sqrt()", "x.rsqrt()"]
FLOATING += ["x.reciprocal()", "x / y", "V(T(-0.0)) * y", "x.floor()", "x.ceil()", "x.round()", "x.trunc()"]
ANY = ["x + y", "x - y", "x * y", "x.abs()", "x.neg()", "at::vec::maximum(x, y)", "at::vec::minimum(x, y)"]
ANY += ["at::vec::clamp_min(x, y)", "at::vec::clamp_max(x, y)", "V::arange(T(3), T(2)) + y", "V::set(x, y, 3)"]
ANY += [
    "V::set(V(T(0)), V::loadu(a + i, 3), 3)",
    "V::blendv(x, y, x < y)",
    "(x < y) & x",
    "(x > y) | y",
    "x ^ (x >= y)",
]
ANY += [
    f"({mask}).template to<T, N>()"
    for mask in (
        "M(x < y)",
        "M(x == y) & M(x != x)",
        "~M(x <= y) ^ M(x == x)",
        "M::from(bools + i % 32, 5)",
        "M::from(bools + i % 32)",
        "M::from(i % 3 == 0)",
        "M::set(M(x < y), M(y < x), 2)",
        "M::blendv(M(x < y), M(y < x), M(x == x))",
        "M(x < y) > M(y != y)",
        "M(x < y) < M(y == y)",
        "(M(x < y) == M(y < x)) != M(x == x)",
    )
]
ANY += ["(M(x < y) | M(y < x)).template loadu<T, N>(a + i)"]
TYPES = {"float": 1, "double": 2, "int32_t": 1, "int64_t": 2}  # with the number of vectors
CASES = [(name, each) for name in TYPES for each in (ANY if "int" in name else FLOATING + ANY)]

# Statements that write to `out`, 64 numbers; `x` and `y` are a[:lanes] and b[:lanes].
STATEMENTS = [
    "out[0] = at::vec::vec_reduce_all<float, 1>([](V& x, V& y) { return x + y; }, V::arange(1, 1));",
    "out[0] = at::vec::vec_reduce_all<float, 1>([](V& x, V& y) { return maximum(x, y); }, V::arange(1, 1));",
    "out[0] = M(x < x).all_zero(); out[1] = M(x == y).all_zero(); out[2] = M(x < y).is_masked(1);",
    "out[0] = M::from(true).all_masked(); out[1] = M::set(M(x < x), M::from(true), 1).all_masked();",
    "M::set(M(x < x), M::from(true), 1).store(reinterpret_cast<bool*>(out));",
    "for (int i = -7; i < 8; i++) out[i + 7] = c10::div_floor_integer(i, 3) + 100 * c10::div_floor_integer(i, -2);",
    "out[0] = c10::convert<bool>(0.5f); out[1] = c10::convert<int64_t>(-2.7f); out[2] = c10::convert<float>(true);",
    *(
        f"out[0] = {name}(1.0f, NAN); out[1] = {name}(NAN, 1.0f); out[2] = {name}(1.0f, 2.0f);"
        for name in ("max_propagate_nan", "min_propagate_nan")
    ),
    "x.store(out + 1, 3); V(5).store(out + 6, V::size() - 1);",
    "sum_masked_reduce(x, y, 3).store(out); max_masked_reduce(x, y, 2).store(out + 16);",
    "min_masked_reduce(x, y, 3).store(out); prod_masked_reduce(x, y, 2).store(out + 16);",
    "any_masked_reduce(M(x < y), M(x == x), 2).to<float, 1>().store(out);",
    "transpose_mxn<float, 3, 5, false>(a, 7, out, 4);",
    "at::vec::convert<int64_t, 2, float, 1>(V(2.5f) * V::arange(-3, 1)).store(out);",
    "at::vec::convert<double, 2, float, 1>(x).store(out);",
    "at::vec::convert<float, 1, int64_t, 2>(at::vec::VectorizedN<int64_t, 2>::arange(-3, 5)).store(out);",
    "M(x < y).cast<double, 2>().to<double, 2>().store(out);",
    "(M(x < y).cast<int64_t, 2>() & at::vec::VecMask<int64_t, 2>::from(1)).to<int64_t, 2>().store(out);",
    "at::vec::VecMask<int64_t, 2>::from<int64_t, 2>(at::vec::VectorizedN<int64_t, 2>::arange(-2, 1)).cast<float, 1>()"
    ".to<float, 1>().store(out);",
    "CascadeSumHelper<float, 4> sum(37); for (int i = 1; i < 38; i++) { float x = i; cascade_sum_combine(x, &sum); }"
    "out[0] = cascade_sum_final(&sum);",
    "CascadeSumHelper<V, 4096> sum(5); for (int i = 1; i < 6; i++) { V x(i); cascade_sum_combine(x, &sum); }"
    "cascade_sum_final(&sum).store(out);",
    "at::vec::vec_reduce_all<int64_t, 2>([](auto& x, auto& y) { return x + y; },"
    "at::vec::VectorizedN<int64_t, 2>::arange(3, 7)) == 3 * 2 * 8 ? out[0] = 1 : out[1] = 1;",
    "V values(NAN); values = V::set(x, values, 4); at::vec::convert<at::BFloat16>(values).store(out, 8);",
    "at::vec::convert<at::BFloat16, 1, float, 2>(at::vec::VectorizedN<float, 2>::loadu(a)).store(out);",
    "at::vec::convert<float, 2, at::BFloat16, 1>(at::vec::Vectorized<at::BFloat16>::loadu(a)).store(out);",
    "at::vec::Vectorized<at::BFloat16>(c10::convert<at::BFloat16>(a[3])).store(out);",
    "for (int i = 0; i < 64; i++) out[i] = static_cast<float>(static_cast<at::BFloat16>(a[i] * 1.001));",
    "at::vec::convert<float>(at::vec::Vectorized<uint8_t>::loadu(a, 8)).store(out, 8);",
    "at::vec::convert<float>(at::vec::Vectorized<int8_t>::loadu(a, 8)).store(out, 8);",
    "at::vec::convert<uint8_t>(V(20) + x.abs()).store(out, 8); at::vec::convert<int8_t>(V(-20) * x).store(out + 8, 8);",
    "at::vec::VecMask<int8_t, 1>::from<int8_t, 1>(at::vec::Vectorized<int8_t>::loadu(a, 8)).to<float, 1>().store(out);",
    "M(x < y).cast<int8_t, 1>().to<int8_t, 1>().store(out, 8);",
    "IndexValueVec<float, 1, 2> most(-INFINITY); for (int i = 0; i < 3; i++) {"
    "most = argmax_combine_vec<float, 1, 2, true>(most, V::loadu(a + 16 * i), 16 * i);}"
    "most = argmax_combine_vec<float, 1, 2, true>(most, V::loadu(a + 48), 48, 3);"
    "IndexValue<float> one = argmax_vec_reduce_all(most); one = argmax_combine(one, a[60], 60);"
    "out[0] = one.index; out[1] = one.value;",
    "IndexValueVec<float, 1, 2> most(-INFINITY); for (int i = 0; i < 9; i++) {"
    "most = argmax_combine_vec<float, 1, 2, false>(most, V(i == 4 || i == 6 ? NAN : i == 2), i);}"
    "IndexValue<float> one{0, 1.0f}; one = argmax_combine(one, argmax_vec_reduce_all(most)); out[0] = one.index;",
    "CascadeSumHelper<V, 4> sum(6); for (int i = 1; i < 7; i++) { V x(i); cascade_sum_combine(x, i, &sum); }"
    "cascade_sum_final(&sum).store(out);",
    "std::atomic<int> flag{0}; inductor_cpu_integer_div_error_flag = &flag;"
    "inductor_cpu_throw_if_integer_div_error(flag); out[0] = C10_LIKELY(a[0] < b[0]);",
]

EXPORTED = 'extern "C" __attribute__((visibility("default"))) void'
VECTORS = """
{exported} vectors_{i}(const {type}* a, const {type}* b, const bool* bools, {type}* out) {{
  using T = {type};
  constexpr int N = {count};
  using V = at::vec::{vector};
  using M = at::vec::VecMask<T, N>;
  for (int64_t i = 0; i < 400; i += V::size()) {{
    V x = V::loadu(a + i), y = V::loadu(b + i);
    V result = {expression};
    result.store(out + i);
  }}
}}
"""
SCALARS = """
{exported} statement_{i}(const float* a, const float* b, float* out) {{
  using V = at::vec::Vectorized<float>;
  using M = at::vec::VecMask<float, 1>;
  V x = V::loadu(a), y = V::loadu(b);
  {statement}
}}
"""


def source():
    parts = []
    for i, (name, expression) in enumerate(CASES):
        count = TYPES[name]
        vector = f"Vectorized<{name}>" if count == 1 else f"VectorizedN<{name}, {count}>"
        values = {"type": name, "count": count, "vector": vector, "expression": expression}
        parts.append(VECTORS.format(exported=EXPORTED, i=i, **values))
    parts += [SCALARS.format(exported=EXPORTED, i=i, statement=each) for i, each in enumerate(STATEMENTS)]
    return "".join(parts)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The same source, with rl8x's header and with torch's."""
    if not {"avx2", "avx512"} & {str(private.inductor().pick_vec_isa())}:
        pytest.skip("torch's vectors are used on this processor")
    made = []
    for own in (True, False):
        folder = tmp_path_factory.mktemp("kernels")
        head = building._own_headers(source()) if own else building._torchs_headers()
        errors, library = building._run(f"{head}\n{source()}", folder, *([building._WITHOUT_TORCH] if own else []))
        assert errors == ""
        made.append(ctypes.CDLL(str(library)))
    return made


def outputs(libraries, name, inputs, out):
    for library in libraries:
        result = out.copy()
        getattr(library, name)(*[ctypes.c_void_p(each.ctypes.data) for each in (*inputs, result)])
        yield result


def same_bits(one, two):
    """Whether numbers are equal to the bit; not-a-numbers have many bit patterns."""
    both_nan = np.zeros(one.shape, bool) if one.dtype.kind == "i" else np.isnan(one) & np.isnan(two)
    width = f"i{one.itemsize}"
    return np.array_equal(one.view(width)[~both_nan], two.view(width)[~both_nan])


@pytest.mark.parametrize("i", range(len(CASES)), ids=lambda i: " ".join(CASES[i]))
def test_an_expression_of_vectors_has_torchs_bits(libraries, i):
    name, _ = CASES[i]
    dtype = np.dtype({"float": "f4", "double": "f8", "int32_t": "i4", "int64_t": "i8"}[name])
    pairs = np.array([*itertools.product(WHOLE if "int" in name else FLOATS, repeat=2)], dtype)
    assert len(pairs) == 400  # a multiple of all numbers of lanes
    bools = np.arange(64) % 3 == 0
    inputs = (*map(np.ascontiguousarray, pairs.T), bools)
    one, two = outputs(libraries, f"vectors_{i}", inputs, np.zeros(400, dtype))
    assert same_bits(one, two)


@pytest.mark.parametrize("i", range(len(STATEMENTS)), ids=lambda i: STATEMENTS[i][:60])
def test_a_statement_writes_the_same(libraries, i):
    a, b = (np.random.default_rng(seed).standard_normal(64).astype(np.float32) for seed in (0, 1))
    one, two = outputs(libraries, f"statement_{i}", (a, b), np.full(64, 9, np.float32))
    assert not same_bits(one, np.full(64, 9, np.float32))
    assert same_bits(one, two)

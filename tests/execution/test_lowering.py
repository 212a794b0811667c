"""Traced graphs and their rewriting; programs against their functions: memory, views, operators that torch runs."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.probes import described
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from rl8x.execution.compiler import compiler
from rl8x.execution.lowering import build, keep_values
from rl8x.execution.programs import Loop
from rl8x.execution.traces import KEPT


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def written(x, y):
    """Arguments are written to, read before and after, and given back."""
    before = x.sum()
    x.mul_(2.0).add_(y)
    y[1:3] = x[:2]
    return [before, x, x.t(), y.sum(0), y]


def laid_out(x, y):
    """Results are transposed, expanded, sliced with steps, the same twice, empty, and single numbers."""
    product = x.t() @ y
    return [product, product.t(), product[::2, 1:], x[:0], y.max(), product, x.sum(0, keepdim=True).expand(3, -1)]


def typed(x, y):
    kinds = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.uint8]
    near = [(x * 10).abs().to(kind) for kind in kinds]
    return [*[each + each for each in near], x > y, x.to(torch.bfloat16) @ y.t().to(torch.bfloat16)]


def searched(x, y):
    """Operators without a kernel of Inductor's, some of which return several tensors, or views."""
    values, places = x.sort(-1)
    top, where = y.topk(2, -1)
    counted = torch.zeros(5).index_put_((places[0],), torch.ones(5), accumulate=True)
    found = torch.searchsorted(values.contiguous(), y)
    return [values, places, top, where, counted, found, x.cumsum(0), y.flip(0).roll(1, 1), values.t() @ top]


def memory(x, y):
    """What needs nothing of torch but products: memory is taken again at once, and views outlive what they show."""
    copies = x.clone(), y.clone()
    results = [*written(x, y), *laid_out(*copies)]
    total = torch.zeros(4, 4)
    for i in range(6):
        made = copies[0] @ copies[1].t() + i
        results.append(made[i % 4 : i % 4 + 1].t() @ made[:1])
        total = total + made @ total.t()
    return [total, *results]


def operators(x, y, image, weight):
    """What torch's operators do: they might return views, so that memory is kept until the end."""
    hidden = functional.conv2d(image, weight, stride=2, padding=1).relu()
    pooled, places = functional.max_pool2d(hidden, 2, return_indices=True)
    convolved = [hidden, pooled, places, functional.conv2d(pooled, weight.transpose(0, 1), padding=1).flatten(1)]
    query, key = x.view(2, 1, 2, 5), y.view(2, 1, 2, 5)
    attended = functional.scaled_dot_product_attention(query, key, key), torch.bmm(x.view(2, 2, 5), y.view(2, 5, 2))
    return [*typed(x, y), *searched(x, y), *convolved, *attended, functional.embedding(torch.tensor([0, 1]), x)]


SMALL = numbers(4, 5), numbers(4, 5) + 1
FUNCTIONS = {"memory": (memory, SMALL), "operators": (operators, (*SMALL, numbers(2, 3, 9, 9), numbers(3, 3, 3, 3)))}
COUNT = 5


def step(position, speed, last, gain, push):
    """A step of a loop, which keeps where it was."""
    before = position.clone()
    speed.mul_(0.9).add_(push @ gain)
    position.add_(speed)
    last.copy_(before)
    return [position.t() + 0.0, speed.norm(), position.sum() < 2.0]


@functools.cache
def compiled(name):
    if name == "loop":
        made = described(Loop(step, 3, ends=True), *[numbers(2, 3)] * 3, numbers(4, 3), numbers(COUNT, 2, 4))
    else:
        made = described(FUNCTIONS[name][0], *FUNCTIONS[name][1])
    program, loaded = made
    return loaded(compiler().library(program))


def agree(actual, expected):
    for one, two in zip(actual, expected, strict=True):
        near = 2e-2 if one.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(one, two, rtol=near, atol=near)


@pytest.mark.parametrize("name", ["memory", pytest.param("operators", marks=pytest.mark.long)])
def test_a_program_computes_and_writes_what_its_function_does(name):
    function, tensors = FUNCTIONS[name]
    for scale in (1.0, -2.0):  # memory of the first call is taken again
        mine, its = [each * scale for each in tensors], [each * scale for each in tensors]
        results = compiled(name)(*mine)
        agree(results, [each.clone() for each in function(*its)])
        agree(mine, its)
        assert all(each.is_contiguous() for each in results)


def test_a_loop_does_what_one_in_python_does():
    """One that may end; those that never do are the steps of algorithms/test_conformance.py."""
    loop = Loop(step, 3, 1, ends=True)
    for scale in (0.1, 1.0):
        mine, its = ([scale * numbers(2, 3), numbers(2, 3), numbers(2, 3), numbers(4, 3)] for _ in range(2))
        items = scale * numbers(COUNT, 2, 4)[: COUNT if scale == 1.0 else 2]  # of which there may be any number
        actual, expected = compiled("loop")(*mine, items), loop(*its, items)
        agree(actual, expected)
        agree(mine, its)
        assert scale < 1.0 or 0 < int(expected[-1].sum()) < COUNT - 1  # what follows is not reached


def test_results_are_memory_of_their_own_also_of_threads_that_call_a_program_at_once():
    def results(i):
        return compiled("memory")(*[each * (i + 1.0) for each in SMALL])

    expected = [results(i) for i in range(4)]
    kept = [each.clone() for each in expected[0]]
    results(1)
    assert all(map(torch.equal, expected[0], kept))
    assert float(torch.tensor(1e-38) * 0.01) > 0.0  # denormal numbers are what they were to this process

    def agrees(i):
        return all(all(map(torch.equal, results(i), expected[i])) for _ in range(300))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(agrees, range(4)))


# -- rewriting of graphs


def clipped(vector, limit, few, count):
    """Scale a vector by a number that depends on all of it: not what is few, in memory already, or whole."""
    scale = (limit / (vector.norm() + 1e-6)).clamp(max=1.0)
    return vector * scale, few * scale, vector * limit, vector * vector[3:4], vector * (count + 1)


def normalised(rows, mean, square, bias):
    deviation = (square - mean * mean).add_(1e-8).sqrt().reciprocal().float()
    return (rows - mean.float()) * deviation - -bias, rows[:8] * deviation, rows * rows.sum(0)


def summed(terms):
    return terms.log1p().sum(1), terms.log1p().sum(0), terms[:4].log1p().sum(1), (terms.mT @ terms).sum(1)


MOMENTS = torch.rand(3).double(), torch.rand(3).double() + 1.0
KEEPS = {  # what is computed by itself, and where it is used: by results of which shape
    clipped: (
        (torch.arange(100.0), torch.tensor(3.0), torch.ones(5), torch.tensor(2)),
        [("aten.clamp.default", "aten.mul.Tensor", (100,))],
    ),
    normalised: (
        (torch.rand(200, 3), *MOMENTS, torch.rand(3)),
        [("aten._to_copy.default", f"aten.{name}.Tensor", (200, 3)) for name in ("mul", "sub")],
    ),
    summed: ((torch.arange(192.0).reshape(32, 6),), [("aten.log1p.default", "aten.sum.dim_IntList", (32,))]),
}


@pytest.mark.parametrize("function", KEEPS)
def test_what_many_read_and_terms_of_short_sums_are_computed_by_themselves_and_all_is_equal(function):
    given, expected = KEEPS[function]
    record = make_fx(function)(*given)
    keep_values(record)
    kept = [(node, user) for node in record.graph.nodes if node.target is KEPT for user in node.users]
    found = [(str(node.args[0].target), str(user.target), tuple(user.meta["val"].shape)) for node, user in kept]
    assert found == expected
    assert all(map(torch.equal, record(*given), function(*given)))


def test_an_error_is_that_of_the_source_and_names_it_first(tmp_path):
    with pytest.raises(RuntimeError, match=r"^[^\n]*error: [^\n]*no_such_name"):
        build("int answer() { return no_such_name; }", tmp_path / "answer.so")
    assert not [*tmp_path.iterdir()]

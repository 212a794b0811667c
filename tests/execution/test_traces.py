"""Traces record what operators do, tensors that are held become inputs; and private names of torch are there."""

import re

import pytest
import torch
from tests.probes import described

from rl8x.algorithms.optimizer import Adam, FlatOptimizer
from rl8x.execution import private
from rl8x.execution.artifacts import Artifacts
from rl8x.execution.compiler import Compiler
from rl8x.execution.traces import trace

WEIGHT = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
TOTAL = torch.zeros(2)


def update(x):
    """Use a gradient, in-place writes to an argument and to a tensor that is held, parts, and numbers made of lists."""
    scale = torch.tensor(2.0)
    assert scale.item() * 2 == 4.0  # a number of its own may be read
    (gradient,) = torch.autograd.grad((x @ WEIGHT).square().sum() * scale, WEIGHT)
    scale.add_(1.0)
    x.add_(1.0)
    first, second = x.split([1, 1])
    TOTAL.add_(x)
    return [gradient, torch.cat((second, first)), x, TOTAL, scale, torch.where(x > 1.5, x, torch.tensor([5.0, 6.0]))]


def test_a_trace_does_what_the_function_does_at_every_call():
    before = TOTAL.clone()
    graph, read, *_ = trace(update, [torch.tensor([1.0, 0.0])])
    assert not torch.equal(TOTAL, before)  # tracing runs the function; its argument was a copy
    TOTAL.copy_(before)
    for values in ([1.0, 0.0], [0.5, -2.0], [1.0, 0.0]):
        state, results = TOTAL.clone(), []
        for function in (lambda x: graph(x, *read), update):
            TOTAL.copy_(state)
            x = torch.tensor(values)
            results.append([each.detach().clone() for each in (*function(x), x, TOTAL)])
        assert all(map(torch.equal, *results))


def test_tensors_that_are_held_are_inputs_in_the_order_of_their_use():
    graph, read, *_ = trace(lambda x: [x + WEIGHT[0] * TOTAL, WEIGHT.sum()], [torch.zeros(2)])
    assert [each.data_ptr() for each in read] == [WEIGHT.data_ptr(), TOTAL.data_ptr()]
    assert [node.name for node in graph.graph.nodes if node.op == "placeholder"] == ["arg_0", "read_0", "read_1"]


def checked(x):
    with torch.autograd.set_detect_anomaly(True):
        weight = x.clone().requires_grad_()
        return torch.autograd.grad((weight * weight).sum(), weight)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: [x if x.sum() > 0 else -x], RuntimeError, "the value of a tensor is read"),
        (lambda x: [x * (WEIGHT + x).max().item()], RuntimeError, "the value of a tensor is read"),
        (checked, RuntimeError, "the value of a tensor is read, by autograd's detection of anomalies"),
        (lambda x: [x + torch.rand(2, generator=torch.Generator())], NotImplementedError, "Generator"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(function, error, message):
    with pytest.raises(error, match=message):
        trace(function, [torch.ones(2)])


def test_a_cast_that_was_made_before_is_part_of_the_trace():
    weight, x = torch.rand(2, 2, requires_grad=True), torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _ = x @ weight  # keeps the cast weight for later products
        graph, read, *_ = trace(lambda x: [x @ weight], [x])
    assert [each.dtype for each in read] == [torch.float32]
    with torch.no_grad():
        weight.mul_(2.0)
        (result,) = graph(x, *read)
        assert torch.equal(result, x.bfloat16() @ weight.bfloat16())


# -- private names


@pytest.mark.parametrize("name", ["_are_functorch_transforms_active", "_len_torch_dispatch_stack"])
def test_what_sees_operations_is_known_here_and_assumed_elsewhere(name, monkeypatch):
    assert not private.is_traced()
    monkeypatch.delattr(torch._C, name)
    assert private.is_traced()


@pytest.mark.long
def test_a_missing_name_is_one_clear_line_in_the_compilers_process_too(monkeypatch, tmp_path):
    code = "import torch._inductor.codecache as codecache\ndel codecache.AotCodeCompiler\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)  # where the process searches too
    monkeypatch.setattr(Compiler, "start", Compiler.start.__wrapped__)  # a Python of its own
    compiler = Compiler(Artifacts(tmp_path / "cache"))
    missing = rf"not {re.escape(torch.__version__)}: module 'torch\._inductor\.codecache' has no .* 'AotCodeCompiler'$"
    with pytest.raises(RuntimeError, match=rf"^rl8x compiles with torch 2\.13 to 2\.15, {missing}"):
        compiler.library(described(lambda x: [x + 1.0], torch.ones(3))[0])
    compiler.stop()


def test_a_module_is_called_under_other_weights_and_has_its_own_afterwards():
    module, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), torch.randn(2, 3)
    module[1].weight = module[0].weight  # one weight of two layers
    weights = [torch.randn(3, 3, requires_grad=True), torch.randn(3), torch.randn(3)]
    own = dict(module.named_parameters(remove_duplicate=False))
    optimizer = FlatOptimizer(module, Adam(), lr=0.1)
    result = optimizer.under(weights, x)
    named = dict(zip(optimizer.names, weights, strict=True))
    torch.testing.assert_close(result, torch.func.functional_call(module, named, (x,)))
    assert torch.autograd.grad(result.sum(), weights[0])[0].any()
    with pytest.raises(TypeError):
        optimizer.under(weights, "no numbers")
    after = dict(module.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in own.items())

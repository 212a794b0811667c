from __future__ import annotations

import itertools
import json

import pytest
import torch
from gymnasium.spaces import Box
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x.algorithms.off_policy.actor_critic import Critics
from rl8x.execution import kernels as products
from rl8x.execution.lowering import fused
from rl8x.execution.traces import trace
from rl8x.models import layers as layers_module
from rl8x.models.layers import LinearStack
from rl8x.nn import MLP, activation, linear, masked_mean

LINEAR, NORM, RELU, TANH = nn.Linear, nn.LayerNorm, nn.ReLU, nn.Tanh
KINDS = [
    ([3, 4, 5, 2], {"activation": "tanh"}, [LINEAR, TANH, LINEAR, TANH, LINEAR]),
    ([3, 4], {"activate_last": True}, [LINEAR, RELU]),
    ([3], {}, []),
    ([3, 4, 5, 2], {"layer_norm": True}, [LINEAR, NORM, RELU, LINEAR, NORM, RELU, LINEAR]),
    ([3, 4], {"layer_norm": True, "activate_last": True}, [LINEAR, NORM, RELU]),
]


@pytest.mark.parametrize(("sizes", "options", "kinds"), KINDS)
def test_layers_norms_and_activations_in_order(sizes, options, kinds):
    assert [type(layer) for layer in MLP(sizes, **options)] == kinds


def test_hidden_layers_are_normalised_before_their_activations():
    # So many rows that the layers without would be differentiated at once.
    mlp, x = MLP([3, 64, 2], layer_norm=True), torch.randn(4096, 3)
    with torch.no_grad():
        mlp[1].weight.uniform_(0.5, 2.0)
        mlp[1].bias.uniform_(-1.0, 1.0)
    hidden = x @ mlp[0].weight.T + mlp[0].bias
    hidden = (hidden - hidden.mean(-1, keepdim=True)) / (hidden.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    expected = torch.relu(hidden * mlp[1].weight + mlp[1].bias) @ mlp[3].weight.T + mlp[3].bias
    torch.testing.assert_close(mlp(x), expected, atol=1e-4, rtol=1e-4)
    mlp(x).square().mean().backward()
    assert all(bool(weights.grad.any()) for weights in mlp.parameters())


def test_gains():
    mlp = MLP([4, 4, 4], gain=2.0, last_gain=0.5)
    assert torch.allclose(mlp[0].weight @ mlp[0].weight.T, 4.0 * torch.eye(4), atol=1e-5)
    assert torch.allclose(mlp[2].weight @ mlp[2].weight.T, 0.25 * torch.eye(4), atol=1e-5)
    layer = linear(3, 7, 0.1)
    assert torch.allclose(layer.weight.T @ layer.weight, 0.01 * torch.eye(3), atol=1e-6)
    assert torch.equal(layer.bias, torch.zeros(7))


def both_ways(module, x, *, create_graph=False):
    """Differentiate the same function of a module's result by `perceptron` and by autograd through its layers."""
    found = []
    for layers in (layers_module.plain_layers(module, x), None):
        result = layers_module.perceptron(x, layers) if layers else nn.Sequential.forward(module, x)
        inputs = [tensor for tensor in (x, *module.parameters()) if tensor.requires_grad]
        weighted = (result * torch.linspace(-1.0, 1.0, result.numel()).view_as(result)).square().sum()
        found.append((result, torch.autograd.grad(weighted, inputs, create_graph=create_graph)))
    assert layers_module.plain_layers(module, x)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 5, 17, 33]), min_size=2, max_size=5),
    st.sampled_from(["relu", "tanh"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 63),
)
def test_results_and_gradients_are_those_of_autograd(sizes, activation, activate_last, input_trained, frozen):
    torch.manual_seed(0)
    mlp = MLP(sizes, activation=activation, activate_last=activate_last)
    for i, weight in enumerate(mlp.parameters()):
        weight.requires_grad_(not frozen >> i & 1)
    x = torch.randn(7, sizes[0], requires_grad=input_trained)
    if not any(tensor.requires_grad for tensor in (x, *mlp.parameters())):
        x.requires_grad_()
    (ours, gradients), (autograds, expected) = both_ways(mlp, x)
    torch.testing.assert_close(ours, autograds, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-5)


def stack(*sizes, size=3, activation=nn.Tanh):
    """Perceptrons side by side, with biases that differ."""
    layers = [LinearStack(size, *ends, 1.5) for ends in itertools.pairwise(sizes)]
    for layer in layers:
        nn.init.normal_(layer.bias)
    return nn.Sequential(*(each for layer in layers for each in (layer, activation())))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("trained", ["all", "weights", "input", "second layer"])
def test_a_stack_has_the_results_and_gradients_of_autograd(activation, trained):
    torch.manual_seed(0)
    module, rows = stack(4, 8, 6, 2, activation=activation), torch.randn(5, 4)
    for i, weight in enumerate(module.parameters()):
        weight.requires_grad_(trained in ("all", "weights") or (trained == "second layer" and i in (2, 3)))
    x = rows.expand(3, 5, 4).requires_grad_(trained in ("all", "input"))
    (ours, gradients), (autograds, expected) = both_ways(module, x)
    torch.testing.assert_close(ours, autograds)
    torch.testing.assert_close(gradients, expected, atol=1e-5, rtol=1e-5)
    for i in range(3):  # each is a perceptron by itself
        alone = rows
        for layer, function in zip(module[::2], module[1::2], strict=True):
            alone = function(alone @ layer.weight[i] + layer.bias[i])
        torch.testing.assert_close(ours[i], alone)


@pytest.mark.parametrize("make", [lambda: MLP([3, 8, 8, 2], activation="tanh"), lambda: stack(3, 8, 2)])
def test_gradients_can_be_differentiated_again(make):
    torch.manual_seed(0)
    mlp = make()
    x = torch.randn(3, 5, 3) if isinstance(mlp[0], LinearStack) else torch.randn(5, 3)
    x.requires_grad_()
    ours, autograds = [
        torch.autograd.grad(gradients[0].square().sum(), [x, *mlp.parameters()], allow_unused=True)
        for _, gradients in both_ways(mlp, x, create_graph=True)
    ]
    assert ours[0].abs().sum() > 0.0
    for our, expected in zip(ours, autograds, strict=True):
        torch.testing.assert_close(our, expected)


def test_nothing_of_the_callers_is_written_to():
    mlp = MLP([3, 8, 8], activate_last=True)
    x = torch.randn(5, 3, requires_grad=True)
    x_before = x.detach().clone()
    result = layers_module.perceptron(x, layers_module.plain_layers(mlp, x))
    result_before, gradient = result.detach().clone(), torch.randn(5, 8)
    gradient_before = gradient.clone()
    first = torch.autograd.grad(result, [x, *mlp.parameters()], gradient, retain_graph=True)
    second = torch.autograd.grad(result, [x, *mlp.parameters()], gradient)
    assert torch.equal(x, x_before)
    assert torch.equal(result, result_before)
    assert torch.equal(gradient, gradient_before)
    torch.testing.assert_close(first, second, atol=0.0, rtol=0.0)


def calls_modules(mlp, x):
    return layers_module.plain_layers(mlp, x) is None


@pytest.mark.parametrize(
    "mlp",
    [
        MLP([3, 4, 2]).double(),
        *(MLP([3, 4, 2], activation=name) for name in ("gelu", "squared_relu")),
        MLP([3, 4, 2], layer_norm=True),
        nn.Sequential(nn.Linear(3, 4, bias=False)),
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))),
    ],
)
def test_other_modules_are_called(mlp):
    assert calls_modules(mlp, torch.randn(5, 3, dtype=mlp[0].weight.dtype))


def test_modules_are_called_where_more_than_plain_training_is_meant():
    mlp, x = MLP([3, 4, 2]), torch.randn(5, 3)
    assert not calls_modules(mlp, x)
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen.append(calls_modules(mlp, x))
    torch.func.vmap(lambda row: (seen.append(calls_modules(mlp, row)), row)[1])(x)
    make_fx(lambda x: (seen.append(calls_modules(mlp, x)), x)[1])(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        seen.append(calls_modules(mlp, x))
    assert seen == [True] * 4
    shapes = []
    mlp[0].register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    mlp(torch.randn(70_000, 3))
    assert shapes == [(70_000, 4)]


def test_a_loss_that_differentiates_itself_is_traced_without_operators_that_a_compiler_refuses(monkeypatch):
    monkeypatch.setattr(products, "has_fast_linear", lambda: True)
    mlp, x = MLP([128, 256, 256, 1]), torch.randn(1024, 128)

    def gradients(x):
        return torch.autograd.grad(mlp(x).square().mean(), list(mlp.parameters()))

    traced = trace(gradients, [x])
    record, _ = fused(*json.loads(traced.text)[:2])
    names = [str(node.target) for node in record.graph.nodes]
    # oneDNN is called by the operator that the compiler was taught, and by no other.
    assert (names.count("rl8x.linear.default") > 1, sum("mkldnn" in name for name in names)) == (True, 0)
    torch.testing.assert_close(tuple(record(x, *traced.read)), gradients(x), atol=1e-5, rtol=1e-4)


CRITICS = Critics(Box(-1, 1, (3,)), Box(-1, 1, (1,)), hidden_sizes=(64, 64))


@pytest.mark.parametrize("read", [MLP([3, 64, 64]), lambda obs: CRITICS(obs, obs[:, :1])], ids=["mlp", "critics"])
def test_many_rows_are_differentiated_at_once_and_few_by_autograd(read):
    kinds = [type(read(torch.randn(rows, 3)).grad_fn.next_functions[0][0]).__name__ for rows in (1024, 500)]
    assert [kind == "_PerceptronBackward" for kind in kinds] == [True, False]


@pytest.mark.parametrize("rows", [100, 1024])
def test_results_are_the_same_bits_with_and_without_gradients(rows):
    torch.manual_seed(0)
    mlp, x = MLP([64, 256, 256, 2]), torch.randn(rows, 64)
    with torch.no_grad():
        acted = mlp(x)
    assert torch.equal(acted, mlp(x))


SHAPES = [(7, 3, 5), (9, 1, 6), (9, 6, 1), (300, 3, 130), (256, 1, 256), (256, 256, 1), (256, 128, 256)]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("rows", "terms", "columns"), SHAPES)
def test_eager_products_are_the_usual_ones_of_stacks_too(rows, terms, columns, stacked, fast, monkeypatch):
    monkeypatch.setattr(products, "has_fast_linear", lambda: fast)
    called, linear = [], products.linear
    monkeypatch.setattr(products, "linear", lambda *given: (called.append(given[0].shape), linear(*given))[1])
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, terms), (terms, columns), (1, columns)
    left, right, bias = (torch.randn(3, *shape, generator=generator) for shape in shapes)
    left, right, bias = (left, right, bias) if stacked else (left[0], right[0], bias[0, 0])
    exact = left.double() @ right.double()
    close = {"atol": 1e-4, "rtol": 1e-5}
    torch.testing.assert_close(layers_module._multiply(left, right, bias), (exact + bias.double()).float(), **close)
    torch.testing.assert_close(layers_module._multiply(left, right), exact.float(), **close)
    result = layers_module._multiply_transposed(left.mT.contiguous(), right)
    torch.testing.assert_close(result, exact.float(), **close)
    assert result.is_contiguous()
    wide = rows * terms * columns >= 2**23 and min(rows, terms, columns) >= 128
    assert called == ([(rows, terms)] * (9 if stacked else 3) if wide and fast else [])
    if stacked:  # of critics the first layer reads the same rows
        shared = left[:1].expand(3, -1, -1)
        torch.testing.assert_close(layers_module._multiply(shared, right, bias), shared @ right + bias, **close)


# -- activations and means


def test_values_by_hand():
    x = torch.tensor([-2.0, 0.0, 3.0])
    assert activation("relu")(x).tolist() == [0.0, 0.0, 3.0]
    assert activation("squared_relu")(x).tolist() == [0.0, 0.0, 9.0]
    assert activation("identity")(x).tolist() == [-2.0, 0.0, 3.0]
    assert activation("silu")(x).tolist() == pytest.approx([-2 * 0.1192029, 0.0, 3 * 0.9525741], abs=1e-6)
    assert activation("tanh")(x).tolist() == pytest.approx([-0.9640276, 0.0, 0.9950548], abs=1e-6)


def test_means_are_those_of_the_elements_that_count_and_others_have_no_influence_not_even_nan():
    x = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[2] = False
    spoiled = x.masked_fill(~mask.unsqueeze(-1), torch.nan).requires_grad_()
    mean = masked_mean(spoiled, mask.unsqueeze(-1), 1)
    for row in range(4):
        expected = x[row][mask[row]].sum(0) / max(1, int(mask[row].sum()))
        torch.testing.assert_close(mean[row], expected, atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(mean.sum(), spoiled)
    assert bool(gradient.isfinite().all())
    assert not gradient[~mask].any()

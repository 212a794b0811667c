from __future__ import annotations

import pytest
import torch
from torch import nn

from rl8x.nn import MLP, linear


def test_layers_and_activations_in_order():
    assert [type(layer) for layer in MLP([3, 4, 5, 2], activation="tanh")] == [
        nn.Linear,
        nn.Tanh,
        nn.Linear,
        nn.Tanh,
        nn.Linear,
    ]
    assert [type(layer) for layer in MLP([3, 4], activate_last=True)] == [nn.Linear, nn.ReLU]
    assert list(MLP([3])) == []


def test_layer_norm_stands_before_each_activation():
    norm = nn.LayerNorm
    kinds = [type(layer) for layer in MLP([3, 4, 5, 2], layer_norm=True)]
    assert kinds == [nn.Linear, norm, nn.ReLU, nn.Linear, norm, nn.ReLU, nn.Linear]
    assert [type(layer) for layer in MLP([3, 4], layer_norm=True, activate_last=True)] == [nn.Linear, norm, nn.ReLU]
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


def test_shapes():
    mlp = MLP([3, 4, 2])
    assert (mlp.num_inputs, mlp.num_outputs) == (3, 2)
    assert mlp(torch.randn(5, 6, 3)).shape == (5, 6, 2)
    x = torch.randn(5, 3)
    assert torch.equal(MLP([3])(x), x)


def test_gains():
    mlp = MLP([4, 4, 4], gain=2.0, last_gain=0.5)
    assert torch.allclose(mlp[0].weight @ mlp[0].weight.T, 4.0 * torch.eye(4), atol=1e-5)
    assert torch.allclose(mlp[2].weight @ mlp[2].weight.T, 0.25 * torch.eye(4), atol=1e-5)
    layer = linear(3, 7, 0.1)
    assert torch.allclose(layer.weight.T @ layer.weight, 0.01 * torch.eye(3), atol=1e-6)
    assert torch.equal(layer.bias, torch.zeros(7))


@pytest.mark.parametrize("sizes", [[], [3, 0], [3, -1], [3, 2.5], "34"])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ValueError, match="sizes"):
        MLP(sizes)


@pytest.mark.parametrize("width", [0, -1, 2.5, True, "3", None])
def test_widths_that_are_none_are_refused(width):
    with pytest.raises(ValueError, match="`num_inputs` must be a whole number of at least 1; got"):
        linear(width, 3)
    with pytest.raises(ValueError, match="`num_outputs` must be a whole number of at least 1; got"):
        linear(3, width)


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"reads rows \[..., 3\]; got \[5, 4\]"):
        MLP([3, 2])(torch.rand(5, 4))
    with pytest.raises(ValueError, match=r"reads rows \[..., 3\]; got \[5, 4\]"):
        MLP([3])(torch.rand(5, 4))

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch.nn import functional

from rl8x.models import MLPModel

OBS = Box(-1.0, 1.0, (5,), np.float32)
STARTS = torch.zeros(3, 4, dtype=torch.bool)


def orthogonality_error(weight: torch.Tensor, gain: float) -> float:
    square = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
    return (square - gain**2 * torch.eye(len(square))).abs().max().item()


def test_the_arithmetic_is_two_perceptrons():
    model = MLPModel(OBS, 3, hidden_sizes=(7, 6), activation="tanh", policy_gain=1.0)
    obs = torch.randn(3, 4, 5)
    features, values, state = model(obs, {}, STARTS)
    weights = dict(model.named_parameters())

    def perceptron(trunk: str, head: str) -> torch.Tensor:
        hidden = torch.tanh(functional.linear(obs, weights[f"{trunk}.0.weight"], weights[f"{trunk}.0.bias"]))
        hidden = torch.tanh(functional.linear(hidden, weights[f"{trunk}.2.weight"], weights[f"{trunk}.2.bias"]))
        return functional.linear(hidden, weights[f"{head}.weight"], weights[f"{head}.bias"])

    assert torch.equal(features, perceptron("actor", "policy_head"))
    assert torch.equal(values, perceptron("critic", "value_head")[..., 0])
    assert state == {}
    assert features.shape == (3, 4, 3)
    assert values.shape == (3, 4)


def test_values_alone_skip_the_actor():
    model = MLPModel(OBS, 3, hidden_sizes=(8,))
    model.actor.forward = model.policy_head.forward = None
    model.values(torch.randn(3, 4, 5), {}, STARTS)


def test_initial_weights_are_orthogonal_with_the_stated_gains():
    model = MLPModel(OBS, 3, hidden_sizes=(32, 16))
    for trunk in (model.actor, model.critic):
        for layer in (trunk[0], trunk[2]):
            assert orthogonality_error(layer.weight, math.sqrt(2)) < 1e-5
            assert torch.equal(layer.bias, torch.zeros_like(layer.bias))
    assert orthogonality_error(model.policy_head.weight, 0.01) < 1e-6
    assert orthogonality_error(model.value_head.weight, 1.0) < 1e-5


@pytest.mark.parametrize("separate", [0, 3])
def test_uniform_weights_begin_as_those_of_pytorchs_layers(separate):
    model = MLPModel(OBS, 400, hidden_sizes=(300, 200), init="uniform", separate=separate)
    model_weights = [weight for name, weight in model.named_parameters() if name.endswith("weight")]
    own = [torch.nn.Linear(*ends).weight for ends in [(5, 300), (300, 200)] * 2 + [(200, 400), (200, 1)]]
    for weights, expected in zip(model_weights, own, strict=True):
        assert weights.abs().max() <= expected.shape[1] ** -0.5
        if len(expected) > 1:
            torch.testing.assert_close(weights.std(), expected.std(), rtol=0.1, atol=0.0)
            torch.testing.assert_close(weights.abs().max(), expected.abs().max(), rtol=0.01, atol=0.0)
    assert all(not weight.any() for name, weight in model.named_parameters() if name.endswith("bias"))
    with pytest.raises(ValueError, match="`init` must be 'orthogonal' or 'uniform'; got 'xavier'"):
        MLPModel(OBS, 3, init="xavier")


def test_a_model_without_hidden_layers_is_linear():
    model = MLPModel(OBS, 2, hidden_sizes=())
    obs = torch.randn(3, 4, 5)
    features, values, _ = model(obs, {}, STARTS)
    assert torch.equal(features, functional.linear(obs, model.policy_head.weight, model.policy_head.bias))
    assert values.shape == (3, 4)

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


@pytest.mark.parametrize("hidden_sizes", [(7, 6), ()], ids=["two layers", "linear"])
def test_the_arithmetic_is_two_perceptrons(hidden_sizes):
    model = MLPModel(OBS, 3, hidden_sizes=hidden_sizes, activation="tanh", policy_gain=1.0)
    obs = torch.randn(3, 4, 5)
    features, values, state = model(obs, {}, STARTS)
    weights = dict(model.named_parameters())

    def perceptron(trunk: str, head: str) -> torch.Tensor:
        x = obs
        for i in range(len(hidden_sizes)):
            x = torch.tanh(functional.linear(x, weights[f"{trunk}.{2 * i}.weight"], weights[f"{trunk}.{2 * i}.bias"]))
        return functional.linear(x, weights[f"{head}.weight"], weights[f"{head}.bias"])

    assert torch.equal(features, perceptron("actor", "policy_head"))
    assert torch.equal(values, perceptron("critic", "value_head")[..., 0])
    assert state == {}


def test_values_alone_skip_the_actor():
    model = MLPModel(OBS, 3, hidden_sizes=(8,))
    model.actor.forward = model.policy_head.forward = None
    model.values(torch.randn(3, 4, 5), {}, STARTS)


def test_initial_weights_are_orthogonal_with_the_stated_gains():
    model = MLPModel(OBS, 3, hidden_sizes=(32, 16))
    trained = [model.actor[0], model.actor[2], model.critic[0], model.critic[2], model.policy_head, model.value_head]
    for layer, gain in zip(trained, [*[math.sqrt(2)] * 4, 0.01, 1.0], strict=True):
        weight = layer.weight if layer.out_features <= layer.in_features else layer.weight.T
        torch.testing.assert_close(weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-5, rtol=1e-5)
        assert not layer.bias.any()


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

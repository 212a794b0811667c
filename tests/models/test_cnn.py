from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from torch.nn import functional

from rl8x.models import CNNModel

IMAGE = Box(0, 255, (8, 9, 3), np.uint8)
STARTS = torch.zeros(2, 3, dtype=torch.bool)


def images(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_the_arithmetic_is_convolutions_and_a_perceptron(shared, layer_norm):
    options = {"convolutions": [(5, 3, 2), (4, 2, 1)], "hidden_sizes": (6,), "shared": shared, "policy_gain": 1.0}
    model = CNNModel(IMAGE, 4, layer_norm=layer_norm, **options)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    obs = images(2, 3, 8, 9, 3)

    def hidden(trunk):
        """With all channels of an image normalised together before each activation, if at all."""
        convolutions, x = [*trunk[0].parts[0].convolutions], obs.float().flatten(0, 1).permute(0, 3, 1, 2) / 255
        for stride in (2, 1):
            layer = convolutions.pop(0)
            x = functional.conv2d(x, layer.weight, layer.bias, stride=stride)
            if layer_norm:
                scale = convolutions.pop(0)
                mean, variance = x.mean((1, 2, 3), keepdim=True), x.var((1, 2, 3), correction=0, keepdim=True)
                x = (x - mean) / (variance + 1e-5).sqrt() * scale.weight.view(-1, 1, 1) + scale.bias.view(-1, 1, 1)
            convolutions.pop(0)
            x = torch.relu(x)
        x = trunk[1][0](x.flatten(1))
        x = functional.layer_norm(x, (6,), trunk[1][1].weight, trunk[1][1].bias) if layer_norm else x
        return torch.relu(x).unflatten(0, (2, 3))

    features, values, state = model(obs, {}, STARTS)
    torch.testing.assert_close(features, model.policy_head(hidden(model.actor)), atol=1e-5, rtol=1e-5)
    expected = model.value_head(hidden(model.actor if shared else model.critic))[..., 0]
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)
    assert torch.allclose(model.values(obs, {}, STARTS), values, atol=1e-6)
    assert (state, features.shape) == ({}, (2, 3, 4))
    # 84 -> (84 - 8) / 4 + 1 = 20 -> (20 - 4) / 2 + 1 = 9 -> 9 - 3 + 1 = 7; 64 x 7 x 7 = 3136.
    assert CNNModel(Box(0, 255, (4, 84, 84), np.uint8), 4).actor[0].width == 3136


def test_other_parts_join_what_the_convolutions_give():
    space = Dict({"image": IMAGE, "speed": Box(-1, 1, (2,), np.float32)})
    model = CNNModel(space, 4, convolutions=[(5, 3, 2)], hidden_sizes=(6,), shared=False, critic_obs=["speed"])
    # 8 x 9 by 3 x 3 with stride 2 is 3 x 4, of 5 channels 60; the critic has 2 numbers more.
    assert (model.actor[0].width, model.critic[0].width) == (60, 62)
    obs = {"image": images(2, 3, 8, 9, 3), "speed": torch.randn(2, 3, 2)}
    features, values, _ = model(obs, {}, STARTS)
    others = model(obs | {"speed": obs["speed"] + 1}, {}, STARTS)
    assert torch.equal(features, others[0])
    assert not torch.allclose(values, others[1])

"""Under bfloat16 the bodies of the built-in models multiply in bfloat16, and their heads in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rl8x import Model, Policy

VECTOR = spaces.Box(-1, 1, (5,), np.float32)
IMAGE = spaces.Box(0, 255, (8, 9, 3), np.uint8)
ACTIONS = spaces.Box(-1, 1, (6,), np.float32)
CONVOLUTIONS = {"convolutions": [(8, 3, 1)], "hidden_sizes": [64]}
# Space, name, arguments, and a module of the body
MODELS = {
    "mlp": (VECTOR, "mlp", {"hidden_sizes": [64, 64]}, "actor.0"),
    "mlp, shared": (VECTOR, "mlp", {"hidden_sizes": [64], "shared": True}, "actor.0"),
    "mlp, separate": (VECTOR, "mlp", {"hidden_sizes": [64], "separate": 3}, "actor.0"),
    "cnn": (IMAGE, "cnn", CONVOLUTIONS, "actor.1.0"),
    "dict": (spaces.Dict({"image": IMAGE, "x": VECTOR}), "cnn", CONVOLUTIONS | {"shared": False}, "critic.1.0"),
    "dict, flat": (spaces.Dict({"x": VECTOR, "y": VECTOR}), "mlp", {"critic_obs": ["y"]}, "critic.0"),
    "lstm": (VECTOR, "lstm", {"hidden_size": 64}, "inputs"),
    "gru": (VECTOR, "gru", {"hidden_size": 64, "encoder_sizes": [32]}, "inputs"),
    "attention": (VECTOR, "attention", {"window": 3, "width": 16}, "actor.embedding"),
}


def policy_of(space, **options):
    policy = Policy(space, ACTIONS, **options)
    policy.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    return policy


def observations(space, *shape: int):
    generator = torch.Generator().manual_seed(1)
    if isinstance(space, spaces.Dict):
        return {key: observations(part, *shape) for key, part in space.spaces.items()}
    if space.dtype == np.uint8:
        return torch.randint(256, (*shape, *space.shape), dtype=torch.uint8, generator=generator)
    return torch.randn(*shape, *space.shape, generator=generator)


@pytest.mark.parametrize("name", MODELS)
def test_bodies_multiply_in_bfloat16_and_heads_in_float32(name):
    space, model, config, body = MODELS[name]
    policy, found = policy_of(space, model=model, model_config=config), {}
    for part in (body, "policy_head", "value_head"):
        module = policy.model.get_submodule(part)
        module.register_forward_hook(lambda _, inputs, output, part=part: found.update({part: output.dtype}))
    noise = policy.noise(1, 3, torch.Generator().manual_seed(0))[0]
    starts = torch.zeros(3, dtype=torch.bool)
    policy.act(observations(space, 3), policy.initial_state(3), starts, noise)
    assert found == {body: torch.bfloat16, "policy_head": torch.float32, "value_head": torch.float32}


class Doubler(Model):
    """A model of a user, whose heads are layers as any others."""

    def __init__(self, observation_space, num_features):
        super().__init__(observation_space, num_features)
        self.features, self.value = nn.Linear(5, num_features), nn.Linear(5, 1)

    def forward(self, obs, state, starts):
        return self.features(obs), self.value(obs).squeeze(-1), state


def test_a_model_of_ones_own_computes_in_what_it_likes_and_the_distribution_in_float32():
    policy, found = policy_of(VECTOR, model=Doubler), []
    policy.model.features.register_forward_hook(lambda _, inputs, output: found.append(output.dtype))
    obs, starts = observations(VECTOR, 1, 8), torch.zeros(1, 8, dtype=torch.bool)
    evaluation = policy.evaluate(obs, torch.zeros(1, 8, 6), {}, starts)
    assert {part.dtype for part in evaluation if part is not None} == {torch.float32}
    assert policy.values(obs[0], {}, starts[0]).dtype == torch.float32
    assert set(found) == {torch.bfloat16}

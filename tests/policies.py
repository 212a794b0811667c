"""Policies to export: each model, for each kind of action."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rl8x.policy import Policy

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"hidden_sizes": [64, 64]},
    "cnn": {"hidden_sizes": [64]},
    "lstm": {"hidden_size": 64},
    "gru": {"hidden_size": 64},
    "attention": {"width": 32, "window": 8},
}
_STEERING = spaces.Box(-2.0, 2.0, (2,), np.float32)
ACTIONS: dict[str, spaces.Space[Any]] = {
    "box": _STEERING,
    "discrete": spaces.Discrete(5, start=2),
    "multidiscrete": spaces.MultiDiscrete([3, 20]),
    "multibinary": spaces.MultiBinary(4),
    "dict": spaces.Dict({"gear": spaces.Discrete(4), "steer": _STEERING}),
    "masked": spaces.Discrete(6),
    "masked-dict": spaces.Dict({"gear": spaces.Discrete(4), "steer": _STEERING}),
}


def observations(model: str, actions: str) -> spaces.Space[Any]:
    """Return a space of observations for a model: an image for `cnn`, with a mask for masked actions."""
    image = spaces.Box(0, 255, (3, 12, 12), np.uint8)
    sensed = image if model == "cnn" else spaces.Box(-np.inf, np.inf, (4,), np.float32)
    parts = {"sensed": sensed, "lane": spaces.Discrete(3, start=1), "wheels": spaces.MultiDiscrete([2, 3])}
    if actions == "masked":
        return spaces.Dict({"sensed": sensed, "action_mask": spaces.MultiBinary(6)})
    if actions == "masked-dict":
        mask = spaces.Dict({"gear": spaces.MultiBinary(4)})
        return spaces.Dict({**parts, "action_mask": mask})
    return spaces.Dict(parts) if actions == "dict" else sensed


def policy_of(model: str, actions: str, **options: Any) -> Policy:
    """Make a policy that has seen observations of some spread, and whose actions differ with what it sees."""
    torch.manual_seed(0)
    model_config = {**MODELS[model], "policy_gain": 1.0, **options.pop("model_config", {})}
    space = observations(model, actions)
    policy = Policy(
        space, ACTIONS[actions], model=model, model_config=model_config, normalize_observations=True, **options
    )
    for moments in () if policy.obs_moments is None else policy.obs_moments.values():
        moments.update(3.0 + 2.0 * torch.randn(100, *moments.shape))
    return policy

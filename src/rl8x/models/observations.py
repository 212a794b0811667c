"""Observations of any space as one flat vector of floats."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl8x.spaces import describe


class FlatObservations(nn.Module):
    """Lay an observation out as one vector, `[..., *obs]` to `[..., width]`.

    A `Box` is flattened, `Discrete` and each part of `MultiDiscrete` one-hot encoded, `MultiBinary` taken as 0 and 1.
    The parts of a `Dict` are joined in the space's order, and so are those of a `Tuple`, whose observations are a dict
    with the keys "0", "1", ...

    Args:
        space: Space of one copy's observation.
    """

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self.space = space
        self.width = flat_width(space)

    def forward(self, obs: Any) -> Tensor:
        """Flatten observations; a vector of float32 is returned as it is."""
        return flatten_observation(self.space, obs)


def flat_width(space: gymnasium.Space[Any]) -> int:
    """Return the width of the vector that an observation becomes.

    Raises:
        TypeError: If the space is of a kind that has no such form.
    """
    if isinstance(space, spaces.Box):
        return math.prod(space.shape)
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, spaces.MultiBinary):
        return math.prod(space.shape)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return sum(flat_width(part) for _, part in named_parts(space))
    raise TypeError(
        f"no built-in model reads observations of {describe(space)}; there are for Box, Discrete, MultiDiscrete, "
        "MultiBinary, and Dict and Tuple of those. Pass a Model of your own."
    )


def named_parts(space: spaces.Dict | spaces.Tuple[Any]) -> list[tuple[str, gymnasium.Space[Any]]]:
    """Return the parts of a `Dict` or `Tuple` space with their keys; a `Tuple`'s are "0", "1", ..."""
    if isinstance(space, spaces.Dict):
        return list(space.spaces.items())
    return [(str(i), part) for i, part in enumerate(space.spaces)]


def flatten_observation(space: gymnasium.Space[Any], obs: Any) -> Tensor:
    """Lay an observation out as one vector, `[..., *obs]` to `[..., flat_width(space)]`, float32."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return torch.cat([flatten_observation(part, obs[key]) for key, part in named_parts(space)], -1)
    if isinstance(space, spaces.Discrete):
        return _one_hot(obs - int(space.start), int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        obs = obs.flatten(obs.dim() - len(space.shape))
        sizes, starts = space.nvec.flatten().tolist(), space.start.flatten().tolist()
        parts = zip(obs.unbind(-1), sizes, starts, strict=True)
        return torch.cat([_one_hot(part - start, size) for part, size, start in parts], -1)
    assert space.shape is not None
    flat: Tensor = obs
    if not space.shape:
        flat = flat.unsqueeze(-1)
    elif len(space.shape) > 1:
        flat = flat.flatten(flat.dim() - len(space.shape))
    return flat.float()


def _one_hot(index: Tensor, size: int) -> Tensor:
    # A comparison instead of torch's one_hot, which checks the range with a copy to the host.
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).float()

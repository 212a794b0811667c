"""Observations of any space as one flat vector of floats, and the parts of them that only the critic sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl8x.names import unknown_name
from rl8x.spaces import describe_space, leaves


class FlatObservations(nn.Module):
    """Lay an observation out as one vector, `[..., *obs]` to `[..., width]`.

    A `Box` is flattened, one of uint8 scaled by its bounds to [0, 1], `Discrete` and each part of `MultiDiscrete`
    one-hot encoded, `MultiBinary` taken as 0 and 1. The parts of a `Dict` are joined in the space's order, and so are
    those of a `Tuple`, whose observations are a dict with the keys "0", "1", ...

    Args:
        space: Space of one copy's observation.

    Attributes:
        width: Width of the vector.
        leaf_widths: Width of each part that has no parts itself.
        is_vector: Whether an observation is a vector already, of which only the dtype may change: `obs.float()`.

    Raises:
        TypeError: If a part is of a kind that has no such form.
    """

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self.leaves = leaves(space)
        self.leaf_widths = [_width(leaf) for _, leaf in self.leaves]
        self.width = sum(self.leaf_widths)
        self.is_vector = isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype != np.uint8

    def forward(self, obs: Any) -> Tensor:
        """Return observations `[..., *obs]` as `[..., width]`; a vector of float32 as it is."""
        flat = [_flattened(leaf, part_at(path, obs)) for path, leaf in self.leaves]
        return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


def part_at(path: Sequence[str], obs: Any) -> Tensor:
    """Return the part `[..., *part]` of an observation at a path of keys; the whole for an empty path."""
    for key in path:
        obs = obs[key]
    part: Tensor = obs
    return part


def _width(space: gymnasium.Space[Any]) -> int:
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return math.prod(space.shape)
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    raise TypeError(
        f"no built-in model reads observations of {describe_space(space)}; there are for Box, Discrete, MultiDiscrete, "
        "MultiBinary, and Dict and Tuple of those. Pass a Model of your own."
    )


def _flattened(space: gymnasium.Space[Any], obs: Tensor) -> Tensor:
    """Return an observation without parts, `[..., *obs]`, as one vector, `[..., width]`, float32."""
    if isinstance(space, spaces.Discrete):
        return _one_hot(obs - int(space.start), int(space.n))
    assert space.shape is not None
    flat = obs.flatten(obs.dim() - len(space.shape)) if space.shape else obs.unsqueeze(-1)
    if isinstance(space, spaces.MultiDiscrete):
        sizes, starts = space.nvec.flatten().tolist(), space.start.flatten().tolist()
        parts = zip(flat.unbind(-1), sizes, starts, strict=True)
        return torch.cat([_one_hot(part - start, size) for part, size, start in parts], -1)
    if space.dtype == np.uint8 and isinstance(space, spaces.Box):
        low, high = float(space.low.min()), float(space.high.max())
        return (flat.float() - low) * (1.0 / max(high - low, 1.0))
    return flat.float()


def _one_hot(index: Tensor, size: int) -> Tensor:
    # A comparison instead of torch's one_hot, which checks the range with a copy to the host.
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).float()


def actor_space(space: gymnasium.Space[Any], critic_obs: Sequence[str], shared: bool) -> gymnasium.Space[Any]:
    """Return the space that the actor sees: a `Dict` without its parts `critic_obs`, which only the critic sees.

    Raises:
        ValueError: If there is no such part, nothing left, or actor and critic share layers.
    """
    if isinstance(critic_obs, str):
        raise ValueError(f"`critic_obs` must be a list of names; got {critic_obs!r}. Try [{critic_obs!r}].")
    if not critic_obs:
        return space
    if shared:
        raise ValueError(f"`critic_obs` ({', '.join(critic_obs)}) needs actor and critic apart: set shared=False.")
    if not isinstance(space, spaces.Dict):
        raise ValueError(f"`critic_obs` names parts of a Dict observation; this one is {describe_space(space)}.")
    for name in critic_obs:
        if name not in space.spaces:
            raise ValueError(unknown_name("part", name, space.spaces, " of the observation in `critic_obs`"))
    rest = {name: part for name, part in space.spaces.items() if name not in critic_obs}
    if not rest:
        raise ValueError("`critic_obs` leaves the actor nothing to see; it names every part of the observation.")
    return spaces.Dict(rest)


def visible_columns(
    space: gymnasium.Space[Any], widths: Sequence[int], critic_obs: Sequence[str], shared: bool
) -> Tensor | None:
    """Return which columns of a flattened observation the actor sees, `[width]`, bool; None: all.

    `widths` are those of the space's leaves; what `actor_space` refuses is refused.
    """
    if actor_space(space, critic_obs, shared) is space:
        return None
    parts = zip(leaves(space), widths, strict=True)
    return torch.cat([torch.full((width,), path[0] not in critic_obs) for (path, _), width in parts])

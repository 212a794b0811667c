"""The observation normaliser: running moments of each float part of an observation, as one module."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from torch import Tensor, nn

from rl8x.functional import RunningMoments
from rl8x.spaces import leaves
from rl8x.trees import Tree, flatten_tree, unflatten_tree

# Normalised observations are clipped to [-10, 10].
_CLIP = 10.0
# The module name of an observation without parts; of one with parts, that of the part with the key "".
_WHOLE = "observation"


def make_obs_moments(space: gymnasium.Space[Any]) -> nn.ModuleDict:
    """Return running moments for every float `Box` of an observation, by path."""
    floats = {
        _module_name("/".join(path)): leaf.shape
        for path, leaf in leaves(space)
        if isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating)
    }
    return nn.ModuleDict({name: RunningMoments(shape) for name, shape in floats.items()})


def moments_of_part(obs_moments: nn.ModuleDict, name: str) -> RunningMoments | None:
    """Return the moments of a part of observations; None if it is not normalised.

    Args:
        obs_moments: As `make_obs_moments` made them.
        name: The part's name by `flatten_tree("", obs)`.
    """
    path = _module_name(name.removeprefix("/"))
    if path not in obs_moments:
        return None
    moments = obs_moments[path]
    assert isinstance(moments, RunningMoments)
    return moments


def normalize_obs(obs_moments: nn.ModuleDict, obs: Any) -> Any:
    """Shift and scale the float parts of observations by their moments.

    Args:
        obs_moments: As `make_obs_moments` made them.
        obs: Observations, `[..., *obs]` or a dict of them, without an action mask.

    Returns:
        Observations of the same shapes.
    """
    if isinstance(obs, Tensor):
        return _normalized(obs_moments, "", obs)
    flat = flatten_tree("", obs)
    return unflatten_tree("", {name: _normalized(obs_moments, name, part) for name, part in flat.items()})


def _normalized(obs_moments: nn.ModuleDict, name: str, part: Tensor) -> Tensor:
    moments = moments_of_part(obs_moments, name)
    return part if moments is None else moments.normalize(part, _CLIP)


def update_obs_moments(obs_moments: nn.ModuleDict, obs: Tree, valid: Tensor | None, *, shared: bool) -> None:
    """Update the moments with observations; for the arguments see `Policy.observe`."""
    for name, part in flatten_tree("", obs).items():
        if (moments := moments_of_part(obs_moments, name)) is not None:
            moments.update(part, valid, shared=shared)


@functools.cache
def _module_name(path: str) -> str:
    """Return a module name for a part's moments, another for each path.

    torch allows no dots, empty names or names of its own attributes.
    """
    name = path.replace("%", "%25").replace(".", "%2E")
    # A "%" at the end is no escape, so that this is no other part's name.
    return f"{name}%" if name == _WHOLE or hasattr(nn.ModuleDict(), name) else name or _WHOLE

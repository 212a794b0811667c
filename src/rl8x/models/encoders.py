"""Encoders of observations: their parts as flat vectors or through convolutions, by space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl8x.models.layers import HIDDEN_GAIN, check_sizes
from rl8x.models.layers import activation as make_activation
from rl8x.names import unknown_name
from rl8x.spaces import describe_space, leaves, without_parts


class FlatObservations(nn.Module):
    """Lay an observation out as one vector of float32, `[..., *obs]` to `[..., width]`; see `_flattened`."""

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__()
        self.leaves = leaves(space)
        self.leaf_widths = [_width(leaf) for _, leaf in self.leaves]
        self.width = sum(self.leaf_widths)
        # Then `obs.float()` does the same.
        self.is_vector = isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype != np.uint8

    def forward(self, obs: Any) -> Tensor:
        """Return observations `[..., *obs]` as `[..., width]`; a float32 vector is returned unchanged."""
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
    """Return an observation without parts as one vector, `[..., width]`: one-hot, uint8 in [0, 1], or as it is."""
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
    """Return the actor's observation space: a `Dict` without the parts `critic_obs`, which only the critic sees."""
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
    if not space.spaces.keys() - critic_obs:
        raise ValueError("`critic_obs` leaves the actor nothing to see; it names every part of the observation.")
    return without_parts(space, critic_obs)


def visible_columns(
    space: gymnasium.Space[Any], widths: Sequence[int], critic_obs: Sequence[str], shared: bool
) -> Tensor | None:
    """Return which columns of a flat observation the actor sees, `[width]`, bool, given leaf widths; None: all."""
    if actor_space(space, critic_obs, shared) is space:
        return None
    parts = zip(leaves(space), widths, strict=True)
    return torch.cat([torch.full((width,), path[0] not in critic_obs) for (path, _), width in parts])


Convolution: TypeAlias = tuple[int, int, int]
"""Channels, side of the kernel, stride."""
Channels: TypeAlias = Literal["auto", "first", "last"]

_FOR_LARGE: Final[Sequence[Convolution]] = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_FOR_SMALL: Final[Sequence[Convolution]] = ((16, 3, 1), (32, 3, 1))
# Number of levels up to which float32 represents whole numbers exactly.
_MOST_LEVELS: Final = 2**24


def is_image(space: gymnasium.Space[Any]) -> bool:
    """Return whether a space is a `Box` of at least 5 x 5, of rank 3, or of rank 2 with whole numbers."""
    if not isinstance(space, spaces.Box):
        return False
    if len(space.shape) == 2:
        return np.issubdtype(space.dtype, np.integer) and min(space.shape) >= 5
    return len(space.shape) == 3 and sorted(space.shape)[1] >= 5


class ImageEncoder(nn.Module):
    """Convolutions over images, `[T, B, *image]` to `[T, B, width]`."""

    def __init__(
        self,
        space: gymnasium.Space[Any],
        convolutions: Sequence[Convolution] | None,
        activation: str,
        channels: Channels,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3):
            raise TypeError(f"the model for images needs a Box of rank 3; got {describe_space(space)}. Try 'mlp'.")
        if channels not in ("auto", "first", "last"):
            raise ValueError(f"`channels` must be 'auto', 'first' or 'last'; got {channels!r}.")
        self.flat = len(space.shape) == 2
        shape = (1, *space.shape) if self.flat else space.shape
        first, _, last = shape
        self.channels_last = not self.flat and (channels == "last" or (channels == "auto" and last <= first))
        self.shape = (last, *shape[:2]) if self.channels_last else tuple(shape)
        low, high = float(space.low.min()), float(space.high.max())
        # Unbounded spaces have the bounds of their dtype: scaled by those, float32 could not tell numbers apart.
        scaled = np.issubdtype(space.dtype, np.integer) and high - low < _MOST_LEVELS
        self.low, self.range = (low, max(high - low, 1.0)) if scaled else (0.0, 1.0)
        if convolutions is None:
            convolutions = _FOR_LARGE if min(self.shape[1:]) >= 36 else _FOR_SMALL
        layers: list[nn.Module] = []
        num_channels, *sides = self.shape
        for convolution in convolutions:
            if len(convolution) != 3:
                raise ValueError(f"each of `convolutions` is (channels, kernel, stride); got {convolution!r}.")
            check_sizes("convolutions", convolution)
            size, kernel, stride = convolution
            if kernel > min(sides):
                raise ValueError(
                    f"`convolutions`: a kernel of {kernel} does not fit the {sides[0]} x {sides[1]} that is left of an "
                    f"image of {self.shape[1]} x {self.shape[2]}. Use fewer, smaller ones."
                )
            layer = nn.Conv2d(num_channels, size, kernel, stride)
            nn.init.orthogonal_(layer.weight, HIDDEN_GAIN)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            norms = [nn.GroupNorm(1, size)] if layer_norm else []  # one group is the whole layer
            layers += [layer, *norms, make_activation(activation)]
            num_channels, sides = size, [(side - kernel) // stride + 1 for side in sides]
        self.convolutions = nn.Sequential(*layers)
        self.width = num_channels * math.prod(sides)

    def forward(self, obs: Tensor) -> Tensor:
        """Return images `[T, B, *image]` as vectors, `[T, B, width]`."""
        images = self.images(obs)
        if torch.is_grad_enabled() and images.device.type == "cpu":
            # oneDNN's gradients take two thirds of the time in this layout; acting on a few images gains nothing.
            images = images.contiguous(memory_format=torch.channels_last)
        encoded: Tensor = self.convolutions(images)
        return encoded.reshape(*obs.shape[:2], self.width)

    def images(self, obs: Tensor) -> Tensor:
        """Return `[T, B, *image]` as `[T * B, channels, height, width]`, float32, bounded whole numbers in [0, 1]."""
        images = obs.flatten(0, 1).float()
        if (self.low, self.range) != (0.0, 1.0):
            images = (images - self.low) * (1.0 / self.range)
        if self.flat:
            return images.unsqueeze(1)
        return images.permute(0, 3, 1, 2) if self.channels_last else images


class ObservationEncoder(nn.Module):
    """Turn observations into one vector, `[T, B, *obs]` to `[T, B, width]`: images by convolutions, the rest flat."""

    def __init__(
        self,
        space: gymnasium.Space[Any],
        *,
        convolutions: Sequence[Convolution] | None = None,
        activation: str = "relu",
        channels: Channels = "auto",
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.paths = [path for path, _ in leaves(space)]
        self.parts = nn.ModuleList()
        self.leaf_widths: list[int] = []
        for _, leaf in leaves(space):
            image = is_image(leaf)
            options = (convolutions, activation, channels, layer_norm)
            part = ImageEncoder(leaf, *options) if image else FlatObservations(leaf)
            self.parts.append(part)
            self.leaf_widths.append(part.width)
        self.width = sum(self.leaf_widths)

    def forward(self, obs: Any) -> Tensor:
        """Return observations `[T, B, *obs]`, or a dict of them, as vectors, `[T, B, width]`."""
        encoded = [part(part_at(path, obs)) for path, part in zip(self.paths, self.parts, strict=True)]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded, -1)

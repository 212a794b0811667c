"""The feedforward model for images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from torch import Tensor, nn

from rl8x.models.base import Model, State
from rl8x.nn.activations import activation as make_activation
from rl8x.nn.mlp import HIDDEN_GAIN, MLP, check_sizes, linear
from rl8x.spaces import describe

LARGE = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
SMALL = ((16, 3, 1), (32, 3, 1))
_LARGE_SIDE = 36

Convolution = tuple[int, int, int]
"""Channels, side of the kernel, stride."""


class Images(nn.Module):
    """Turn observations of a `Box` of rank 3 into `[rows, channels, height, width]`, whole numbers scaled to [0, 1].

    Args:
        space: Space of one copy's observation.
        channels: Which axis the channels are: `"first"`, `"last"`, or `"auto"`, the shorter of the two.
    """

    def __init__(self, space: gymnasium.Space[Any], channels: Literal["auto", "first", "last"]) -> None:
        super().__init__()
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 3:
            raise TypeError(f"the model for images needs a Box of rank 3; got {describe(space)}. Try 'mlp'.")
        if channels not in ("auto", "first", "last"):
            raise ValueError(f"`channels` must be 'auto', 'first' or 'last'; got {channels!r}.")
        first, _, last = space.shape
        self.channels_last = channels == "last" or (channels == "auto" and last <= first)
        self.shape = (last, *space.shape[:2]) if self.channels_last else tuple(space.shape)
        whole = np.issubdtype(space.dtype, np.integer)
        self.low = float(space.low.min()) if whole else 0.0
        self.range = float(space.high.max()) - self.low if whole else 1.0

    def forward(self, obs: Tensor) -> Tensor:
        """Convert `[T, B, *obs]` to `[T * B, channels, height, width]`, float32."""
        images = obs.flatten(0, 1).float()
        if (self.low, self.range) != (0.0, 1.0):
            images = (images - self.low) * (1.0 / self.range)
        return images.permute(0, 3, 1, 2) if self.channels_last else images


class CNNModel(Model):
    """Convolutions, then a perceptron; the same for actor and critic unless `shared` is False.

    Args:
        observation_space: A `Box` of rank 3.
        num_features: Width of the features that the action distribution needs.
        convolutions: Channels, side of the kernel and stride of each; None: those of Mnih et al. for images of at least
            36 x 36, two of 3 x 3 for smaller ones.
        hidden_sizes: Widths of the layers after the convolutions.
        activation: Name of the activation after each layer.
        channels: Which axis the channels are: `"first"`, `"last"`, or `"auto"`, the shorter of the two.
        shared: Whether actor and critic have the same layers but the last.
        policy_gain: Gain of the layer that gives features.
        value_gain: Gain of the layer that gives values.

    Source: Mnih et al. 2015, doi:10.1038/nature14236.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        num_features: int,
        *,
        convolutions: Sequence[Convolution] | None = None,
        hidden_sizes: Sequence[int] = (512,),
        activation: str = "relu",
        channels: Literal["auto", "first", "last"] = "auto",
        shared: bool = True,
        policy_gain: float = 0.01,
        value_gain: float = 1.0,
    ) -> None:
        super().__init__(observation_space, num_features)
        check_sizes("hidden_sizes", hidden_sizes)
        self.images = Images(observation_space, channels)
        if convolutions is None:
            convolutions = LARGE if min(self.images.shape[1:]) >= _LARGE_SIDE else SMALL
        flat = _flat_size(self.images.shape, convolutions)
        self.actor = self._trunk(convolutions, flat, hidden_sizes, activation)
        self.critic = None if shared else self._trunk(convolutions, flat, hidden_sizes, activation)
        width = [flat, *hidden_sizes][-1]
        self.policy_head = linear(width, num_features, policy_gain)
        self.value_head = linear(width, 1, value_gain)

    def forward(self, obs: Tensor, state: State, starts: Tensor) -> tuple[Tensor, Tensor, State]:
        """Return features and values of observations `[T, B, *obs]`; nothing is carried from one to the next."""
        images = self.images(obs)
        hidden = self.actor(images)
        critic_hidden = hidden if self.critic is None else self.critic(images)
        features, values = self.policy_head(hidden), self.value_head(critic_hidden).squeeze(-1)
        return features.unflatten(0, starts.shape), values.unflatten(0, starts.shape), state

    def values(self, obs: Tensor, state: State, starts: Tensor) -> Tensor:
        """Return the values alone, `[T, B]`."""
        critic = self.actor if self.critic is None else self.critic
        values: Tensor = self.value_head(critic(self.images(obs))).squeeze(-1)
        return values.reshape(starts.shape)

    def _trunk(
        self, convolutions: Sequence[Convolution], flat: int, hidden_sizes: Sequence[int], activation: str
    ) -> nn.Sequential:
        layers: list[nn.Module] = []
        num_channels = self.images.shape[0]
        for channels, kernel, stride in convolutions:
            layer = nn.Conv2d(num_channels, channels, kernel, stride)
            nn.init.orthogonal_(layer.weight, HIDDEN_GAIN)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            layers += [layer, make_activation(activation)]
            num_channels = channels
        mlp = MLP([flat, *hidden_sizes], activation=activation, activate_last=True)
        return nn.Sequential(*layers, nn.Flatten(), mlp)


def _flat_size(shape: Sequence[int], convolutions: Sequence[Convolution]) -> int:
    """Return how many numbers the convolutions leave of an image.

    Raises:
        ValueError: If one is not three whole numbers, or its kernel is larger than what the ones before leave.
    """
    channels, height, width = shape
    for convolution in convolutions:
        if len(convolution) != 3:
            raise ValueError(f"each of `convolutions` is (channels, kernel, stride); got {convolution!r}.")
        check_sizes("convolutions", convolution)
        channels, kernel, stride = convolution
        if kernel > min(height, width):
            raise ValueError(
                f"`convolutions`: a kernel of {kernel} does not fit the {height} x {width} that is left of an image of "
                f"{shape[1]} x {shape[2]}. Use fewer, smaller ones."
            )
        height, width = ((side - kernel) // stride + 1 for side in (height, width))
    return channels * height * width

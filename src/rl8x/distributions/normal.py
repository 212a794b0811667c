"""Independent normal distributions, one for each dimension of a continuous action."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from rl8x.distributions.base import Distribution
from rl8x.spaces import check_bounds, describe_space

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class NormalParams(NamedTuple):
    """Mean and logarithm of the standard deviation, each `[..., *action]`."""

    mean: Tensor
    log_std: Tensor


class Normal(Distribution):
    """Normal distributions over a `Box`, independent of each other; actions float32 `[..., *action]`, never clipped.

    `env_actions` clips what the environment gets; what is stored and scored is the action as it was sampled.

    Args:
        space: The `Box` space of floating-point numbers, bounded or not.
        std: `"free"`: standard deviations are parameters, the same for every observation; `"state"`: they are features.
        initial_std: The first value of a free standard deviation, or that of a feature of 0; > 0 and within
            `log_std_bounds`. In the action's units.
        log_std_bounds: Smallest and largest logarithm of a standard deviation; beyond them it is clamped, with
            gradient 0.

    Raises:
        TypeError: If the space is of another kind.
        ValueError: If `std` is another word, or a number is out of its range.
    """

    default_for: ClassVar[tuple[type[gymnasium.Space[Any]], ...]] = (gymnasium.spaces.Box,)

    action_low: Tensor
    action_high: Tensor

    draw = staticmethod(torch.randn)

    def __init__(
        self,
        space: gymnasium.Space[Any],
        *,
        std: Literal["free", "state"] = "free",
        initial_std: float = 1.0,
        log_std_bounds: Sequence[float] = (-10.0, 2.0),
    ) -> None:
        super().__init__(space)
        if not isinstance(space, gymnasium.spaces.Box):
            raise TypeError(f"{type(self).__name__} needs a Box action space; got {describe_space(space)}.")
        if not np.issubdtype(space.dtype, np.floating):
            raise TypeError(
                f"{type(self).__name__} needs a Box of floating-point numbers; got {describe_space(space)}."
            )
        if std not in ("free", "state"):
            raise ValueError(f"`std` must be 'free' or 'state'; got {std!r}.")
        low, high = _checked_bounds(log_std_bounds)
        if not initial_std > 0 or not low <= math.log(initial_std) <= high:
            raise ValueError(
                f"`initial_std` must be between {math.exp(low):.3g} and {math.exp(high):.3g}; got {initial_std}."
            )
        for name, bound in (("action_low", space.low), ("action_high", space.high)):
            self.register_buffer(name, torch.as_tensor(bound, dtype=torch.float32), persistent=False)
        self.bounded = bool(np.isfinite(space.low).any() or np.isfinite(space.high).any())
        self.action_shape = tuple(space.shape)
        self.num_noise = math.prod(self.action_shape)
        self.std = std
        self.log_initial_std = math.log(initial_std)
        self.log_std_bounds = (low, high)
        self.num_features = self.num_noise if std == "free" else 2 * self.num_noise
        self.log_std = nn.Parameter(torch.full(self.action_shape, self.log_initial_std)) if std == "free" else None

    def from_features(self, features: Tensor, mask: None = None) -> NormalParams:
        """Split features `[..., num_features]` into means and, with `std="state"`, log standard deviations."""
        low, high = self.log_std_bounds
        if self.log_std is not None:
            mean = self._shaped(features)
            return NormalParams(mean, self.log_std.clamp(low, high).expand_as(mean))
        mean, log_std = features.chunk(2, -1)
        return NormalParams(self._shaped(mean), (self._shaped(log_std) + self.log_initial_std).clamp(low, high))

    def sample(self, params: NormalParams, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return `mean + std * noise`, `[..., *action]`, and its log-density `[...]`; gradients flow through both.

        `noise` are standard normal numbers, `[..., num_noise]`.
        """
        actions = self._drawn(params, noise)
        # Scored as a stored action is, from its rounded value: with the same weights both are the same bits.
        return actions, self.logp(params, actions)

    def rsample(self, params: NormalParams, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `sample`, `[..., *action]` and `[...]`, through which gradients flow already."""
        return self.sample(params, noise)

    def mode(self, params: NormalParams) -> Tensor:
        """Return the means, `[..., *action]`."""
        return params.mean

    def logp(self, params: NormalParams, actions: Tensor) -> Tensor:
        """Return the log-density of actions `[..., *action]`, summed over their dimensions, `[...]`."""
        return self._summed(normal_logp(params, actions))

    def entropy(self, params: NormalParams) -> Tensor:
        """Return the sum of `log std + (1 + log 2 pi) / 2`, `[...]`."""
        return self._summed(params.log_std + (0.5 + HALF_LOG_2PI))

    def kl(self, params: NormalParams, other: NormalParams) -> Tensor:
        """Return the sum of `log s2 - log s1 + (s1^2 + (m1 - m2)^2) / (2 s2^2) - 1/2`, `[...]`."""
        shift = (params.mean - other.mean) * (-other.log_std).exp()
        log_ratio = params.log_std - other.log_std
        # expm1 keeps the digits that the difference of two nearly equal standard deviations would lose.
        return self._summed(0.5 * (torch.expm1(2.0 * log_ratio) + shift.square()) - log_ratio)

    @property
    def clips(self) -> bool:
        """Whether the box has a bound."""
        return self.bounded

    def env_actions(self, actions: Tensor) -> Tensor:
        """Clip actions `[..., *action]` to the bounds of the box."""
        if not self.bounded:
            return actions
        return torch.minimum(torch.maximum(actions, self.action_low), self.action_high)

    def _drawn(self, params: NormalParams, noise: Tensor) -> Tensor:
        return torch.addcmul(params.mean, params.log_std.exp(), self._shaped(noise))

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat if len(self.action_shape) == 1 else flat.reshape(*flat.shape[:-1], *self.action_shape)

    def _summed(self, each: Tensor) -> Tensor:
        return each.flatten(each.dim() - len(self.action_shape)).sum(-1) if self.action_shape else each


class Scaled(Normal):
    """Normal distributions in a bounded `Box`, in which tanh of a number is a place between the bounds."""

    default_for = ()

    action_middle: Tensor
    action_half_range: Tensor

    def _scale_to(self, low: Tensor, high: Tensor) -> None:
        """Take the bounds of the box, float64 `[*action]`, which must be finite."""
        check_bounds(self.space, type(self).__name__, "Normal")
        self.register_buffer("action_middle", ((low + high) / 2).float(), persistent=False)
        self.register_buffer("action_half_range", ((high - low) / 2).float(), persistent=False)

    def _squashed(self, u: Tensor) -> Tensor:
        """Return `middle + half_range * tanh(u)`, `[..., *action]`, within the bounds whatever is rounded."""
        return self.env_actions(torch.addcmul(self.action_middle, self.action_half_range, u.tanh()))


def normal_logp(params: NormalParams, x: Tensor) -> Tensor:
    """Return the log-density of `x` in each dimension; all are `[..., *action]`."""
    z = (x - params.mean) * (-params.log_std).exp()
    return -0.5 * z.square() - params.log_std - HALF_LOG_2PI


def _checked_bounds(bounds: Sequence[float]) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        raise ValueError(f"`log_std_bounds` must be two numbers, the smaller first; got {bounds!r}.") from None
    if not low < high:
        raise ValueError(f"`log_std_bounds` must be two numbers, the smaller first; got {bounds!r}.")
    return low, high

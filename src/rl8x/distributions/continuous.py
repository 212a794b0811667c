"""Distributions over continuous actions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.special import log_ndtr, ndtr

from rl8x.distributions.base import Distribution
from rl8x.spaces import check_bounds, describe_space

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class NormalParams(NamedTuple):
    """Mean and logarithm of the standard deviation, each `[..., *action]`."""

    mean: Tensor
    log_std: Tensor


class Normal(Distribution):
    """Independent normal distributions over a `Box`; actions are float32 `[..., *action]`, and never clipped.

    `env_actions` clips actions for the environment; actions are stored and scored as sampled.

    Args:
        space: The `Box` space of floating-point numbers, bounded or not.
        std: `"free"`: standard deviations are parameters, the same for every observation; `"state"`: they are features.
        initial_std: The first value of a free standard deviation, or that of a feature of 0; > 0 and within
            `log_std_bounds`. In the action's units.
        log_std_bounds: Smallest and largest logarithm of a standard deviation; beyond them it is clamped, with
            gradient 0.
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
                f"{type(self).__name__} needs a Box of floating-point numbers; got {describe_space(space)}. Give whole "
                "numbers as a Discrete or MultiDiscrete action space."
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
        """Draw actions `[..., *action]` and log-densities `[...]` from standard normal noise `[..., num_noise]`."""
        actions = self._placed(self._drawn(params, noise))
        # Scored from the rounded action, like a stored action, so that the same weights give the same bits.
        return actions, self.logp(params, actions)

    def rsample(self, params: NormalParams, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of `sample`, `[..., *action]` and `[...]`, through which gradients flow already."""
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
        # expm1 keeps digits that the difference of two nearly equal variances would lose.
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

    def _placed(self, drawn: Tensor) -> Tensor:
        """Map numbers of the normal distribution to actions, `[..., *action]` each."""
        return drawn

    def _drawn(self, params: NormalParams, noise: Tensor) -> Tensor:
        return torch.addcmul(params.mean, params.log_std.exp(), self._shaped(noise))

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat if len(self.action_shape) == 1 else flat.reshape(*flat.shape[:-1], *self.action_shape)

    def _summed(self, each: Tensor) -> Tensor:
        return each.flatten(each.dim() - len(self.action_shape)).sum(-1) if self.action_shape else each


class Scaled(Normal):
    """The common base of distributions over a bounded `Box` that scale a tanh to its bounds."""

    default_for = ()

    action_middle: Tensor
    action_half_range: Tensor
    log_scale: Tensor

    def __init__(self, space: gymnasium.Space[Any], **options: Any) -> None:
        super().__init__(space, **options)
        check_bounds(space, type(self).__name__, "Normal")
        assert isinstance(space, gymnasium.spaces.Box)
        low, high = (torch.as_tensor(bound, dtype=torch.float64) for bound in (space.low, space.high))
        half_range = (high - low) / 2
        scales = {"action_middle": (low + high) / 2, "action_half_range": half_range, "log_scale": half_range.log()}
        for name, value in scales.items():
            self.register_buffer(name, value.float(), persistent=False)

    def _squashed(self, u: Tensor) -> Tensor:
        """Return `middle + half_range * tanh(u)`, `[..., *action]`, within the bounds despite rounding."""
        return self.env_actions(torch.addcmul(self.action_middle, self.action_half_range, u.tanh()))


def normal_logp(params: NormalParams, x: Tensor) -> Tensor:
    """Return the log-density of `x` in each dimension; all are `[..., *action]`."""
    z = (x - params.mean) * (-params.log_std).exp()
    return -0.5 * z.square() - params.log_std - HALF_LOG_2PI


def _checked_bounds(bounds: Sequence[float]) -> tuple[float, float]:
    with contextlib.suppress(TypeError, ValueError):
        low, high = (float(bound) for bound in bounds)
        if low < high:
            return low, high
    raise ValueError(f"`log_std_bounds` must be two numbers, the smaller first; got {bounds!r}.")


_LARGEST_TANH = 1.0 - 2.0**-24


class SquashedNormal(Scaled):
    """Normal distributions through tanh, scaled to a bounded `Box`; actions are float32 `[..., *action]`, within it.

        u ~ Normal(mean, std),  a = middle + half_range * tanh(u)
        log p(a) = log Normal(u) - log half_range - 2 (log 2 - u - softplus(-2 u))

    `logp` recovers u from a stored action, which float32 rounds to a bound of the box if |u| > 8.7; the density of
    such an action is taken at |u| = 8.7. `sample` scores in the same way, as importance ratios need it; `rsample`
    scores by the u that was drawn, whose value and gradient are right however large |u| is, as maximum-entropy losses
    need it.

    Arguments are those of `Normal`; standard deviations are those before squashing.

    Source: Haarnoja et al. 2018, arXiv:1801.01290, appendix C.
    """

    nodes: Tensor
    node_weights: Tensor

    def __init__(
        self,
        space: gymnasium.Space[Any],
        *,
        std: Literal["free", "state"] = "state",
        initial_std: float = 1.0,
        log_std_bounds: Sequence[float] = (-5.0, 2.0),
    ) -> None:
        super().__init__(space, std=std, initial_std=initial_std, log_std_bounds=log_std_bounds)
        nodes = torch.linspace(-5.0, 5.0, 21, dtype=torch.float64)
        weights = torch.exp(-0.5 * nodes.square())
        for name, value in (("nodes", nodes), ("node_weights", weights / weights.sum())):
            self.register_buffer(name, value.float(), persistent=False)

    def _placed(self, drawn: Tensor) -> Tensor:
        return self._squashed(drawn)

    def rsample(self, params: NormalParams, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions as `sample` does; gradients flow through them and log-densities `[...]` from before rounding."""
        u, noise = self._drawn(params, noise), self._shaped(noise)
        # (u - mean) / std is the noise, a constant: the gradient of the density flows through the other terms.
        logp = -0.5 * noise.square() - params.log_std - HALF_LOG_2PI
        return self._squashed(u), self._squashed_density(logp, u)

    def mode(self, params: NormalParams) -> Tensor:
        """Return the squashed means, `[..., *action]`: the medians, as the density's maximum has no closed form."""
        return self._squashed(params.mean)

    def logp(self, params: NormalParams, actions: Tensor) -> Tensor:
        """Return the log-density of actions `[..., *action]` in the box, summed over their dimensions, `[...]`."""
        tanh = (actions - self.action_middle) / self.action_half_range
        u = tanh.clamp(-_LARGEST_TANH, _LARGEST_TANH).atanh()
        return self._squashed_density(normal_logp(params, u), u)

    def entropy(self, params: NormalParams) -> Tensor:
        """Estimate the entropy `[...]` as that of the normal distribution plus the mean of log da/du.

        The mean is taken by the trapezoidal rule at 21 points up to 5 standard deviations from the mean: deterministic,
        differentiable, and for each dimension off by less than 1e-5 nats for std <= 1, 2e-4 for std <= 2, and 0.1 at
        the largest std that the default bounds allow (7.4).
        """
        u = params.mean.unsqueeze(-1) + params.log_std.exp().unsqueeze(-1) * self.nodes
        return super().entropy(params) + self._summed((log_derivative(u) * self.node_weights).sum(-1) + self.log_scale)

    def _squashed_density(self, logp: Tensor, u: Tensor) -> Tensor:
        """Return the log-density of actions, `[...]`, from u and its log-density, `[..., *action]` each."""
        return self._summed(logp - log_derivative(u) - self.log_scale)


def log_derivative(u: Tensor) -> Tensor:
    """Return log d tanh(u)/du, of any shape; computed as log(1 - tanh(u)^2) it would be log 0 for |u| > 9."""
    return 2.0 * (math.log(2.0) - u - functional.softplus(-2.0 * u))


_HALF_LOG_2PI_E = 0.5 * math.log(2.0 * math.pi * math.e)


class NoisyDeterministic(Scaled):
    """Features through tanh, scaled to a bounded `Box`, plus normal noise, clipped to the box.

        mu = middle + half_range tanh(f),  a = clip(mu + half_range sigma noise, low, high)

    In each dimension the bounds have the probability of the samples clipped to them, and between the bounds there is a
    density. `logp` is the log-probability at a bound, and the log-density elsewhere.

    Copies may have standard deviations of their own, evenly spread over a range: copy i of n has
    `min + (max - min) (i + 1/2) / n`. Then the first axis of features is that of the copies. Unlike standard deviations
    drawn at each reset, these need no state, and all of them are in use at any time.

    Args:
        space: The `Box` space, with finite bounds.
        noise_std: The standard deviation sigma, as a share of half the range of an action, > 0.
        noise_std_min: The smallest standard deviation, if copies have their own; `noise_std` is then the largest.
            Only TD3, whose losses need no log-probabilities, can train with it.

    Source: Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1; a range of standard deviations: Seo et al. 2025,
    arXiv:2505.22642, section 3.
    """

    kl = Distribution.kl  # `Normal`'s is for actions without clipping

    def __init__(
        self, space: gymnasium.Space[Any], *, noise_std: float = 0.1, noise_std_min: float | None = None
    ) -> None:
        super().__init__(space, std="state")
        self.num_features = self.num_noise
        least = noise_std if noise_std_min is None else noise_std_min
        if not 0.0 < least <= noise_std < math.inf:
            raise ValueError(
                "`noise_std` must be greater than 0, and `noise_std_min` too and no larger; "
                f"got {noise_std!r} and {noise_std_min!r}."
            )
        self.noise_std, self.noise_std_min = float(noise_std), float(least)
        self.by_copy = self.noise_std_min < self.noise_std

    def from_features(self, features: Tensor, mask: None = None) -> NormalParams:
        """Compute means in the box, and log standard deviations, from features `[..., num_features]`."""
        mean, shares = self.means(features), torch.full_like(self.action_half_range, self.noise_std)
        if self.by_copy:
            copies = mean.shape[0]  # a trace would fix `len`
            places = (torch.arange(copies, device=mean.device, dtype=mean.dtype) + 0.5) / copies
            spread = self.noise_std - self.noise_std_min
            shares = (self.noise_std_min + spread * places).view(-1, *(1,) * (mean.dim() - 1))
        return NormalParams(mean, (shares * self.action_half_range).log().expand_as(mean))

    def means(self, features: Tensor) -> Tensor:
        """Return the actions without noise, `[..., *action]`, in the box; gradients flow.

        Args:
            features: `[..., num_features]`.
        """
        return self._squashed(self._shaped(features))

    def _placed(self, drawn: Tensor) -> Tensor:
        return self.env_actions(drawn)

    def logp(self, params: NormalParams, actions: Tensor) -> Tensor:
        """Return log-densities (at bounds log-probabilities) of actions `[..., *action]`, summed over dimensions."""
        below, above = self._tails(params)
        each = torch.where(actions >= self.action_high, log_ndtr(-above), normal_logp(params, actions))
        each = torch.where(actions <= self.action_low, log_ndtr(below), each)
        return self._summed(each)

    def entropy(self, params: NormalParams) -> Tensor:
        """Return the entropy `[...]`: of the density between the bounds, and of the probabilities of the bounds.

        Z (log std + (1 + log 2 pi) / 2) + (a phi(a) - b phi(b)) / 2 - p log p - q log q,    Z = 1 - p - q

        a and b are the bounds in standard deviations from the mean, p and q the probabilities beyond them.
        """
        below, above = self._tails(params)
        inside = ndtr(above) - ndtr(below)
        # From logarithms: the gradient of `entr` is infinite where a probability is 0.
        ends = -sum(log_p.exp() * log_p for log_p in (log_ndtr(below), log_ndtr(-above)))
        each = inside * (params.log_std + _HALF_LOG_2PI_E) + 0.5 * (_moment(below) - _moment(above)) + ends
        return self._summed(each)

    def _tails(self, params: NormalParams) -> tuple[Tensor, Tensor]:
        """Return the bounds in standard deviations from the mean, `[..., *action]` each."""
        scale = (-params.log_std).exp()
        return (self.action_low - params.mean) * scale, (self.action_high - params.mean) * scale


def _moment(z: Tensor) -> Tensor:
    """Return z phi(z), phi the standard normal density; 0 in the limit."""
    return z * torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)

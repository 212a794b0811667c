"""One action for each observation, with noise around it that explores."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import torch
from torch import Tensor
from torch.special import log_ndtr, ndtr

from rl8x.distributions.base import Distribution
from rl8x.distributions.normal import NormalParams, Scaled, normal_logp

_HALF_LOG_2PI_E = 0.5 * math.log(2.0 * math.pi * math.e)


class NoisyDeterministic(Scaled):
    """Features through tanh, scaled to a bounded `Box`, plus normal noise, clipped to the box.

        mu = middle + half_range tanh(f),  a = clip(mu + half_range sigma noise, low, high)

    In each dimension the bounds have a probability, that of what is clipped to them, and between them there is a
    density. `logp` is the logarithm of the one at a bound, else of the other.

    Copies may have standard deviations of their own, evenly spread over a range: copy i of n has
    `min + (max - min) (i + 1/2) / n`. Then the first axis of features is that of the copies. Unlike standard deviations
    drawn at each reset, these need no state, and all of them are in use at any time.

    Args:
        space: The `Box` space, with finite bounds.
        noise_std: The standard deviation sigma, as a share of half the range of an action, > 0.
        noise_std_min: Where copies have standard deviations of their own, the smallest; `noise_std` is then the
            largest. Only TD3, whose losses need no log-probabilities, can train with it.

    Raises:
        TypeError: If the space is not a `Box` of floating-point numbers.
        ValueError: If a bound is infinite or equals the other, or a standard deviation is out of its range.

    Source: Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1; a range of standard deviations: Seo et al. 2025,
    arXiv:2505.22642, section 3.
    """

    kl = Distribution.kl  # `Normal`'s is that of actions that are not clipped

    def __init__(
        self, space: gymnasium.Space[Any], *, noise_std: float = 0.1, noise_std_min: float | None = None
    ) -> None:
        super().__init__(space, std="state")
        self.num_features = self.num_noise
        self._scale_to(self.action_low.double(), self.action_high.double())
        least = noise_std if noise_std_min is None else noise_std_min
        if not 0.0 < least <= noise_std < math.inf:
            raise ValueError(
                "`noise_std` must be greater than 0, and `noise_std_min` too and no larger; "
                f"got {noise_std!r} and {noise_std_min!r}."
            )
        self.noise_std, self.noise_std_min = float(noise_std), float(least)
        self.by_copy = self.noise_std_min < self.noise_std

    def from_features(self, features: Tensor, mask: None = None) -> NormalParams:
        """Make means in the box, and logarithms of standard deviations, from features `[..., num_features]`."""
        mean = self.means(features)
        std = self._stds(mean) * self.action_half_range
        return NormalParams(mean, std.log().expand_as(mean))

    def means(self, features: Tensor) -> Tensor:
        """Return the actions without noise; gradients flow.

        Args:
            features: `[..., num_features]`.

        Returns:
            `[..., *action]`, in the box.
        """
        return self._squashed(self._shaped(features))

    def sample(self, params: NormalParams, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions `[..., *action]` from standard normal numbers `[..., num_noise]`, with `logp`, `[...]`."""
        actions = self.env_actions(self._drawn(params, noise))
        return actions, self.logp(params, actions)

    def logp(self, params: NormalParams, actions: Tensor) -> Tensor:
        """Return log-densities, at bounds log-probabilities, of actions `[..., *action]`, summed over dimensions."""
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
        # By the logarithms: the gradient of `entr` is infinite where a probability has become 0.
        ends = -sum(log_p.exp() * log_p for log_p in (log_ndtr(below), log_ndtr(-above)))
        each = inside * (params.log_std + _HALF_LOG_2PI_E) + 0.5 * (_moment(below) - _moment(above)) + ends
        return self._summed(each)

    def _tails(self, params: NormalParams) -> tuple[Tensor, Tensor]:
        """Return the bounds in standard deviations from the mean, `[..., *action]` each."""
        scale = (-params.log_std).exp()
        return (self.action_low - params.mean) * scale, (self.action_high - params.mean) * scale

    def _stds(self, mean: Tensor) -> Tensor:
        """Return standard deviations as shares of half the range, to be broadcast with means `[..., *action]`."""
        low, high = self.noise_std_min, self.noise_std
        if low == high:
            return mean.new_full((), high)
        copies = mean.shape[0]  # `len` would fix it in a trace
        places = (torch.arange(copies, device=mean.device, dtype=mean.dtype) + 0.5) / copies
        return (low + (high - low) * places).view(-1, *(1,) * (mean.dim() - 1))


def _moment(z: Tensor) -> Tensor:
    """Return z phi(z), phi the standard normal density; 0 in the limit."""
    return z * torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)

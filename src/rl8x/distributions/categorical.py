"""One of n actions, sampled by inverting the cumulative distribution at one uniform number."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
from torch import Tensor

from rl8x.distributions.base import Distribution
from rl8x.nn.masking import masked_logits
from rl8x.nn.sampling import inverse_cdf
from rl8x.spaces import describe


class CategoricalParams(NamedTuple):
    """The log-probability of every action, `[..., num_actions]`."""

    log_probs: Tensor


class Categorical(Distribution):
    """A categorical distribution over a `Discrete` space; features are logits, actions int64 `[...]`.

    An action whose probability is 0 in float32, masked or not, is never sampled.

    Args:
        space: The `Discrete` space; actions count from its `start`.
    """

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__(space)
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise TypeError(f"Categorical needs a Discrete action space; got {describe(space)}.")
        self.num_features = int(space.n)
        self.num_noise = 1
        self.start = int(space.start)

    def from_features(self, features: Tensor, mask: Tensor | None = None) -> CategoricalParams:
        """Normalise logits `[..., num_actions]`, those of illegal actions replaced by the least number.

        Where a row of `mask` allows nothing, every action is as likely as any other.
        """
        return CategoricalParams(masked_logits(features, mask).log_softmax(-1))

    def sample(self, params: CategoricalParams, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions `[...]` from one uniform number each, `[..., 1]`."""
        index = inverse_cdf(params.log_probs, noise[..., 0])
        return self._to_actions(index), pick(params.log_probs, index)

    def mode(self, params: CategoricalParams) -> Tensor:
        """Return the most likely actions, the first of equals."""
        return self._to_actions(params.log_probs.argmax(-1))

    def logp(self, params: CategoricalParams, actions: Tensor) -> Tensor:
        """Return the log-probabilities of `actions`, `[...]`."""
        return pick(params.log_probs, actions - self.start if self.start else actions)

    def entropy(self, params: CategoricalParams) -> Tensor:
        """Return -sum p log p."""
        return categorical_entropy(params.log_probs)

    def kl(self, params: CategoricalParams, other: CategoricalParams) -> Tensor:
        """Return sum p (log p - log q); very large, not infinite, where `other` rules out what `params` allows."""
        return categorical_kl(params.log_probs, other.log_probs)

    def _to_actions(self, index: Tensor) -> Tensor:
        return index + self.start if self.start else index


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Return -sum p log p over the last dimension."""
    return -(log_probs.exp() * log_probs).sum(-1)


def categorical_kl(log_probs: Tensor, other: Tensor) -> Tensor:
    """Return sum p (log p - log q) over the last dimension."""
    return (log_probs.exp() * (log_probs - other)).sum(-1)


def pick(log_probs: Tensor, index: Tensor) -> Tensor:
    """Return the entries of the last dimension at `index`, `[...]`."""
    return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)

"""Independent yes-or-no actions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor
from torch.nn import functional

from rl8x.distributions.base import Distribution
from rl8x.distributions.categorical import LARGEST_UNIFORM
from rl8x.nn.masking import masked_logits
from rl8x.spaces import describe_space


class BernoulliParams(NamedTuple):
    """The log-odds of a 1, `[..., num_bits]`."""

    logits: Tensor


class Bernoulli(Distribution):
    """Independent Bernoulli distributions over a `MultiBinary` space; actions 0 and 1, int8 `[..., *space.shape]`.

    Args:
        space: The `MultiBinary` space.

    Raises:
        TypeError: If the space is of another kind.
    """

    default_for = (gymnasium.spaces.MultiBinary,)

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__(space)
        if not isinstance(space, gymnasium.spaces.MultiBinary):
            raise TypeError(f"Bernoulli needs a MultiBinary action space; got {describe_space(space)}.")
        self.action_shape = tuple(space.shape)
        self.num_features = self.num_noise = math.prod(self.action_shape)

    def from_features(self, features: Tensor, mask: Tensor | None = None) -> BernoulliParams:
        """Take features as log-odds; where `mask` is False, only 0 is legal. All are `[..., num_bits]`."""
        return BernoulliParams(features if mask is None else masked_logits(features, mask))

    def sample(self, params: BernoulliParams, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions `[..., *space.shape]` from uniform numbers `[..., num_bits]`, with log-probabilities `[...]`."""
        # Strictly below, and never 1: probabilities that float32 rounds to 0 or 1 are certain.
        ones = noise.clamp(max=LARGEST_UNIFORM) < params.logits.detach().float().sigmoid()
        return self._to_actions(ones), _logp(params.logits, ones)

    def mode(self, params: BernoulliParams) -> Tensor:
        """Return 1 where that is more likely than 0, `[..., *space.shape]`."""
        return self._to_actions(params.logits > 0)

    def logp(self, params: BernoulliParams, actions: Tensor) -> Tensor:
        """Return the log-probabilities of actions `[..., *space.shape]`, summed over the bits, `[...]`."""
        return _logp(params.logits, actions.reshape(params.logits.shape).bool())

    def entropy(self, params: BernoulliParams) -> Tensor:
        """Return the sum of the bits' entropies, `[...]`."""
        logits = params.logits
        ones = logits.sigmoid()
        return (ones * functional.softplus(-logits) + (1.0 - ones) * functional.softplus(logits)).sum(-1)

    def kl(self, params: BernoulliParams, other: BernoulliParams) -> Tensor:
        """Return the sum of the bits' divergences, `[...]`."""
        ones = params.logits.sigmoid()
        of_ones = functional.softplus(-other.logits) - functional.softplus(-params.logits)
        of_zeros = functional.softplus(other.logits) - functional.softplus(params.logits)
        return (ones * of_ones + (1.0 - ones) * of_zeros).sum(-1)

    def _to_actions(self, ones: Tensor) -> Tensor:
        return ones.reshape(*ones.shape[:-1], *self.action_shape).to(torch.int8)


def _logp(logits: Tensor, ones: Tensor) -> Tensor:
    return functional.logsigmoid(torch.where(ones, logits, -logits)).sum(-1)

"""Several choices at once, each among its own number of actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from torch import Tensor

from rl8x.distributions.base import Distribution
from rl8x.distributions.categorical import (
    CategoricalParams,
    categorical_entropy,
    categorical_kl,
    inverse_cdf,
    pick,
)
from rl8x.nn.masking import masked_logits
from rl8x.spaces import describe


class MultiCategorical(Distribution):
    """Independent categorical distributions over a `MultiDiscrete` space; actions int64 `[..., *space.shape]`.

    Features are the logits of the first choice, then those of the second, and so on. Inside, every choice has as many
    logits as the widest one, the missing ones illegal, so that all are one tensor `[..., num_choices, most_actions]`.

    Args:
        space: The `MultiDiscrete` space; actions count from its `start`.
    """

    default_for = (gymnasium.spaces.MultiDiscrete,)

    columns: Tensor
    exists: Tensor
    start: Tensor

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__(space)
        if not isinstance(space, gymnasium.spaces.MultiDiscrete):
            raise TypeError(f"MultiCategorical needs a MultiDiscrete action space; got {describe(space)}.")
        sizes = torch.as_tensor(space.nvec, dtype=torch.int64).flatten()
        self.action_shape = tuple(space.nvec.shape)
        self.num_features = int(sizes.sum())
        self.num_noise = len(sizes)
        choices = torch.arange(int(sizes.max()))
        exists = choices < sizes.unsqueeze(-1)
        first = (sizes.cumsum(0) - sizes).unsqueeze(-1)
        # A missing action reads the choice's first logit, whose value does not matter.
        columns = first + choices * exists
        self.padded = not bool(exists.all())
        self.register_buffer("columns", columns.flatten(), persistent=False)
        self.register_buffer("exists", exists, persistent=False)
        self.register_buffer("start", torch.as_tensor(space.start, dtype=torch.int64).flatten(), persistent=False)

    def from_features(self, features: Tensor, mask: Tensor | None = None) -> CategoricalParams:
        """Normalise the logits of each choice.

        Args:
            features: Logits, `[..., num_features]`.
            mask: True where an action is legal, laid out like the logits, `[..., num_features]`, bool.
        """
        legal = None if mask is None else self._by_choice(mask)
        if self.padded:
            legal = self.exists if legal is None else legal & self.exists
        logits = self._by_choice(features)
        return CategoricalParams((logits if legal is None else masked_logits(logits, legal)).log_softmax(-1))

    def sample(self, params: CategoricalParams, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions `[..., *space.shape]` from uniform numbers `[..., num_choices]`; score them, `[...]`."""
        index = inverse_cdf(params.log_probs, noise)
        return self._to_actions(index), pick(params.log_probs, index).sum(-1)

    def mode(self, params: CategoricalParams) -> Tensor:
        """Return the most likely actions of each choice, `[..., *space.shape]`."""
        return self._to_actions(params.log_probs.argmax(-1))

    def logp(self, params: CategoricalParams, actions: Tensor) -> Tensor:
        """Return the log-probabilities of actions `[..., *space.shape]`, summed over the choices, `[...]`."""
        index = actions.reshape(*params.log_probs.shape[:-1]) - self.start
        return pick(params.log_probs, index).sum(-1)

    def entropy(self, params: CategoricalParams) -> Tensor:
        """Return the sum of the choices' entropies, `[...]`."""
        return categorical_entropy(params.log_probs).sum(-1)

    def kl(self, params: CategoricalParams, other: CategoricalParams) -> Tensor:
        """Return the sum of the choices' divergences, `[...]`."""
        return categorical_kl(params.log_probs, other.log_probs).sum(-1)

    def _by_choice(self, features: Tensor) -> Tensor:
        columns = features[..., self.columns] if self.padded else features
        return columns.reshape(*features.shape[:-1], *self.exists.shape)

    def _to_actions(self, index: Tensor) -> Tensor:
        return (index + self.start).reshape(*index.shape[:-1], *self.action_shape)

"""The action of the highest value most of the time, and any legal action otherwise."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor

from rl8x.distributions.categorical import Categorical
from rl8x.nn.masking import masked_logits
from rl8x.spaces import describe_space


class EpsilonGreedyParams(NamedTuple):
    """The log-probability of every action, `[..., num_actions]`, and the greedy ones, counted from 0, int64 `[...]`."""

    log_probs: Tensor
    greedy: Tensor


class EpsilonGreedy(Categorical):
    """With probability epsilon a legal action at random, else the greedy one; features are values of actions.

        p(a) = epsilon / n + (1 - epsilon) [a = argmax_b Q(b)],    a and b among the n legal actions

    Of actions with the same value the first is greedy. Where a mask allows nothing, everything is legal. Features get
    no gradient: neither the greedy action nor a probability changes with a value that changes a little.

    Args:
        space: The `Discrete` space; actions count from its `start`.
        epsilon: Share of random actions at first, in [0, 1].

    Attributes:
        epsilon: The share now, 0-d float32. Programs read it, so that it is changed in place (`set_epsilon`).

    Source: Watkins 1989, "Learning from delayed rewards"; Mnih et al. 2015, "Human-level control through deep
    reinforcement learning", algorithm 1.

    Raises:
        TypeError: If the space is of another kind.
        ValueError: If `epsilon` is not in [0, 1].
    """

    default_for = ()  # type: ignore[assignment] # Categorical is the default

    epsilon: Tensor

    def __init__(self, space: gymnasium.Space[Any], *, epsilon: float = 0.0) -> None:
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise TypeError(f"EpsilonGreedy needs a Discrete action space; got {describe_space(space)}.")
        super().__init__(space)
        self.register_buffer("epsilon", torch.zeros((), dtype=torch.float32))
        self.set_epsilon(epsilon)

    def set_epsilon(self, epsilon: float) -> None:
        """Change the share of random actions in place.

        Args:
            epsilon: The new share, in [0, 1].

        Raises:
            ValueError: If it is not in [0, 1]; the share stays as it is.
        """
        if not 0.0 <= epsilon <= 1.0:
            raise ValueError(f"`epsilon` must be at least 0 and at most 1; got {epsilon!r}.")
        self.epsilon.fill_(epsilon)

    def from_features(self, features: Tensor, mask: Tensor | None = None) -> EpsilonGreedyParams:  # type: ignore[override]
        """Make the mixture from the values of actions, `[..., num_actions]`.

        Args:
            features: Values, up to a number that is the same for all actions of a row.
            mask: True where an action is legal, of the same shape, bool; None: all are.
        """
        # Finite, so that illegal ones are smaller even where a value is -inf.
        features = features.detach().clamp(min=torch.finfo(features.dtype).min)
        legal = torch.ones_like(features, dtype=torch.bool) if mask is None else mask | ~mask.any(-1, keepdim=True)
        greedy = torch.where(legal, features, -torch.inf).argmax(-1)
        epsilon = self.epsilon.to(features.dtype)
        explored = legal * (epsilon / legal.sum(-1, keepdim=True))
        is_greedy = torch.arange(features.shape[-1], device=features.device) == greedy.unsqueeze(-1)
        probs = explored + (1.0 - epsilon) * is_greedy
        # Finite where the probability is 0: 0 * -inf in the entropy would be NaN.
        return EpsilonGreedyParams(masked_logits(probs.log(), probs > 0), greedy)

    def mode(self, params: EpsilonGreedyParams) -> Tensor:  # type: ignore[override]
        """Return the greedy actions, int64 `[...]`, whatever epsilon is."""
        return self._to_actions(params.greedy)

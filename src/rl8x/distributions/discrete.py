"""Distributions over discrete actions."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Final, NamedTuple

import gymnasium
import torch
from torch import Tensor
from torch.nn import functional

from rl8x.distributions.base import Distribution
from rl8x.models.layers import masked_logits
from rl8x.spaces import describe_space

LARGEST_UNIFORM: Final = 1.0 - 2.0**-24
_UNROLLED_CHOICES: Final = 16


class CategoricalParams(NamedTuple):
    """The log-probability of every action of each choice, `[..., num_actions]` or `[..., num_choices, num_actions]`."""

    log_probs: Tensor


class Choices(Distribution):
    """The common base of one choice among numbered actions and of several independent choices; actions are int64."""

    def sample(self, params: CategoricalParams, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions `[..., *action]` with one uniform number per choice, `[..., num_noise]`; score them, `[...]`."""
        index = inverse_cdf(params.log_probs, noise.reshape(params.log_probs.shape[:-1]))
        return self._to_actions(index), self._summed(pick(params.log_probs, index))

    def mode(self, params: CategoricalParams) -> Tensor:
        """Return the most likely actions `[..., *action]`; among equally likely ones, the first."""
        return self._to_actions(params.log_probs.argmax(-1))

    def logp(self, params: CategoricalParams, actions: Tensor) -> Tensor:
        """Return the log-probabilities `[...]` of actions `[..., *action]`."""
        index = self._to_index(actions.reshape(params.log_probs.shape[:-1]))
        return self._summed(pick(params.log_probs, index))

    def entropy(self, params: CategoricalParams) -> Tensor:
        """Return -sum p log p, `[...]`."""
        return self._summed(-(params.log_probs.exp() * params.log_probs).sum(-1))

    def kl(self, params: CategoricalParams, other: CategoricalParams) -> Tensor:
        """Return sum p (log p - log q), `[...]`; large, not infinite, where `other` rules out what `params` allows."""
        return self._summed((params.log_probs.exp() * (params.log_probs - other.log_probs)).sum(-1))

    @abstractmethod
    def _to_actions(self, index: Tensor) -> Tensor:
        """Return the actions `[..., *action]` with these indices of choices, which count from 0."""

    @abstractmethod
    def _to_index(self, actions: Tensor) -> Tensor:
        """Invert `_to_actions`: return the indices of choices, from 0, of actions."""

    def _summed(self, each: Tensor) -> Tensor:
        """Sum over the choices, `[...]`."""
        return each


class Categorical(Choices):
    """A categorical distribution over a `Discrete` space; features are logits, actions int64 `[...]`.

    An action whose probability is 0 in float32, masked or not, is never sampled.

    Args:
        space: The `Discrete` space; actions count from its `start`.
    """

    default_for = (gymnasium.spaces.Discrete,)

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__(space)
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise TypeError(f"{type(self).__name__} needs a Discrete action space; got {describe_space(space)}.")
        self.num_features = int(space.n)
        self.num_noise = 1
        self.start = int(space.start)

    def from_features(self, features: Tensor, mask: Tensor | None = None) -> CategoricalParams:
        """Normalise logits `[..., num_actions]`; actions where `mask`, of the same shape, is False have probability 0.

        If a row of `mask` allows nothing, all actions are equally likely.
        """
        logits = features if mask is None else masked_logits(features, mask)
        return CategoricalParams(logits.log_softmax(-1))

    def _to_actions(self, index: Tensor) -> Tensor:
        return index + self.start if self.start else index

    def _to_index(self, actions: Tensor) -> Tensor:
        return actions - self.start if self.start else actions


class MultiCategorical(Choices):
    """Independent categorical distributions over a `MultiDiscrete` space; actions int64 `[..., *space.shape]`.

    Features are the logits of the first choice, then those of the second, and so on. Internally every choice is padded
    with illegal actions to the widest one, so that all logits are one tensor `[..., num_choices, most_actions]`.

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
            raise TypeError(f"MultiCategorical needs a MultiDiscrete action space; got {describe_space(space)}.")
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
            mask: True where an action is legal, laid out like the logits, `[..., num_features]`, bool. If it allows no
                action of a choice, all of its actions are equally likely.
        """
        logits = self._by_choice(features)
        legal = None if mask is None else self._by_choice(mask)
        if self.padded and legal is not None:
            # If a choice allows nothing, only its padding stays illegal.
            nothing = ~legal.any(-1, keepdim=True)
            logits, legal = logits.masked_fill(nothing, 0.0), (legal | nothing) & self.exists
        elif self.padded:
            legal = self.exists
        return CategoricalParams((logits if legal is None else masked_logits(logits, legal)).log_softmax(-1))

    def _by_choice(self, features: Tensor) -> Tensor:
        columns = features[..., self.columns] if self.padded else features
        return columns.reshape(*features.shape[:-1], *self.exists.shape)

    def _to_actions(self, index: Tensor) -> Tensor:
        return (index + self.start).reshape(*index.shape[:-1], *self.action_shape)

    def _to_index(self, actions: Tensor) -> Tensor:
        return actions - self.start

    def _summed(self, each: Tensor) -> Tensor:
        return each.sum(-1)


def pick(log_probs: Tensor, index: Tensor) -> Tensor:
    """Return the entries of the last dimension of `[..., num_actions]` at `index` `[...]`, `[...]`."""
    return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def inverse_cdf(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return for each row the first choice whose cumulative probability exceeds the uniform number."""
    # The threshold is `uniform * total`, with the total as summed here: despite rounding the index is in range.
    probs = log_probs.detach().float().exp()
    uniform = uniform.clamp(max=LARGEST_UNIFORM)
    if probs.shape[-1] > _UNROLLED_CHOICES:
        # On a GPU `cumsum` adds as a tree: neighbours may differ by a rounding error where the probability is 0, which
        # is therefore tested, and the last sum need not be the largest.
        partial_sums = probs.cumsum(-1).where(probs > 0, 0.0)
        thresholds = (uniform * partial_sums.amax(-1)).unsqueeze(-1)
        return (partial_sums > thresholds).to(torch.uint8).argmax(-1)
    # Summed one by one, a choice of probability 0 does not change the sum, so it is never the first above a threshold.
    columns = probs.unbind(-1)
    sums = [columns[0]]
    for column in columns[1:]:
        sums.append(sums[-1] + column)
    threshold = uniform * sums[-1]
    index = torch.zeros_like(uniform, dtype=torch.int64)
    for partial in sums[:-1]:
        index += partial <= threshold
    return index


class BernoulliParams(NamedTuple):
    """The log-odds of a 1, `[..., num_bits]`."""

    logits: Tensor


class Bernoulli(Distribution):
    """Independent Bernoulli distributions over a `MultiBinary` space; actions 0 and 1, int8 `[..., *space.shape]`.

    Args:
        space: The `MultiBinary` space.
    """

    default_for = (gymnasium.spaces.MultiBinary,)

    def __init__(self, space: gymnasium.Space[Any]) -> None:
        super().__init__(space)
        if not isinstance(space, gymnasium.spaces.MultiBinary):
            raise TypeError(f"Bernoulli needs a MultiBinary action space; got {describe_space(space)}.")
        self.action_shape = tuple(space.shape)
        self.num_features = self.num_noise = math.prod(self.action_shape)

    def from_features(self, features: Tensor, mask: Tensor | None = None) -> BernoulliParams:
        """Use features as log-odds; where `mask` is False, only 0 is legal. All are `[..., num_bits]`."""
        return BernoulliParams(features if mask is None else masked_logits(features, mask))

    def sample(self, params: BernoulliParams, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions `[..., *space.shape]` from uniform numbers `[..., num_bits]`, with log-probabilities `[...]`."""
        # Noise is never 1 and must be strictly below, so that probabilities that round to 0 or 1 are certain.
        ones = noise.clamp(max=LARGEST_UNIFORM) < params.logits.detach().float().sigmoid()
        return self._to_actions(ones), _logp(params.logits, ones)

    def mode(self, params: BernoulliParams) -> Tensor:
        """Return 1 where 1 is more likely than 0, `[..., *space.shape]`."""
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


class EpsilonGreedyParams(NamedTuple):
    """The log-probability of every action, `[..., num_actions]`, and the greedy ones, counted from 0, int64 `[...]`."""

    log_probs: Tensor
    greedy: Tensor


class EpsilonGreedy(Categorical):
    """A random legal action with probability epsilon, else the greedy one; features are values of actions.

        p(a) = epsilon / n + (1 - epsilon) [a = argmax_b Q(b)],    a and b among the n legal actions

    Of actions with the same value the first is greedy. If a mask allows nothing, all actions are legal. Features get
    no gradient: small changes of values change neither the greedy action nor a probability.

    Args:
        space: The `Discrete` space; actions count from its `start`.
        epsilon: Initial share of random actions, in [0, 1].

    Attributes:
        epsilon: The current share, 0-d float32. Programs read it, so change it in place (`set_epsilon`).

    Source: Watkins 1989, "Learning from delayed rewards"; Mnih et al. 2015, "Human-level control through deep
    reinforcement learning", algorithm 1.
    """

    default_for = ()  # type: ignore[assignment] # Categorical is the default

    epsilon: Tensor

    def __init__(self, space: gymnasium.Space[Any], *, epsilon: float = 0.0) -> None:
        super().__init__(space)
        self.register_buffer("epsilon", torch.zeros((), dtype=torch.float32))
        self.set_epsilon(epsilon)

    def set_epsilon(self, epsilon: float) -> None:
        """Change the share of random actions in place.

        Args:
            epsilon: The new share, in [0, 1]; any other raises a `ValueError`, and the share stays unchanged.
        """
        if not 0.0 <= epsilon <= 1.0:
            raise ValueError(f"`epsilon` must be at least 0 and at most 1; got {epsilon!r}.")
        self.epsilon.fill_(epsilon)

    def from_features(self, features: Tensor, mask: Tensor | None = None) -> EpsilonGreedyParams:  # type: ignore[override]
        """Compute the action probabilities from the values of actions, `[..., num_actions]`.

        Args:
            features: Values, up to a constant that is the same for all actions of a row.
            mask: True where an action is legal, of the same shape, bool; None: all are.
        """
        # Finite, so that illegal actions are smaller even if a value is -inf.
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

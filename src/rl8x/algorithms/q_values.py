"""Values of actions from a policy's model, for the algorithms that learn those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch
from torch import Tensor

from rl8x.distributions import EpsilonGreedy
from rl8x.models import Model
from rl8x.models.registry import BUILTIN
from rl8x.nn.masking import masked_mean
from rl8x.policy import Policy, State
from rl8x.spaces import describe
from rl8x.trees import Tree, tree_map


def q_values(features: Tensor, values: Tensor, mask: Tensor | None = None, *, dueling: bool = False) -> Tensor:
    """Make the values of actions from what a model gives.

        Q(s, a) = A(s, a),                                       a legal
        Q(s, a) = V(s) + A(s, a) - mean of A(s, b) over legal b  with `dueling`
        Q(s, a) = -inf                                           a illegal

    so that maxima are over the legal actions alone. Where a mask allows nothing, everything is legal, as
    `EpsilonGreedy` has it. No gradient reaches illegal actions.

    Args:
        features: A(s, a), `[..., num_actions]`.
        values: V(s), `[...]`; read with `dueling` alone.
        mask: True where an action is legal, `[..., num_actions]`, bool; None: all are.
        dueling: Whether the model's value is the state's, and its features are what each action adds to it.

    Source: Wang et al. 2016, arXiv:1511.06581, eq. 9.
    """
    legal = None if mask is None else mask | ~mask.any(-1, keepdim=True)
    if dueling:
        mean = features.mean(-1) if legal is None else masked_mean(features, legal, -1)
        features = features + (values - mean).unsqueeze(-1)
    return features if legal is None else torch.where(legal, features, -torch.inf)


class QPolicy(Policy):
    """A policy that acts by values of actions, and whose value of an observation is that of the best legal action.

    As a module it maps observations to values of actions: this is what is trained, under its own weights or, by
    `torch.func.functional_call`, under those of an update or a target.

    Args:
        observation_space: Space of one copy's observation.
        action_space: Space of one copy's action, a `Discrete`.
        model: As `Policy` has it; its features are Q(s, a), or A(s, a) with `dueling`.
        model_config: Keyword arguments of the model's class. In built-in models features and value share their layers,
            unless this says otherwise: a critic apart would be computed for nothing, or be no dueling network.
        dueling: See `q_values`.
        normalize_observations: As `Policy` has it.
    """

    distribution: EpsilonGreedy

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        model: str | type[Model] | Model | None = None,
        model_config: Mapping[str, Any] | None = None,
        dueling: bool = False,
        normalize_observations: bool = False,
    ) -> None:
        built_in = model is None or (isinstance(model, str) and model in BUILTIN)
        super().__init__(
            observation_space,
            action_space,
            model=model,
            model_config={**({"shared": True} if built_in else {}), **(model_config or {})},
            distribution=EpsilonGreedy,
            normalize_observations=normalize_observations,
        )
        self.dueling = dueling

    def forward(self, obs: Tree, state: State, starts: Tensor) -> Tensor:  # type: ignore[override]
        """Return the values of actions, `[seq_len, batch, num_actions]`, -inf where they are illegal.

        Args:
            obs: Observations, `[seq_len, batch, *obs]` or a dict of such.
            state: The policy's state before each sequence, each `[batch, *]`; empty when feedforward.
            starts: Where an observation begins an episode, `[seq_len, batch]`, bool.
        """
        features, values, mask = self.predict(obs, state, starts)
        return q_values(features, values, mask, dueling=self.dueling)

    def values(self, obs: Tree, state: State, starts: Tensor) -> Tensor:
        """Return max_a Q(s, a) over legal actions, `[num_envs]`; arguments are those of `Policy.values`."""
        q = self(tree_map(lambda part: part.unsqueeze(0), obs), state, starts.unsqueeze(0))
        best: Tensor = q[0].amax(-1)
        return best

    def _estimates(self, features: Tensor, values: Tensor, mask: Any) -> Tensor:
        return q_values(features, values, mask, dueling=self.dueling).amax(-1)

    def indices(self, actions: Tensor) -> Tensor:
        """Return the numbers, from 0, of actions of the space, int64 `[...]`, which may count from another."""
        return actions - self.distribution.start if self.distribution.start else actions


def check_discrete(name: str, space: gymnasium.Space[Any], others: str) -> None:
    """Refuse action spaces that are not `Discrete`.

    Args:
        name: The algorithm.
        space: Space of one copy's action.
        others: The algorithms that fit, as in "PPO or SAC".

    Raises:
        ValueError: If it is another.
    """
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ValueError(f"{name} needs a Discrete action space; got {describe(space)}. Use {others}.")

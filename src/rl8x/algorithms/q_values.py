"""Values of actions from a policy's model, for the algorithms that learn those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from rl8x.models import Model
from rl8x.models.registry import BUILTIN
from rl8x.nn.masking import masked_mean
from rl8x.policy import Policy, State
from rl8x.spaces import describe
from rl8x.trees import Tree


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


class QNetwork(nn.Module):
    """A policy's model as a function from observations to values of actions: what is trained, and called under targets.

    Inside an update it is called under given weights by `torch.func.functional_call`; its weights have the names of
    the policy's, after `policy.`.

    Args:
        policy: Its model's features are Q(s, a), or A(s, a) with `dueling`.
        dueling: See `q_values`.
    """

    def __init__(self, policy: Policy, *, dueling: bool = False) -> None:
        super().__init__()
        self.policy = policy
        self.dueling = dueling

    def forward(self, obs: Tree, state: State, starts: Tensor) -> Tensor:
        """Return the values of actions, `[seq_len, batch, num_actions]`, -inf where they are illegal.

        Args:
            obs: Observations, `[seq_len, batch, *obs]` or a dict of such.
            state: The policy's state before each sequence, each `[batch, *]`; empty when feedforward.
            starts: Where an observation begins an episode, `[seq_len, batch]`, bool.
        """
        features, values, mask = self.policy.predict(obs, state, starts)
        return q_values(features, values, mask, dueling=self.dueling)

    def pick(self, q: Tensor, actions: Tensor) -> Tensor:
        """Return the values `[...]` that `q` `[..., num_actions]` has of actions of the space, int64 `[...]`."""
        return q.gather(-1, self.indices(actions).unsqueeze(-1)).squeeze(-1)

    def indices(self, actions: Tensor) -> Tensor:
        """Return the numbers, from 0, of actions of the space `[...]`, which may count from another."""
        start = int(getattr(self.policy.action_space, "start", 0))
        return actions - start if start else actions


def q_model_config(model: str | type[Model] | Model | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model of Q-values: in built-in ones features and value have the same layers.

    A critic apart, as the built-in models have by default, would be computed for nothing, or be no dueling network.
    """
    built_in = model is None or (isinstance(model, str) and model in BUILTIN)
    return {"shared": True, **config} if built_in else dict(config)


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

"""The feedforward model for vectors of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
from torch import Tensor

from rl8x.models.base import ActorCritic, State
from rl8x.models.observations import FlatObservations, actor_space
from rl8x.nn.mlp import MLP, check_sizes


class MLPModel(ActorCritic):
    """Perceptrons for actor and critic, apart from each other unless `shared`.

    Weights are orthogonal, with gain sqrt(2) in hidden layers; biases are 0.

    Args:
        observation_space: Space of one copy's observation.
        num_features: Width of the features that the action distribution needs.
        hidden_sizes: Widths of the hidden layers; none makes the model linear.
        options: The others are those of `ActorCritic`.

    Source: Andrychowicz et al. 2021, arXiv:2006.05990, on initial weights.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        num_features: int,
        *,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "relu",
        shared: bool = False,
        critic_obs: Sequence[str] = (),
        policy_gain: float = 0.01,
        value_gain: float = 1.0,
    ) -> None:
        super().__init__(observation_space, num_features)
        check_sizes("hidden_sizes", hidden_sizes)
        self.flat = FlatObservations(observation_space)
        # The actor's own where it sees less than the critic; None lays the observation out once for both.
        self.actor_flat = FlatObservations(actor_space(observation_space, critic_obs, shared)) if critic_obs else None
        sizes, critic_sizes = [(self.actor_flat or self.flat).width, *hidden_sizes], [self.flat.width, *hidden_sizes]
        self.actor = MLP(sizes, activation=activation, activate_last=True)
        self.critic = None if shared else MLP(critic_sizes, activation=activation, activate_last=True)
        self.add_heads(sizes[-1], critic_sizes[-1], policy_gain, value_gain)

    def trunk_inputs(self, obs: Any, state: State, starts: Tensor) -> tuple[tuple[Tensor], tuple[Tensor], State]:
        """Lay observations `[T, B, *obs]` out flat, `[T, B, width]`; no state."""
        flat = self.flat(obs)
        return (flat if self.actor_flat is None else self.actor_flat(obs),), (flat,), state

"""The feedforward model for vectors of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
from torch import Tensor

from rl8x.models.base import Model, State
from rl8x.models.observations import FlatObservations, actor_space
from rl8x.nn.mlp import HIDDEN_GAIN, MLP, check_sizes, linear


class MLPModel(Model):
    """Perceptrons for actor and critic, apart from each other unless `shared`.

    Weights are orthogonal, with gain sqrt(2) in hidden layers, 0.01 for the features, so that a policy begins near
    uniform, and 1 for values; biases are 0.

    Args:
        observation_space: Space of one copy's observation.
        num_features: Width of the features that the action distribution needs.
        hidden_sizes: Widths of the hidden layers; none makes the model linear.
        activation: Name of the activation after each hidden layer.
        shared: Whether actor and critic have the same hidden layers.
        critic_obs: Parts of a `Dict` observation that only the critic sees.
        policy_gain: Gain of the layer that gives features.
        value_gain: Gain of the layer that gives values.

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
        self.actor = MLP(sizes, activation=activation, activate_last=True, gain=HIDDEN_GAIN)
        self.critic = None if shared else MLP(critic_sizes, activation=activation, activate_last=True, gain=HIDDEN_GAIN)
        self.policy_head = linear(sizes[-1], num_features, policy_gain)
        self.value_head = linear(critic_sizes[-1], 1, value_gain)

    def forward(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, Tensor, State]:
        """Return features `[T, B, num_features]` and values `[T, B]` of observations `[T, B, *obs]`; no state."""
        flat = obs.float() if self.flat.is_vector else self.flat(obs)
        hidden = self.actor(flat if self.actor_flat is None else self.actor_flat(obs))
        critic_hidden = hidden if self.critic is None else self.critic(flat)
        return self.policy_head(hidden), self.value_head(critic_hidden).squeeze(-1), state

    def values(self, obs: Any, state: State, starts: Tensor) -> Tensor:
        """Return the values alone, `[T, B]`, of observations `[T, B, *obs]`."""
        flat = obs.float() if self.flat.is_vector else self.flat(obs)
        critic = self.actor if self.critic is None else self.critic
        values: Tensor = self.value_head(critic(flat)).squeeze(-1)
        return values

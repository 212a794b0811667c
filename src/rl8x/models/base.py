"""What a policy needs of a model."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import gymnasium
from torch import Tensor, nn

from rl8x.nn.mlp import Head, linear

State = dict[str, Tensor]


class Model(nn.Module):
    """A network from observations to the features of an action distribution and to values.

    A model of your own is a subclass with `__init__(self, observation_space, num_features, **model_config)` that calls
    this one's, and `forward`. With `precision="bf16"` its products are bfloat16, but for layers of kind `rl8x.nn.Head`.

    Args:
        observation_space: Space of one copy's observation.
        num_features: Width of the features that the action distribution needs.
    """

    recurrent: ClassVar[bool] = False
    """Whether the model carries a state from step to step."""

    def __init__(self, observation_space: gymnasium.Space[Any], num_features: int) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.num_features = num_features

    def initial_state(self, num_envs: int) -> State:
        """Return the state before anything was seen, each `[num_envs, *]`; empty when feedforward."""
        return {}

    @abstractmethod
    def forward(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, Tensor, State]:
        """Read sequences of observations.

        Args:
            obs: Observations, `[T, B, *obs]`, or a dict of such tensors.
            state: The state before the first of them, each `[B, *]`.
            starts: Where an observation begins an episode, `[T, B]`, bool. A recurrent model resets its
                state there, before it reads the observation.

        Returns:
            Features `[T, B, num_features]`, values `[T, B]`, and the state after the last observation, each `[B, *]`.
        """

    def values(self, obs: Any, state: State, starts: Tensor) -> Tensor:
        """Return the values alone, `[T, B]`, for the arguments of `forward`; a subclass may skip the actor's work."""
        values: Tensor = self(obs, state, starts)[1]
        return values


class ActorCritic(Model):
    """An actor and a critic under linear heads that give features and values, in float32 whatever the precision.

    The built-in models share these arguments, beside those of `Model`.

    Args:
        activation: Name of the activation after each layer.
        shared: Whether actor and critic have the same layers but the heads.
        critic_obs: Parts of a `Dict` observation that only the critic sees.
        policy_gain: Gain of the head of features, small so that a policy begins near uniform.
        value_gain: Gain of the head of values.
    """

    actor: nn.Module
    critic: nn.Module | None

    def add_heads(self, width: int, critic_width: int, policy_gain: float, value_gain: float) -> None:
        """Make the heads, for outputs of actor and critic of these widths."""
        self.policy_head = linear(width, self.num_features, policy_gain, kind=Head)
        self.value_head = linear(critic_width, 1, value_gain, kind=Head)

    def forward(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, Tensor, State]:
        """Return features `[T, B, num_features]`, values `[T, B]` and the state after observations `[T, B, *obs]`."""
        hidden, critic_hidden, state = self.hidden(obs, state, starts)
        return self.policy_head(hidden), self.value_head(critic_hidden).squeeze(-1), state

    def values(self, obs: Any, state: State, starts: Tensor) -> Tensor:
        """Return the values alone, `[T, B]`, of observations `[T, B, *obs]`."""
        values: Tensor = self.value_head(self.hidden(obs, state, starts, values_only=True)[1]).squeeze(-1)
        return values

    def hidden(
        self, obs: Any, state: State, starts: Tensor, *, values_only: bool = False
    ) -> tuple[Tensor, Tensor, State]:
        """Return what the heads read, `[T, B, width]` each, and the state; with `values_only` the second alone counts.

        Arguments are those of `forward`.
        """
        seen, critic_seen, state = self.trunk_inputs(obs, state, starts)
        if self.critic is None:
            hidden = self.actor(*seen)
            return hidden, hidden, state
        critic_hidden = self.critic(*critic_seen)
        return critic_hidden if values_only else self.actor(*seen), critic_hidden, state

    def trunk_inputs(self, obs: Any, state: State, starts: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...], State]:
        """Return the arguments of actor and critic, for those of `forward`, and the state after them."""
        return (obs,), (obs,), state

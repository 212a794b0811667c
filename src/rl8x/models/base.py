"""The interface of models: networks from observations to features and values."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import gymnasium
from torch import Tensor, nn

from rl8x.nn.mlp import check_widths

State = dict[str, Tensor]


class Model(nn.Module):
    """A network from observations to the features of an action distribution and to values.

    A model of your own is a subclass with `__init__(self, observation_space, num_features, **model_config)` that calls
    this one's, and `forward`. `build` runs it on an observation of the space, and says what of its results does not
    fit. It acts in evaluation mode, and is in training mode for the losses that train it. With `precision="bf16"` its
    matmuls are bfloat16, but for layers of kind `Head`.

    Args:
        observation_space: Space of one copy's observation.
        num_features: Width of the features that the action distribution needs.

    Raises:
        ValueError: If `num_features` is not a whole number of at least 1.
    """

    recurrent: ClassVar[bool] = False
    """Whether the model carries a state from step to step."""

    def __init__(self, observation_space: gymnasium.Space[Any], num_features: int) -> None:
        super().__init__()
        check_widths(num_features=num_features)
        self.observation_space = observation_space
        self.num_features = num_features

    def initial_state(self, num_envs: int) -> State:
        """Return the state before anything was seen; none when feedforward.

        Args:
            num_envs: Copies of the environment.

        Returns:
            Tensors by name, each `[num_envs, *]`.
        """
        return {}

    def actor_state(self, state: State) -> State:
        """Return the part of a state that `policy_features` needs for actions alone, without the critic's.

        Args:
            state: A whole state, each `[B, *]`.

        Returns:
            Some of these tensors.
        """
        return state

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
        """Return the values alone; a subclass may skip the actor's work.

        Args:
            obs: Observations, `[T, B, *obs]`, or a dict of such tensors.
            state: The state before the first of them, each `[B, *]`.
            starts: Where an observation begins an episode, `[T, B]`, bool.

        Returns:
            Values, `[T, B]`.
        """
        values: Tensor = self(obs, state, starts)[1]
        return values

    def policy_features(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Return features and state without values, as `forward` does; a subclass may skip the critic's work.

        Args:
            obs: Observations, `[T, B, *obs]`, or a dict of such tensors.
            state: The state before the first of them, each `[B, *]`, whole or as `actor_state` returns it.
            starts: Where an observation begins an episode, `[T, B]`, bool.

        Returns:
            Features `[T, B, num_features]`, and the state after the last observation, each `[B, *]`.
        """
        features, _, state = self(obs, state, starts)
        return features, state

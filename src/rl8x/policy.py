"""A policy: the model, the action distribution and the observation normaliser, as one thing to run and to save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

from rl8x.distributions import Distribution, make_distribution
from rl8x.models import Model, make_model
from rl8x.normalization import RunningMoments

State = dict[str, Tensor]


class Act(NamedTuple):
    """What acting on one observation a copy gives.

    Attributes:
        actions: Sampled or most likely actions, `[num_envs, *action]`, before any clipping.
        logp: Their log-probabilities, `[num_envs]`; zeros when acting deterministically.
        values: Estimated values of the observations, `[num_envs]`.
        state: The model's state after the observation, each `[num_envs, *]`.
    """

    actions: Tensor
    logp: Tensor
    values: Tensor
    state: State


class Evaluation(NamedTuple):
    """What the present weights say of stored actions, each `[seq_len, batch]`."""

    logp: Tensor
    values: Tensor
    entropy: Tensor


class Policy(nn.Module):
    """Map observations to actions and values.

    Args:
        observation_space: Space of one copy's observation.
        action_space: Space of one copy's action.
        model: Built-in name, `Model` subclass or instance; None is `"mlp"`.
        model_config: Keyword arguments of the model's class.
        distribution: Built-in name or `Distribution` subclass; None picks by the action space.
        distribution_config: Keyword arguments of the distribution's class.
        normalize_observations: Whether observations are shifted and scaled by running moments before the model sees them.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        model: str | type[Model] | Model | None = None,
        model_config: Mapping[str, Any] | None = None,
        distribution: str | type[Distribution] | None = None,
        distribution_config: Mapping[str, Any] | None = None,
        normalize_observations: bool = False,
    ) -> None:
        super().__init__()
        self.observation_space = observation_space
        self.action_space = action_space
        self.distribution = make_distribution(distribution, action_space, distribution_config)
        self.model = make_model(model or "mlp", observation_space, self.distribution.num_features, model_config)
        self.obs_moments = RunningMoments(observation_space.shape or ()) if normalize_observations else None
        bounded = isinstance(action_space, gymnasium.spaces.Box) and bool(
            action_space.is_bounded("below") or action_space.is_bounded("above")
        )
        self.clips = bounded
        if isinstance(action_space, gymnasium.spaces.Box):
            self.register_buffer("action_low", torch.as_tensor(action_space.low, dtype=torch.float32), persistent=False)
            self.register_buffer(
                "action_high", torch.as_tensor(action_space.high, dtype=torch.float32), persistent=False
            )

    @property
    def recurrent(self) -> bool:
        """Whether the model carries a state from step to step."""
        return self.model.recurrent

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def initial_state(self, num_envs: int) -> State:
        """Return the state that a model has before it has seen anything, each `[num_envs, *]`; empty when feedforward."""
        return self.model.initial_state(num_envs)

    def noise(self, horizon: int, num_envs: int, generator: torch.Generator) -> Tensor:
        """Draw what sampling a whole horizon of actions needs, `[horizon, num_envs, num_noise]`."""
        return self.distribution.noise((horizon, num_envs), generator, self.device)

    def act(self, obs: Tensor, state: State, starts: Tensor, noise: Tensor | None = None) -> Act:
        """Choose an action for each copy.

        Args:
            obs: Observations, `[num_envs, *obs]`.
            state: The model's state before them, each `[num_envs, *]`.
            starts: Where an observation begins an episode, `[num_envs]`, bool.
            noise: One slice of `noise()`, `[num_envs, num_noise]`; None acts deterministically, by the distribution's mode.

        Returns:
            Actions, log-probabilities, values and the next state.
        """
        features, values, state = self.model(self._normalized(obs).unsqueeze(0), state, starts.unsqueeze(0))
        params = self.distribution.from_features(features[0])
        if noise is None:
            return Act(self.distribution.mode(params), torch.zeros_like(values[0]), values[0], state)
        actions, logp = self.distribution.sample(params, noise)
        return Act(actions, logp, values[0], state)

    def evaluate(self, obs: Tensor, actions: Tensor, state: State, starts: Tensor) -> Evaluation:
        """Recompute log-probabilities, values and entropies of stored sequences under the present weights.

        Args:
            obs: Observations, `[seq_len, batch, *obs]`.
            actions: Stored actions, `[seq_len, batch, *action]`.
            state: The stored state before each sequence, each `[batch, *]`.
            starts: Where an observation begins an episode, `[seq_len, batch]`, bool.
        """
        features, values, _ = self.model(self._normalized(obs), state, starts)
        params = self.distribution.from_features(features)
        return Evaluation(self.distribution.logp(params, actions), values, self.distribution.entropy(params))

    def values(self, obs: Tensor, state: State, starts: Tensor) -> Tensor:
        """Estimate the values of one observation a copy, `[num_envs]`, without the actor's work where that is apart."""
        return self.model.values(self._normalized(obs).unsqueeze(0), state, starts.unsqueeze(0))[0]

    def env_actions(self, actions: Tensor) -> Tensor:
        """Clip actions to a bounded `Box`, as the environment gets them; the stored ones stay as sampled."""
        if not self.clips:
            return actions
        return torch.minimum(torch.maximum(actions, self.action_low), self.action_high)

    def observe(self, obs: Tensor) -> None:
        """Let the observation normaliser learn from a rollout's observations, `[..., *obs]`."""
        if self.obs_moments is not None:
            self.obs_moments.update(obs.reshape(-1, *(self.observation_space.shape or ())))

    def _normalized(self, obs: Tensor) -> Tensor:
        return obs if self.obs_moments is None else self.obs_moments.normalize(obs, 10.0)

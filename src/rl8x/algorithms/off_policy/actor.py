"""The policy of actor-critic algorithms, whose actor is trained by separate critics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from rl8x.distributions import Distribution
from rl8x.distributions.categorical import inverse_cdf
from rl8x.models import Model, State
from rl8x.models.registry import BUILTIN
from rl8x.nn.masking import masked_logits
from rl8x.policy import Act, Policy
from rl8x.spaces import check_bounds, critic_only, describe_space
from rl8x.trees import Tree


def check_bounded(name: str, space: gymnasium.Space[Any], *, discrete: bool = False) -> None:
    """Raise unless the action space is a `Box` of floats with finite bounds.

    Args:
        name: The algorithm.
        space: Space of one copy's action.
        discrete: Whether a `Discrete` space fits too.

    Raises:
        ValueError: If it is another; it says which algorithm fits. Or as `check_bounds` does.
    """
    if isinstance(space, gymnasium.spaces.Discrete):
        if discrete:
            return
        raise ValueError(f"{name} needs a Box action space of floats; got {describe_space(space)}. Use DQN or SAC.")
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        fits = "Box action space of floats, or a Discrete one" if discrete else "Box action space of floats"
        raise ValueError(f"{name} needs a {fits}; got {describe_space(space)}. Use PPO.")
    check_bounds(space, name, "PPO")


class Actor(Policy):
    """A policy that can act at random for a while, over a bounded `Box` or a `Discrete` action space.

    As a module it maps observations to the parameters of its action distributions: this is what is trained.

    Args:
        observation_space: Space of one copy's observation.
        action_space: Space of one copy's action.
        distribution: As `Policy` has it. That of a `Box` draws standard normal numbers for its samples.
        distribution_config: Keyword arguments of its class.
        model: As `Policy` has it. Its values are not used.
        model_config: Keyword arguments of the model's class. In built-in models features and value share their layers,
            unless this says otherwise: layers for a value alone would be computed for nothing.
        normalize_observations: As `Policy` has it.

    Attributes:
        is_random: Whether it acts at random, 0-d bool.
    """

    is_random: Tensor
    random_low: Tensor
    random_high: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        distribution: str | type[Distribution],
        distribution_config: Mapping[str, Any] | None = None,
        model: str | type[Model] | Model | None = None,
        model_config: Mapping[str, Any] | None = None,
        normalize_observations: bool = False,
    ) -> None:
        built_in = model is None or (isinstance(model, str) and model in BUILTIN)
        super().__init__(
            observation_space,
            action_space,
            model=model,
            model_config={**({"shared": True} if built_in else {}), **(model_config or {})},
            distribution=distribution,
            distribution_config=distribution_config,
            normalize_observations=normalize_observations,
            # The critics are separate networks that read all parts; the model's own value is not used.
            hidden=critic_only(observation_space),
        )
        self.register_buffer("is_random", torch.zeros((), dtype=torch.bool), persistent=False)
        if isinstance(action_space, gymnasium.spaces.Box):
            for name in ("low", "high"):
                bound = torch.as_tensor(getattr(action_space, name), dtype=torch.float32)
                self.register_buffer(f"random_{name}", bound, persistent=False)

    # After training it acts like a plain policy, so it is saved as one.
    form = Policy.form

    @contextlib.contextmanager
    def exploring(self, *, warms_up: bool) -> Iterator[dict[str, Any]]:
        """Act at random within the context if it `warms_up`; there are no metrics of that."""
        self.is_random.fill_(warms_up)  # in place, as programs read it
        try:
            yield {}
        finally:
            self.is_random.fill_(False)

    def act(self, obs: Tree, state: State, starts: Tensor, noise: Tensor | None = None) -> Act:
        """Choose an action for each copy; arguments are those of `Policy.act`. The mode is never random."""
        act = super().act(obs, state, starts, noise)
        if noise is None:
            return act
        actions = torch.where(self.is_random, self.random_actions(obs, noise), act.actions)
        return act._replace(actions=actions)

    def random_actions(self, obs: Tree, noise: Tensor) -> Tensor:
        """Return uniformly random legal actions, `[num_envs, *action]`.

        Args:
            obs: Observations, `[num_envs, *obs]` or a dict of such, with an action mask where there is one.
            noise: What sampling needs, `[num_envs, num_noise]`; of normal numbers the distribution function is uniform.
        """
        space = self.action_space
        if isinstance(space, gymnasium.spaces.Box):
            shares = torch.special.ndtr(noise).reshape(-1, *space.shape)
            return torch.lerp(self.random_low, self.random_high, shares)
        assert isinstance(space, gymnasium.spaces.Discrete)
        mask = self.model_inputs(obs)[1]
        logits = noise.new_zeros(len(noise), int(space.n))
        if mask is not None:
            logits = masked_logits(logits, mask | ~mask.any(-1, keepdim=True))
        return inverse_cdf(logits.log_softmax(-1), noise.squeeze(-1)) + int(space.start)

    def forward(self, obs: Tree, state: State, starts: Tensor) -> Any:  # type: ignore[override]
        """Return the parameters of the action distributions of sequences of one step, `[batch, ...]`.

        Args:
            obs: Observations, `[1, batch, *obs]` or a dict of such.
            state: Empty: the model is feedforward.
            starts: `[1, batch]`, bool.
        """
        features, _, mask = self.predict(obs, state, starts)
        return self.distribution.from_features(features[0], None if mask is None else mask[0])

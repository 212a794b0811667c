"""The dynamics of an environment, which its author writes: pure functions of their arguments."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from rl8x.envs.steps import Observation, Outcome, Parameters, State


class Dynamics:
    """The part of an environment that its author writes: initial states, transitions and observations."""

    default_time_limit: ClassVar[int | None] = None
    """Steps until an episode is truncated; None for never."""
    terminates: ClassVar[bool] = False
    """Whether `transition` can ever say terminated; where nothing can end, no reset work is done."""
    reset_noise: ClassVar[int] = 0
    """Uniform numbers that one copy needs to start an episode."""
    step_noise: ClassVar[int] = 0
    """Uniform numbers that one copy needs for a step."""
    metric_names: tuple[str, ...] = ()
    """Names of what `measure` returns; rows have means over the episodes that end, as `episodes/info/<name>/mean`."""

    def initial_state(self, parameters: Parameters, noise: Tensor) -> State:
        """Return the state at the start of an episode.

        Args:
            parameters: Values of the parameters, float32 `[num_envs]` each.
            noise: `[num_envs, reset_noise]` in [0, 1).

        Returns:
            Tensors by name, each `[num_envs, ...]`.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define initial_state()")

    def transition(self, state: State, actions: Any, parameters: Parameters, noise: Tensor) -> Outcome:
        """Return what an action leads to, before any reset.

        Args:
            state: The state before the action, each `[num_envs, ...]`; must not be changed in place.
            actions: `[num_envs]` int64 for discrete actions, `[num_envs, size]` float32 for continuous ones, and a dict
                of tensors for a `Dict` or a `Tuple`, whose keys are "0", "1", ...
            parameters: float32 `[num_envs]` each, whether one value serves all copies or each has its own.
            noise: `[num_envs, step_noise]` in [0, 1).

        Returns:
            The next state, rewards float32 `[num_envs]` and terminated bool `[num_envs]`.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define transition()")

    def observe(self, state: State, parameters: Parameters) -> Observation:
        """Return what the policy sees of a state.

        Args:
            state: The state to observe, each `[num_envs, ...]`.
            parameters: Values of the parameters, float32 `[num_envs]` each.

        Returns:
            `[num_envs, *single_observation_space.shape]`, or a dict of them.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define observe()")

    def measure(self, state: State, parameters: Parameters) -> dict[str, Tensor]:
        """Return metrics of a state by `metric_names`; the last of an episode counts.

        Args:
            state: The state after a transition, each `[num_envs, ...]`.
            parameters: Values of the parameters, float32 `[num_envs]` each.

        Returns:
            Float32 `[num_envs]` each.
        """
        return {}


def wrapped_angle(angle: Tensor) -> Tensor:
    """Return an angle in rad, `[num_envs]`, in [-pi, pi): float32 loses the digits of one that turns for hours."""
    return angle - torch.floor((angle + math.pi) * (0.5 / math.pi)) * (2 * math.pi)

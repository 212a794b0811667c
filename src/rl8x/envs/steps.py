"""One step of an environment: its types, and what an author writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import gymnasium.spaces as spaces
import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs.canvas import Canvas, CopyParameters, CopyState, Past

State: TypeAlias = dict[str, Tensor]
"""The physics' state between two steps: tensors by name, each `[num_envs, ...]`."""
Parameters: TypeAlias = Mapping[str, Tensor]
"""The values of the environment's parameters, float32 `[num_envs]` each, even if all copies have the same value."""
Outcome: TypeAlias = tuple[State, Tensor, Tensor]
"""The result of a transition: the next state, rewards float32 `[num_envs]` and terminated bool `[num_envs]`."""
Observation: TypeAlias = "Tensor | dict[str, Observation]"
"""A tensor `[num_envs, *shape]`, or nested dicts of them for `Dict` and `Tuple` spaces."""
Actions: TypeAlias = "Tensor | dict[str, Actions]"
"""A tensor `[num_envs, *shape]`, or nested dicts of them; the parts of a `Tuple` have the keys "0", "1", ..."""
Carry: TypeAlias = dict[str, Any]
"""All that changes from step to step: `state`, `parameters`, `elapsed` (int64 `[num_envs]`), `returns` (float32).

If parameters move with the returns of episodes, it has the current episodes' `sources` too, in the form of `Step`."""


def by_part(space: spaces.Space[Any], observed: Any) -> dict[str, Any]:
    """Return an observation, or its space itself, by parts: those of a `Dict`, else the single part `obs`."""
    return dict(observed) if isinstance(space, spaces.Dict) else {keys.OBS: observed}


class Step(NamedTuple):
    """The result of one step of all copies; every field is `[num_envs, ...]`."""

    obs: Observation
    """The next observation, after the reset where an episode ended."""
    rewards: Tensor
    """float32."""
    terminated: Tensor
    """bool: the task ended the episode."""
    truncated: Tensor
    """bool: the time limit was reached; both can be true in one step, as in Gymnasium."""
    final_obs: Observation
    """The observation before any reset, for every copy; equal to `obs` where no episode ended."""
    episode_returns: Tensor
    """float32: the sum of the episode's rewards up to this step, before the reset."""
    episode_lengths: Tensor
    """int64: the episode's steps up to this one, before the reset."""
    valid: Tensor | None = None
    """bool, false for masked autoreset steps, which are not experience; None if every row is experience."""
    metrics: dict[str, Tensor] = {}  # noqa: RUF012 - `advance` passes its own, this one stays empty
    """Further metrics of the episode up to this step, before the reset, float32; NaN if there is none."""
    sources: dict[str, Tensor] = {}  # noqa: RUF012 - as above
    """The source of the episode's parameters, int64, by the label of each group that moves with returns."""
    ended: Tensor | None = None
    """bool: the episode of the row's copy ended, if agents end or join on their own; None: it ends with its rows."""

    @property
    def is_over(self) -> Tensor:
        """Where the episode of the row's copy ended, `[num_envs]`, bool."""
        return self.terminated | self.truncated if self.ended is None else self.ended


class Dynamics:
    """The part of an environment that its author writes: initial states, transitions, observations and pictures."""

    default_time_limit: ClassVar[int | None] = None
    """Steps until an episode is truncated; None for never."""
    terminates: ClassVar[bool] = False
    """Whether `transition` can ever terminate an episode; if no episode can end, resets cost nothing."""
    reset_noise: ClassVar[int] = 0
    """Uniform numbers that one copy needs to start an episode."""
    step_noise: ClassVar[int] = 0
    """Uniform numbers that one copy needs for a step."""
    metric_names: tuple[str, ...] = ()
    """Names of the metrics that `measure` returns; rows have means over ended episodes, `episodes/info/<name>/mean`."""
    render_fps: ClassVar[float] = 30.0
    """Steps a second of a film at natural speed."""

    def initial_state(self, parameters: Parameters, noise: Tensor) -> State:
        """Return the state at the start of an episode: tensors by name, each `[num_envs, ...]`.

        Args:
            parameters: Values of the parameters, float32 `[num_envs]` each.
            noise: `[num_envs, reset_noise]` in [0, 1).
        """
        raise NotImplementedError(f"{type(self).__name__} must define initial_state()")

    def transition(self, state: State, actions: Any, parameters: Parameters, noise: Tensor) -> Outcome:
        """Return the result of actions, before any reset.

        Args:
            state: The state before the action, each `[num_envs, ...]`; must not be changed in place.
            actions: `[num_envs]` int64 for discrete actions, `[num_envs, size]` float32 for continuous ones, and a dict
                of tensors for a `Dict` or a `Tuple`, whose keys are "0", "1", ...
            parameters: float32 `[num_envs]` each, whether one value serves all copies or each has its own.
            noise: `[num_envs, step_noise]` in [0, 1).

        Returns:
            The next state, rewards float32 `[num_envs]` and terminated bool `[num_envs]`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define transition()")

    def observe(self, state: State, parameters: Parameters) -> Observation:
        """Return the observation of a state: `[num_envs, *single_observation_space.shape]`, or a dict of such tensors.

        Args:
            state: The state to observe, each `[num_envs, ...]`.
            parameters: Values of the parameters, float32 `[num_envs]` each.
        """
        raise NotImplementedError(f"{type(self).__name__} must define observe()")

    def measure(self, state: State, parameters: Parameters) -> dict[str, Tensor]:
        """Return metrics of a state by `metric_names`, float32 `[num_envs]` each; the last of an episode counts.

        Args:
            state: The state after a transition, each `[num_envs, ...]`.
            parameters: Values of the parameters, float32 `[num_envs]` each.
        """
        return {}

    def draw(self, canvas: Canvas, state: CopyState, parameters: CopyParameters, past: Past) -> None:
        """Draw a copy, for films; an environment without this method cannot be rendered.

        Args:
            canvas: The picture to draw on; `canvas.view` sets the visible ranges first.
            state: The copy's state, as NumPy arrays by the names of `initial_state`, without the first dimension; with
                several agents, one row per agent, `[agents, ...]`.
            parameters: The values of its parameters.
            past: The last states before this one in the same episode, oldest first; empty if unknown.
        """
        raise NotImplementedError(f"{type(self).__name__} has no draw()")


def wrapped_angle(angle: Tensor) -> Tensor:
    """Wrap an angle in rad, `[num_envs]`, to [-pi, pi): float32 loses digits of an angle that grows for hours."""
    return angle - torch.floor((angle + math.pi) * (0.5 / math.pi)) * (2 * math.pi)

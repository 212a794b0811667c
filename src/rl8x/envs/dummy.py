"""The simplest environments there are: move a position to 0. For tests and first tries; rl8 has the same two."""

from __future__ import annotations

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

from rl8x.envs.base import Env, Observation, Outcome, Parameter, Parameters, State
from rl8x.envs.canvas import BLUE, GREEN, GREY, Canvas, CopyParameters, CopyState, Past


class _Dummy(Env):
    """A position that starts anywhere within +-`bounds`; episodes never end."""

    single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    parameters = {  # noqa: RUF012 - a class variable by the base class
        "bounds": Parameter(default=100.0, low=0.0, high=1e6, unit="", description="largest distance at the start"),
    }
    reset_noise = 1

    def initial_state(self, parameters: Parameters, noise: Tensor) -> State:
        """Start anywhere, `[num_envs]` uniform in +-`bounds`."""
        return {"position": (noise[:, 0] * 2 - 1) * parameters["bounds"]}

    def observe(self, state: State, parameters: Parameters) -> Observation:
        """Return the position, `[num_envs, 1]`."""
        return state["position"].unsqueeze(-1)

    @staticmethod
    def _moved(state: State, change: Tensor) -> Outcome:
        """Add the change, `[num_envs]`, to the position; the reward is minus its new distance from 0."""
        position = state["position"] + change
        return {"position": position}, -position.abs(), torch.zeros_like(position, dtype=torch.bool)

    def draw(self, canvas: Canvas, state: CopyState, parameters: CopyParameters, past: Past) -> None:
        """Draw the position and its trail on a line, with 0 marked."""
        position = float(state["position"])
        far = 1.1 * max(1.0, parameters["bounds"], abs(position))
        canvas.view((-far, far), (-1.0, 1.0), stretch=True)
        canvas.line([(-far, 0.0), (far, 0.0)], 0.012, GREY)
        canvas.line([(0.0, -0.18), (0.0, 0.18)], 0.03, GREEN)
        for age, before in enumerate(reversed(past[-12:]), start=1):
            canvas.circle((float(before["position"]), 0.0), 0.06, BLUE, strength=round(0.5 * 0.8**age, 3))
        canvas.circle((position, 0.0), 0.075, BLUE)
        canvas.text((position, 0.22), f"{position:.4g}", 0.13)


class DiscreteDummy(_Dummy):
    """Bring a position to 0 by steps of 1; reward minus its distance from 0. Episodes never end.

    Actions, `[num_envs]` int64: 0 moves by -1, 1 by +1. Observations, `[num_envs, 1]`: the position.

    Source: rl8 1.0 has the same.
    """

    single_action_space = spaces.Discrete(2)

    def transition(self, state: State, actions: Tensor, parameters: Parameters, noise: Tensor) -> Outcome:
        """Move by -1 (0) or by +1 (1), by actions `[num_envs]`."""
        return self._moved(state, actions * 2 - 1)


class ContinuousDummy(_Dummy):
    """Bring a position to 0 by steps of any size; reward minus its distance from 0. Episodes never end.

    Actions, `[num_envs, 1]` float32: what is added to the position. Observations, `[num_envs, 1]`: the position.

    Source: rl8 1.0 has the same.
    """

    single_action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def transition(self, state: State, actions: Tensor, parameters: Parameters, noise: Tensor) -> Outcome:
        """Add the actions, `[num_envs, 1]`, to the position."""
        return self._moved(state, actions[:, 0])

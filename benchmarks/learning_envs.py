"""Environments of the learning benchmark that ask for one ability each: a memory, eyes, respect for an action mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

from rl8x.envs import CartPole, Env
from rl8x.envs.base import Observation, Parameters, State


class MaskedCartPole(CartPole):
    """CartPole whose velocities are hidden: only a policy with a memory can tell where cart and pole are going."""

    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observe(self, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Return x and theta."""
        return state["physics"][:, ::2]


class Catch(Env):
    """A ball falls through an image, a pixel a step; move the paddle below it. 1 if it is caught, else -1.

    Observations: 1 x 16 x 16 images, 0 or 255. Actions: left, stay, right. The ball drifts to one side by half a pixel
    a step, so that a policy has to see where it is rather than remember where it was dropped.

    Source: the task of that name in bsuite, Osband et al. 2020, arXiv:1908.03568; drift and size are our own.
    """

    SIDE: ClassVar[int] = 16
    single_observation_space = spaces.Box(0, 255, (1, 16, 16), np.uint8)
    single_action_space = spaces.Discrete(3)
    terminates = True
    reset_noise = 3

    def initial_state(self, parameters: Mapping[str, Tensor], noise: Tensor) -> State:
        """Drop a ball from the top row; the paddle starts anywhere."""
        columns = (noise[:, :2] * self.SIDE).floor()
        drift = torch.where(noise[:, 2] < 0.5, -0.5, 0.5)
        return {
            "row": torch.zeros_like(columns[:, 0]),
            "column": columns[:, 0],
            "paddle": columns[:, 1],
            "drift": drift,
        }

    def transition(
        self, state: State, actions: Tensor, parameters: Mapping[str, Tensor], noise: Tensor
    ) -> tuple[State, Tensor, Tensor]:
        """Move paddle and ball; walls turn the drift around."""
        last = self.SIDE - 1
        paddle = (state["paddle"] + actions - 1).clamp(0, last)
        column = state["column"] + state["drift"]
        hits = (column < 0) | (column > last)
        row = state["row"] + 1
        column = column.clamp(0, last)
        landed = row >= last
        caught = (column.floor() - paddle).abs() <= 1
        rewards = torch.where(landed, torch.where(caught, 1.0, -1.0), 0.0)
        drift = torch.where(hits, -state["drift"], state["drift"])
        return {"row": row, "column": column, "paddle": paddle, "drift": drift}, rewards, landed

    def observe(self, state: State, parameters: Mapping[str, Tensor]) -> Tensor:
        """Draw the ball and a paddle three pixels wide."""
        side = torch.arange(self.SIDE, device=self.device)
        row, column = (state[name].floor().unsqueeze(-1) for name in ("row", "column"))
        ball = (side == row).unsqueeze(-1) & (side == column).unsqueeze(-2)  # [num_envs, 16, 16]
        paddle = (side == self.SIDE - 1).unsqueeze(-1) & ((side - state["paddle"].unsqueeze(-1)).abs() <= 1).unsqueeze(
            -2
        )
        return ((ball | paddle).unsqueeze(1) * 255).to(torch.uint8)


class Traps(Env):
    """Take the best of eight prizes; about half of them are traps, look the better, and the mask says which they are.

    Observations: what each action seems to be worth, 0 to 1 for a prize and 1 to 2 for a trap, and `action_mask`. The
    reward is the prize's worth, and 0 for a trap. `invalid` counts the traps that were taken in the episode.
    """

    ACTIONS: ClassVar[int] = 8
    single_observation_space = spaces.Dict(
        {"action_mask": spaces.MultiBinary(8), "worth": spaces.Box(0.0, 2.0, (8,), np.float32)}
    )
    single_action_space = spaces.Discrete(8)
    default_time_limit = 16
    reset_noise = 16
    step_noise = 16
    metric_names = ("invalid",)

    def initial_state(self, parameters: Mapping[str, Tensor], noise: Tensor) -> State:
        """Lay out prizes and traps."""
        return {**self._laid_out(noise), "invalid": torch.zeros_like(noise[:, 0])}

    def _laid_out(self, noise: Tensor) -> State:
        """Draw what each action is worth; at least one is legal."""
        worth, chance = noise.split(self.ACTIONS, -1)
        legal = (chance >= 0.5) | (chance == chance.max(-1, keepdim=True).values)
        return {"worth": worth, "legal": legal}

    def transition(
        self, state: State, actions: Tensor, parameters: Mapping[str, Tensor], noise: Tensor
    ) -> tuple[State, Tensor, Tensor]:
        """Pay for the action, and lay out the next prizes."""
        legal, worth = (state[name].gather(1, actions.unsqueeze(1)).squeeze(1) for name in ("legal", "worth"))
        invalid = state["invalid"] + ~legal
        return {**self._laid_out(noise), "invalid": invalid}, worth * legal, torch.zeros_like(legal)

    def observe(self, state: State, parameters: Mapping[str, Tensor]) -> Observation:
        """Show what each action seems to be worth, and which are legal."""
        return {"action_mask": state["legal"].to(torch.int8), "worth": state["worth"] + ~state["legal"]}

    def measure(self, state: State, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Count the traps taken."""
        return {"invalid": state["invalid"]}


class PartlySeenCartPole(CartPole):
    """CartPole that shows positions and, unless `blind`, velocities as parts of their own."""

    def __init__(self, num_envs: int, *, blind: bool = False, **options: Any) -> None:
        self.blind = blind
        parts = {name: spaces.Box(-np.inf, np.inf, (2,), np.float32) for name in ("positions", "velocities")}
        if blind:
            del parts["velocities"]
        self.single_observation_space = spaces.Dict(parts)
        super().__init__(num_envs, **options)

    def observe(self, state: State, parameters: Parameters) -> dict[str, Tensor]:
        """Return position and angle, `[num_envs, 2]`, and their velocities, likewise."""
        obs = super().observe(state, parameters)
        assert isinstance(obs, Tensor)
        seen = {"positions": obs[:, 0::2]}
        return seen if self.blind else {**seen, "velocities": obs[:, 1::2]}

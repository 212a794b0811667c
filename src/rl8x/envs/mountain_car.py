"""MountainCar: drive a car that is too weak for the slope out of a valley, by rocking it."""

from __future__ import annotations

import math
from typing import ClassVar

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

from rl8x.envs.base import Env, Observation, Outcome, Parameter, Parameters, State
from rl8x.envs.canvas import BLUE, FAINT, GREEN, GREY, INK, Canvas, CopyParameters, CopyState, Past, Point

MIN_POSITION = -1.2
MAX_POSITION = 0.6
MAX_SPEED = 0.07
GRAVITY = Parameter(default=0.0025, low=0.0, high=0.01, unit="1/step^2", description="pull of the slope")
GOAL_VELOCITY = Parameter(default=0.0, low=0.0, high=MAX_SPEED, unit="1/step", description="speed needed at the goal")


def drive(state: State, acceleration: Tensor, gravity: Tensor) -> State:
    """Move the cars by one step under an acceleration, `[num_envs]`; the wall on the left stops them.

    velocity' = velocity + acceleration - gravity cos(3 position),  within +-0.07
    position' = position + velocity',                                within [-1.2, 0.6]
    """
    velocity = state["velocity"] + acceleration - gravity * torch.cos(3 * state["position"])
    velocity = velocity.clamp(-MAX_SPEED, MAX_SPEED)
    position = (state["position"] + velocity).clamp(MIN_POSITION, MAX_POSITION)
    velocity = velocity.masked_fill((position <= MIN_POSITION) & (velocity < 0), 0.0)
    return {"position": position, "velocity": velocity}


class _Valley(Env):
    """A car at rest near the bottom of a valley, and a flag on the hill to the right."""

    single_observation_space = spaces.Box(
        np.array([MIN_POSITION, -MAX_SPEED], dtype=np.float32), np.array([MAX_POSITION, MAX_SPEED], dtype=np.float32)
    )
    terminates = True
    reset_noise = 1
    goal_position: ClassVar[float]

    def initial_state(self, parameters: Parameters, noise: Tensor) -> State:
        """Start at rest, the position, `[num_envs]`, uniform in [-0.6, -0.4]."""
        position = noise[:, 0] * 0.2 - 0.6
        return {"position": position, "velocity": torch.zeros_like(position)}

    def observe(self, state: State, parameters: Parameters) -> Observation:
        """Return position and velocity, `[num_envs, 2]`."""
        return torch.stack((state["position"], state["velocity"]), dim=-1)

    def _arrived(self, state: State, parameters: Parameters) -> Tensor:
        """Return whether a car is at the flag, and fast enough, bool `[num_envs]`."""
        return (state["position"] >= self.goal_position) & (state["velocity"] >= parameters["goal_velocity"])

    def draw(self, canvas: Canvas, state: CopyState, parameters: CopyParameters, past: Past) -> None:
        """Draw the valley, the flag and the car."""
        canvas.view((MIN_POSITION - 0.07, MAX_POSITION + 0.07), (0.0, 1.3))
        (left, right), (bottom, _) = canvas.span
        grid = [left + (right - left) * i / 120 for i in range(121)]
        ground = [(x, _height(x)) for x in grid]
        canvas.polygon([*ground, (right, bottom), (left, bottom)], FAINT, strength=0.55)
        canvas.line(ground, 0.012, GREY)
        foot = self.goal_position, _height(self.goal_position)
        canvas.line([foot, (foot[0], foot[1] + 0.22)], 0.012, INK)
        canvas.polygon([(foot[0], foot[1] + y) for y in (0.12, 0.22)] + [(foot[0] + 0.12, foot[1] + 0.17)], GREEN)
        x = float(state["position"])
        angle = math.atan(1.35 * math.cos(3 * x))
        cos, sin = math.cos(angle), math.sin(angle)

        def at(along: float, up: float) -> Point:
            return x + along * cos - up * sin, _height(x) + along * sin + up * cos

        canvas.box(at(0.0, 0.075), (0.19, 0.065), BLUE, angle=angle)
        canvas.box(at(-0.012, 0.125), (0.1, 0.05), BLUE, angle=angle, strength=0.75)
        for wheel in (-0.055, 0.055):
            canvas.circle(at(wheel, 0.034), 0.034, INK)
            canvas.circle(at(wheel, 0.034), 0.013, FAINT)


def _height(position: float) -> float:
    """Return the height of the slope; its steepness is proportional to cos(3 position), as is the pull in `drive`."""
    return 0.45 * math.sin(3 * position) + 0.55


class MountainCar(_Valley):
    """Reach the flag at 0.5 in as few steps as possible; reward -1 a step, 200 steps at most.

    Actions, `[num_envs]` int64: 0 accelerates to the left, 1 not at all, 2 to the right. Observations, `[num_envs, 2]`:
    position and velocity, without unit and per step.

    Source: Moore 1990, "Efficient memory-based learning for robot control"; the equations are those of Gymnasium
    1.4's MountainCar-v0.
    """

    single_action_space = spaces.Discrete(3)
    parameters = {  # noqa: RUF012 - a class variable by the base class
        "force": Parameter(default=0.001, low=0.0, high=0.01, unit="1/step^2", description="push of the motor"),
        "gravity": GRAVITY,
        "goal_velocity": GOAL_VELOCITY,
    }
    default_time_limit = 200
    goal_position = 0.5

    def transition(self, state: State, actions: Tensor, parameters: Parameters, noise: Tensor) -> Outcome:
        """Accelerate to the left (0), not at all (1) or to the right (2) for one step, by actions `[num_envs]`."""
        state = drive(state, (actions - 1) * parameters["force"], parameters["gravity"])
        return state, torch.full_like(state["position"], -1.0), self._arrived(state, parameters)


class MountainCarContinuous(_Valley):
    """Reach the flag at 0.45 with little effort; reward 100 for arriving, minus 0.1 force^2 a step, 999 steps at most.

    Actions, `[num_envs, 1]` float32: the force, clipped to +-1 for the motion but not for its price. Observations,
    `[num_envs, 2]`: position and velocity, without unit and per step.

    Source: Moore 1990, as for `MountainCar`; the equations are those of Gymnasium 1.4's MountainCarContinuous-v0.
    """

    single_action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    parameters = {  # noqa: RUF012 - a class variable by the base class
        "power": Parameter(default=0.0015, low=0.0, high=0.015, unit="1/step^2", description="push at full force"),
        "gravity": GRAVITY,
        "goal_velocity": GOAL_VELOCITY,
    }
    default_time_limit = 999
    goal_position = 0.45

    def transition(self, state: State, actions: Tensor, parameters: Parameters, noise: Tensor) -> Outcome:
        """Apply the forces, `[num_envs, 1]`, for one step."""
        force = actions[:, 0]
        state = drive(state, force.clamp(-1.0, 1.0) * parameters["power"], parameters["gravity"])
        arrived = self._arrived(state, parameters)
        return state, arrived * 100.0 - 0.1 * force.square(), arrived

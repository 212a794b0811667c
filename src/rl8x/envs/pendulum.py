"""Pendulum: swing a pendulum up with a motor that is too weak to lift it, and hold it there."""

from __future__ import annotations

import math

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

from rl8x.envs.base import Env, Observation, Outcome, Parameter, Parameters, State
from rl8x.envs.canvas import BLUE, FAINT, GREEN, INK, ORANGE, Canvas, CopyParameters, CopyState, Past
from rl8x.envs.steps import wrapped_angle

MAX_SPEED = 8.0
MAX_TORQUE = 2.0


class Pendulum(Env):
    """Bring a pendulum to its upper rest position and hold it there, with little torque; 200 steps.

    Actions, `[num_envs, 1]` float32: the torque in N m, clipped to +-2. Observations, `[num_envs, 3]`: cos(theta),
    sin(theta), theta_dot (rad/s); theta = 0 is upright. The reward of a step is taken before it moves,
    `-(theta^2 + 0.1 theta_dot^2 + 0.001 torque^2)`, with theta in [-pi, pi).

    Source: the equations are those of Gymnasium 1.4's Pendulum-v1.
    """

    single_observation_space = spaces.Box(
        np.array([-1.0, -1.0, -MAX_SPEED], dtype=np.float32), np.array([1.0, 1.0, MAX_SPEED], dtype=np.float32)
    )
    single_action_space = spaces.Box(-MAX_TORQUE, MAX_TORQUE, (1,), np.float32)
    parameters = {  # noqa: RUF012 - a class variable by the base class
        "g": Parameter(default=10.0, low=0.1, high=100.0, unit="m/s^2", description="gravitational acceleration"),
        "m": Parameter(default=1.0, low=0.05, high=20.0, unit="kg", description="mass of the pendulum"),
        "l": Parameter(default=1.0, low=0.05, high=20.0, unit="m", description="length of the pendulum"),
        "dt": Parameter(default=0.05, low=0.001, high=0.2, unit="s", description="time between two states"),
    }
    default_time_limit = 200
    reset_noise = 2
    render_fps = 20.0

    def initial_state(self, parameters: Parameters, noise: Tensor) -> State:
        """Start at any angle, theta uniform in +-pi, with theta_dot uniform in +-1, `[num_envs]` each."""
        theta, theta_dot = (noise * 2 - 1).unbind(-1)
        return {"theta": theta * math.pi, "theta_dot": theta_dot.contiguous()}

    def transition(self, state: State, actions: Tensor, parameters: Parameters, noise: Tensor) -> Outcome:
        """Apply the torques, `[num_envs, 1]`, for one step of a semi-implicit Euler scheme.

        theta_dot' = theta_dot + (3 g / (2 l) sin(theta) + 3 / (m l^2) torque) dt,  within +-8 rad/s
        theta'     = theta + theta_dot' dt
        """
        theta, theta_dot = state["theta"], state["theta_dot"]
        length, dt = parameters["l"], parameters["dt"]
        torque = actions[:, 0].clamp(-MAX_TORQUE, MAX_TORQUE)
        rewards = -(theta.square() + 0.1 * theta_dot.square() + 0.001 * torque.square())
        pull = 1.5 * parameters["g"] / length * theta.sin()
        push = 3.0 / (parameters["m"] * length.square()) * torque
        theta_dot = (theta_dot + (pull + push) * dt).clamp(-MAX_SPEED, MAX_SPEED)
        theta = wrapped_angle(theta + theta_dot * dt)
        return {"theta": theta, "theta_dot": theta_dot}, rewards, torch.zeros_like(rewards, dtype=torch.bool)

    def observe(self, state: State, parameters: Parameters) -> Observation:
        """Return cos(theta), sin(theta) and theta_dot, `[num_envs, 3]`."""
        theta = state["theta"]
        return torch.stack((theta.cos(), theta.sin(), state["theta_dot"]), dim=-1)

    def draw(self, canvas: Canvas, state: CopyState, parameters: CopyParameters, past: Past) -> None:
        """Draw the rod with its trail, and a mark at the upper rest position."""
        length, mass = parameters["l"], parameters["m"]
        unit = max(1.0, length)
        canvas.view((-1.35 * unit, 1.35 * unit), (-1.35 * unit, 1.35 * unit))
        around = [(length * math.sin(i * math.pi / 48), length * math.cos(i * math.pi / 48)) for i in range(97)]
        canvas.line(around, 0.012 * unit, FAINT)
        canvas.line([(0.0, length + 0.12 * unit), (0.0, length + 0.24 * unit)], 0.04 * unit, GREEN)
        for age, before in enumerate(reversed(past[-10:]), start=1):
            canvas.line([(0.0, 0.0), _tip(before, length)], 0.035 * unit, ORANGE, strength=round(0.4 * 0.75**age, 3))
        tip = _tip(state, length)
        canvas.line([(0.0, 0.0), tip], 0.1 * unit, ORANGE)
        canvas.circle(tip, 0.13 * unit * min(1.7, max(0.6, mass ** (1 / 3))), BLUE)
        canvas.circle((0.0, 0.0), 0.06 * unit, INK)


def _tip(state: CopyState, length: float) -> tuple[float, float]:
    theta = float(state["theta"])
    return -length * math.sin(theta), length * math.cos(theta)

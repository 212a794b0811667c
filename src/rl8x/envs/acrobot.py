"""Acrobot: swing the tip of a two-link pendulum up, with a motor at the joint between the links only."""

from __future__ import annotations

import math
from typing import NamedTuple

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

from rl8x.envs.base import Env, Observation, Outcome, Parameter, Parameters, State
from rl8x.envs.canvas import BLUE, FAINT, GREEN, INK, ORANGE, Canvas, CopyParameters, CopyState, Past, Point
from rl8x.envs.steps import wrapped_angle

MAX_SPEED_1 = 4 * math.pi
MAX_SPEED_2 = 9 * math.pi
START_SPREAD = 0.1


class Links(NamedTuple):
    """Coefficients of the equations of motion, computed from the parameters, `[num_envs]` each."""

    inertia: Tensor
    """m1 c1^2 + m2 (l1^2 + c2^2) + 2 I: inertia of both links about the upper joint, without the coupling."""
    outer_inertia: Tensor
    """m2 c2^2 + I: inertia of the outer link about the middle joint."""
    coupling: Tensor
    """m2 l1 c2: how the motions of the two links couple."""
    torque_1: Tensor
    """(m1 c1 + m2 l1) g: gravity's torque on the inner link when it is horizontal."""
    torque_2: Tensor
    """m2 c2 g: gravity's torque on the outer link when it is horizontal."""

    @classmethod
    def of(cls, parameters: Parameters) -> Links:
        """Combine the parameters, `[num_envs]` each."""
        mass_1, mass_2 = parameters["link_mass_1"], parameters["link_mass_2"]
        com_1, com_2 = parameters["link_com_pos_1"], parameters["link_com_pos_2"]
        length_1, moi, gravity = parameters["link_length_1"], parameters["link_moi"], parameters["gravity"]
        return cls(
            inertia=mass_1 * com_1.square() + mass_2 * (length_1.square() + com_2.square()) + 2 * moi,
            outer_inertia=mass_2 * com_2.square() + moi,
            coupling=mass_2 * length_1 * com_2,
            torque_1=(mass_1 * com_1 + mass_2 * length_1) * gravity,
            torque_2=mass_2 * com_2 * gravity,
        )


def derivatives(physics: Tensor, torque: Tensor, links: Links) -> Tensor:
    """Return the time derivatives of theta_1, theta_2, theta_1_dot and theta_2_dot, `[num_envs, 4]`.

    With q = theta_1, p = theta_2 (relative to the inner link) and k the coupling:

        d1    = inertia + 2 k cos(p)
        d2    = outer_inertia + k cos(p)
        phi2  = torque_2 sin(q + p)
        phi1  = -k sin(p) p_dot (p_dot + 2 q_dot) + torque_1 sin(q) + phi2
        p_acc = (torque + d2 / d1 phi1 - k sin(p) q_dot^2 - phi2) / (outer_inertia - d2^2 / d1)
        q_acc = -(d2 p_acc + phi1) / d1
    """
    theta_1, theta_2, speed_1, speed_2 = physics.unbind(-1)
    coupled = links.coupling * theta_2.cos()
    swing = links.coupling * theta_2.sin()
    d1 = links.inertia + 2 * coupled
    d2 = links.outer_inertia + coupled
    share = d2 / d1
    phi_2 = links.torque_2 * (theta_1 + theta_2).sin()
    phi_1 = links.torque_1 * theta_1.sin() + phi_2 - swing * speed_2 * (speed_2 + 2 * speed_1)
    acc_2 = (torque + share * phi_1 - swing * speed_1.square() - phi_2) / (links.outer_inertia - d2 * share)
    acc_1 = -(d2 * acc_2 + phi_1) / d1
    return torch.stack((speed_1, speed_2, acc_1, acc_2), dim=-1)


class Acrobot(Env):
    """Swing the tip one link's length above the upper joint; reward -1 a step until it is there, 500 steps at most.

    Actions, `[num_envs]` int64: 0, 1 and 2 apply -1, 0 and +1 times `torque` at the joint between the links.
    Observations, `[num_envs, 6]`: cos and sin of both angles, both angular velocities (rad/s).

    Source: Sutton 1996, "Generalization in reinforcement learning: successful examples using sparse coarse coding", in
    the variant of Sutton and Barto's book; the equations are those of Gymnasium 1.4's Acrobot-v1, with the coefficients
    computed once a step.
    """

    single_observation_space = spaces.Box(
        -np.array([1, 1, 1, 1, MAX_SPEED_1, MAX_SPEED_2], dtype=np.float32),
        np.array([1, 1, 1, 1, MAX_SPEED_1, MAX_SPEED_2], dtype=np.float32),
    )
    single_action_space = spaces.Discrete(3)
    parameters = {  # noqa: RUF012 - a class variable by the base class
        "gravity": Parameter(default=9.8, low=0.1, high=100.0, unit="m/s^2", description="gravitational acceleration"),
        "link_length_1": Parameter(default=1.0, low=0.1, high=10.0, unit="m", description="length of the inner link"),
        "link_mass_1": Parameter(default=1.0, low=0.1, high=10.0, unit="kg", description="mass of the inner link"),
        "link_mass_2": Parameter(default=1.0, low=0.1, high=10.0, unit="kg", description="mass of the outer link"),
        "link_com_pos_1": Parameter(
            default=0.5, low=0.05, high=5.0, unit="m", description="centre of mass of the inner link, from its joint"
        ),
        "link_com_pos_2": Parameter(
            default=0.5, low=0.05, high=5.0, unit="m", description="centre of mass of the outer link, from its joint"
        ),
        "link_moi": Parameter(
            default=1.0, low=0.1, high=10.0, unit="kg m^2", description="moment of inertia of either link"
        ),
        "torque": Parameter(default=1.0, low=0.0, high=10.0, unit="N m", description="torque of the motor"),
        "dt": Parameter(default=0.2, low=0.01, high=0.2, unit="s", description="time between two states"),
    }
    default_time_limit = 500
    terminates = True
    reset_noise = 4
    render_fps = 15.0

    def initial_state(self, parameters: Parameters, noise: Tensor) -> State:
        """Start hanging down, each number of `physics`, `[num_envs, 4]`, uniform in +-0.1."""
        return {"physics": noise * (2 * START_SPREAD) - START_SPREAD}

    def transition(self, state: State, actions: Tensor, parameters: Parameters, noise: Tensor) -> Outcome:
        """Apply the torques of actions `[num_envs]` for one Runge-Kutta step of fourth order."""
        torque = (actions - 1) * parameters["torque"]
        links = Links.of(parameters)
        dt = parameters["dt"].unsqueeze(-1)
        start, half = state["physics"], dt * 0.5
        rate_1 = derivatives(start, torque, links)
        rate_2 = derivatives(start + half * rate_1, torque, links)
        rate_3 = derivatives(start + half * rate_2, torque, links)
        rate_4 = derivatives(start + dt * rate_3, torque, links)
        end = start + dt / 6 * (rate_1 + 2 * (rate_2 + rate_3) + rate_4)
        theta_1, theta_2, speed_1, speed_2 = end.unbind(-1)
        theta_1, theta_2 = wrapped_angle(theta_1), wrapped_angle(theta_2)
        speed_1, speed_2 = speed_1.clamp(-MAX_SPEED_1, MAX_SPEED_1), speed_2.clamp(-MAX_SPEED_2, MAX_SPEED_2)
        arrived = -theta_1.cos() - (theta_1 + theta_2).cos() > 1.0
        physics = torch.stack((theta_1, theta_2, speed_1, speed_2), dim=-1)
        return {"physics": physics}, arrived.to(torch.float32) - 1.0, arrived

    def observe(self, state: State, parameters: Parameters) -> Observation:
        """Return cos and sin of theta_1 and theta_2, and their velocities, `[num_envs, 6]`."""
        theta_1, theta_2, speed_1, speed_2 = state["physics"].unbind(-1)
        return torch.stack((theta_1.cos(), theta_1.sin(), theta_2.cos(), theta_2.sin(), speed_1, speed_2), dim=-1)

    def draw(self, canvas: Canvas, state: CopyState, parameters: CopyParameters, past: Past) -> None:
        """Draw the links, the trail of the tip and, if the inner link is 1 m long, the height to reach."""
        length = parameters["link_length_1"]
        unit = max(1.0, (length + 1.0) / 2)
        canvas.view((-2.15 * unit, 2.15 * unit), (-2.15 * unit, 2.15 * unit))
        (left, right), _ = canvas.span
        if abs(length - 1.0) < 1e-3:
            canvas.line([(left, 1.0), (right, 1.0)], 0.025, GREEN)
        tips = [_joints(before, length)[1] for before in past[-20:]]
        for age, tip in enumerate(reversed(tips), start=1):
            canvas.circle(tip, 0.06 * unit, ORANGE, strength=round(0.5 * 0.88**age, 3))
        middle, tip = _joints(state, length)
        canvas.line([(0.0, 0.0), middle], 0.17 * unit, BLUE)
        canvas.line([middle, tip], 0.17 * unit, ORANGE)
        for joint in ((0.0, 0.0), middle):
            canvas.circle(joint, 0.1 * unit, INK)
            canvas.circle(joint, 0.045 * unit, FAINT)


def _joints(state: CopyState, length: float) -> tuple[Point, Point]:
    """Return the ends of the inner link, whose length is given in m, and of the outer link, which is drawn as 1 m."""
    theta_1, theta_2 = map(float, state["physics"][:2])
    middle = length * math.sin(theta_1), -length * math.cos(theta_1)
    return middle, (middle[0] + math.sin(theta_1 + theta_2), middle[1] - math.cos(theta_1 + theta_2))

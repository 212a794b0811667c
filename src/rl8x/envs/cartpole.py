"""CartPole: balance a pole on a cart that is pushed left or right."""

from __future__ import annotations

import math

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

from rl8x.envs.base import Env, Observation, Outcome, Parameter, Parameters, State
from rl8x.envs.canvas import BLUE, FAINT, GREY, INK, ORANGE, Canvas, CopyParameters, CopyState, Past
from rl8x.envs.steps import wrapped_angle

X_LIMIT_M = 2.4
THETA_LIMIT_RAD = 12 * 2 * math.pi / 360
START_SPREAD = 0.05

PARAMETERS = {
    "gravity": Parameter(default=9.8, low=0.1, high=100.0, unit="m/s^2", description="gravitational acceleration"),
    "masscart": Parameter(default=1.0, low=0.05, high=100.0, unit="kg", description="mass of the cart"),
    "masspole": Parameter(default=0.1, low=0.005, high=10.0, unit="kg", description="mass of the pole"),
    "length": Parameter(default=0.5, low=0.025, high=10.0, unit="m", description="half of the pole's length"),
    "force_mag": Parameter(default=10.0, low=0.1, high=1000.0, unit="N", description="force of a push"),
    "tau": Parameter(default=0.02, low=0.001, high=0.1, unit="s", description="time between two states"),
}


def cart_pole_dynamics(physics: Tensor, force: Tensor, parameters: Parameters) -> Tensor:
    """Return `physics`, `[num_envs, 4]` as in `CartPole.observe`, after one Euler step under a force, `[num_envs]`.

    temp       = (force + m_p l theta_dot^2 sin(theta)) / m
    theta_acc  = (g sin(theta) - cos(theta) temp) / (l (4/3 - m_p cos(theta)^2 / m))
    x_acc      = temp - m_p l theta_acc cos(theta) / m
    """
    _, x_dot, theta, theta_dot = physics.unbind(-1)
    mass = parameters["masspole"] + parameters["masscart"]
    length = parameters["length"]
    pole_share = parameters["masspole"] / mass
    lever = pole_share * length
    cos, sin = theta.cos(), theta.sin()
    temp = force / mass + lever * theta_dot.square() * sin
    theta_acc = (parameters["gravity"] * sin - cos * temp) / (length * (4.0 / 3.0 - pole_share * cos.square()))
    x_acc = temp - lever * theta_acc * cos
    rates = torch.stack((x_dot, x_acc, theta_dot, theta_acc), dim=-1)
    return torch.addcmul(physics, rates, parameters["tau"].unsqueeze(-1))


class _OnCart(Env):
    """A pole on a cart that starts near the upright rest position."""

    parameters = PARAMETERS
    reset_noise = 4
    render_fps = 50.0

    def initial_state(self, parameters: Parameters, noise: Tensor) -> State:
        """Start near the upright rest position, each number of `physics`, `[num_envs, 4]`, uniform in +-0.05."""
        return {"physics": noise * (2 * START_SPREAD) - START_SPREAD}

    def draw(self, canvas: Canvas, state: CopyState, parameters: CopyParameters, past: Past) -> None:
        """Draw cart and pole on their track; beyond the track's ends the view follows the cart."""
        x, _, theta, _ = map(float, state["physics"])
        length = 2 * parameters["length"]
        relative = (parameters[name] / PARAMETERS[name].default for name in ("masscart", "masspole"))
        heavy, thick = (min(1.7, max(0.6, float(mass ** (1 / 3)))) for mass in relative)
        width, height = 0.66 * heavy, 0.36 * heavy
        shift = x - max(-X_LIMIT_M, min(X_LIMIT_M, x))
        lowest = -0.9 if self.terminates else -max(1.6, 1.15 * length)
        canvas.view((shift - 2.9, shift + 2.9), (lowest, max(2.95, height + 0.1 + 1.15 * length)))
        (left, right), (bottom, _) = canvas.span
        canvas.box(((left + right) / 2, (bottom - 0.13) / 2), (right - left, -0.13 - bottom), FAINT, strength=0.55)
        canvas.line([(left, -0.13), (right, -0.13)], 0.025, GREY)
        for tick in range(math.floor(left), math.ceil(right) + 1):
            canvas.line([(tick, -0.13), (tick, -0.2)], 0.02, GREY)
        for end in (-X_LIMIT_M, X_LIMIT_M) if self.terminates else ():
            canvas.line([(end, -0.13), (end, 0.07)], 0.05, GREY)
        for wheel in (-0.3, 0.3):
            canvas.circle((x + wheel * width, 0.0), 0.12, INK)
            canvas.circle((x + wheel * width, 0.0), 0.045, FAINT)
        canvas.box((x, 0.05 + height / 2), (width, height), BLUE)
        pivot = x, 0.05 + 0.8 * height
        tip = pivot[0] + length * math.sin(theta), pivot[1] + length * math.cos(theta)
        canvas.line([pivot, tip], 0.11 * thick, ORANGE)
        canvas.circle(pivot, 0.045, INK)


class CartPole(_OnCart):
    """Keep the pole within 12 degrees and the cart within 2.4 m; reward 1 a step, 500 steps at most.

    Actions, `[num_envs]` int64: 0 pushes left, 1 pushes right. Observations, `[num_envs, 4]`: x (m), x_dot (m/s), theta
    (rad, 0 is upright), theta_dot (rad/s).

    Source: Barto, Sutton and Anderson 1983, doi:10.1109/TSMC.1983.6313077; the equations are those of Gymnasium 1.4's
    CartPole-v1, after Florian 2007, "Correct equations for the dynamics of the cart-pole system".
    """

    single_observation_space = spaces.Box(
        np.array([-2 * X_LIMIT_M, -np.inf, -2 * THETA_LIMIT_RAD, -np.inf], dtype=np.float32),
        np.array([2 * X_LIMIT_M, np.inf, 2 * THETA_LIMIT_RAD, np.inf], dtype=np.float32),
    )
    single_action_space = spaces.Discrete(2)
    default_time_limit = 500
    terminates = True

    def transition(self, state: State, actions: Tensor, parameters: Parameters, noise: Tensor) -> Outcome:
        """Push to the left (0) or to the right (1) for one step, by actions `[num_envs]`."""
        force = (actions * 2 - 1) * parameters["force_mag"]
        physics = cart_pole_dynamics(state["physics"], force, parameters)
        terminated = (physics[:, 0].abs() > X_LIMIT_M) | (physics[:, 2].abs() > THETA_LIMIT_RAD)
        return {"physics": physics}, torch.ones_like(force), terminated

    def observe(self, state: State, parameters: Parameters) -> Observation:
        """Return x, x_dot, theta and theta_dot as they are, `[num_envs, 4]`."""
        return state["physics"]


class CartPoleInfinite(_OnCart):
    """Bring cart and pole to the upright rest position and stay there; episodes never end.

    Actions, `[num_envs]` int64: 0 pushes left, 1 does nothing, 2 pushes right. Observations, `[num_envs, 5]`: x (m),
    x_dot (m/s), cos(theta), sin(theta), theta_dot (rad/s). The reward is minus the distances from the rest position,
    `-|x| - |x_dot| - |theta| - |theta_dot|`, with theta in [-pi, pi).

    Source: rl8 1.0 has such a task; the equations are those of `CartPole`.
    """

    single_observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float32)
    single_action_space = spaces.Discrete(3)

    def transition(self, state: State, actions: Tensor, parameters: Parameters, noise: Tensor) -> Outcome:
        """Push to the left (0), not at all (1) or to the right (2) for one step, by actions `[num_envs]`."""
        force = (actions - 1) * parameters["force_mag"]
        physics = cart_pole_dynamics(state["physics"], force, parameters)
        physics[:, 2] = wrapped_angle(physics[:, 2])
        rewards = -physics.abs().sum(-1)
        return {"physics": physics}, rewards, torch.zeros_like(rewards, dtype=torch.bool)

    def observe(self, state: State, parameters: Parameters) -> Observation:
        """Return x, x_dot, cos(theta), sin(theta) and theta_dot, `[num_envs, 5]`."""
        x, x_dot, theta, theta_dot = state["physics"].unbind(-1)
        return torch.stack((x, x_dot, theta.cos(), theta.sin(), theta_dot), dim=-1)

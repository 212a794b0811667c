"""CartPole-v1 and Pendulum-v1 in torch, many copies at once, each restarted in the step that ends its episode.

The equations are Gymnasium's. These are the environments of the libraries that step tensors; an adapter in each
library's file gives them that library's interface.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """What a step led to; every field has a row for each copy."""

    obs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor


class VectorEnv:
    """Time limits and restarts; a subclass supplies the physics.

    Restarts go through `torch.where` on fresh states for all copies: no index, no copy to the host.

    Args:
        num_envs: Copies.
        device: Where they live.
    """

    time_limit: int

    def __init__(self, num_envs: int, device: str = "cpu") -> None:
        self.num_envs = num_envs
        self.device = device
        self.lengths = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.state = self.fresh()

    def fresh(self) -> Tensor:
        """Draw a state for each copy in which an episode starts."""
        raise NotImplementedError

    def observe(self, state: Tensor) -> Tensor:
        """Return what is seen of states."""
        raise NotImplementedError

    def move(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next states, rewards, and whether the task ended there."""
        raise NotImplementedError

    def reset(self) -> Tensor:
        """Start an episode in every copy."""
        self.state = self.fresh()
        self.lengths = torch.zeros_like(self.lengths)
        return self.observe(self.state)

    def step(self, actions: Tensor) -> Step:
        """Move every copy, and restart those whose episode ended."""
        state, rewards, terminated = self.move(actions)
        lengths = self.lengths + 1
        truncated = (lengths >= self.time_limit) & ~terminated
        ended = terminated | truncated
        self.state = torch.where(ended.unsqueeze(-1), self.fresh(), state)
        self.lengths = lengths * ~ended
        return Step(self.observe(self.state), rewards, terminated, truncated)


class CartPole(VectorEnv):
    """CartPole-v1."""

    time_limit = 500

    def fresh(self) -> Tensor:
        """Draw each number within 0.05 of rest."""
        return torch.empty(self.num_envs, 4, device=self.device).uniform_(-0.05, 0.05)

    def observe(self, state: Tensor) -> Tensor:
        """Return the state as it is; `step` makes a new one each time."""
        return state

    def move(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push left (0) or right (1)."""
        _, x_dot, theta, theta_dot = self.state.unbind(-1)
        cos, sin = theta.cos(), theta.sin()
        force = actions.reshape(-1).to(torch.float32) * 20.0 - 10.0
        temp = (force + 0.05 * theta_dot * theta_dot * sin) / 1.1
        theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - (0.1 / 1.1) * cos * cos))
        x_acc = temp - (0.05 / 1.1) * theta_acc * cos
        state = torch.add(self.state, torch.stack((x_dot, x_acc, theta_dot, theta_acc), dim=-1), alpha=0.02)
        terminated = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 12 * 2 * math.pi / 360)
        return state, torch.ones_like(force), terminated


class Pendulum(VectorEnv):
    """Pendulum-v1."""

    time_limit = 200

    def fresh(self) -> Tensor:
        """Draw any angle and a small speed."""
        state = torch.empty(self.num_envs, 2, device=self.device).uniform_(-1.0, 1.0)
        state[:, 0] *= math.pi
        return state

    def observe(self, state: Tensor) -> Tensor:
        """Return cosine and sine of the angle, and the speed."""
        theta, theta_dot = state.unbind(-1)
        return torch.stack((theta.cos(), theta.sin(), theta_dot), dim=-1)

    def move(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Apply torques."""
        theta, theta_dot = self.state.unbind(-1)
        torque = actions.reshape(-1).clamp(-2.0, 2.0)
        rewards = -(theta * theta + 0.1 * theta_dot * theta_dot + 0.001 * torque * torque)
        theta_dot = (theta_dot + (15.0 * theta.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        theta = theta + theta_dot * 0.05
        theta = theta - torch.floor((theta + math.pi) * (0.5 / math.pi)) * (2 * math.pi)
        return torch.stack((theta, theta_dot), dim=-1), rewards, torch.zeros_like(rewards, dtype=torch.bool)


def make(name: str, num_envs: int, device: str = "cpu") -> VectorEnv:
    """Make copies of `"cartpole"` or `"pendulum"`."""
    return {"cartpole": CartPole, "pendulum": Pendulum}[name](num_envs, device)

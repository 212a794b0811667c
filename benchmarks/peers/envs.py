"""CartPole-v1 and Pendulum-v1, many copies at once, each restarted in the step that ends its episode.

The equations are Gymnasium's, in operations that torch and numpy share. `TorchEnv` is for the libraries that step
tensors, `NumpyEnv` for those that step arrays, and every library's policy is evaluated in it; an adapter in each
library's file gives them that library's interface. torch need not be there for `NumpyEnv`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from benchmarks.works import OBSERVATIONS

Array = Any  # of numpy, or a tensor


class CartPole:
    """CartPole-v1."""

    time_limit = 500
    starts = (0.05, 0.05, 0.05, 0.05)  # each number starts at most that far from rest

    @staticmethod
    def observe(xp: Any, state: Array) -> Array:
        """Return the state as it is; `move` makes a new one each time."""
        return state

    @staticmethod
    def move(xp: Any, state: Array, actions: Array) -> tuple[Array, Array, Array]:
        """Push left (0) or right (1); returns the next states, rewards, and whether the task ended there."""
        x_dot, theta, theta_dot = state[:, 1], state[:, 2], state[:, 3]
        cos, sin = xp.cos(theta), xp.sin(theta)
        force = actions * 20.0 - 10.0
        temp = (force + 0.05 * theta_dot * theta_dot * sin) / 1.1
        theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - (0.1 / 1.1) * cos * cos))
        x_acc = temp - (0.05 / 1.1) * theta_acc * cos
        state = state + 0.02 * xp.stack((x_dot, x_acc, theta_dot, theta_acc), 1)
        terminated = (xp.abs(state[:, 0]) > 2.4) | (xp.abs(state[:, 2]) > 12 * 2 * math.pi / 360)
        return state, xp.ones_like(force), terminated


class Pendulum:
    """Pendulum-v1."""

    time_limit = 200
    starts = (math.pi, 1.0)

    @staticmethod
    def observe(xp: Any, state: Array) -> Array:
        """Return cosine and sine of the angle, and the speed."""
        theta = state[:, 0]
        return xp.stack((xp.cos(theta), xp.sin(theta), state[:, 1]), 1)

    @staticmethod
    def move(xp: Any, state: Array, actions: Array) -> tuple[Array, Array, Array]:
        """Apply torques; returns the next states, rewards, and that the task ended nowhere."""
        theta, theta_dot = state[:, 0], state[:, 1]
        torque = xp.clip(actions, -2.0, 2.0)
        rewards = -(theta * theta + 0.1 * theta_dot * theta_dot + 0.001 * torque * torque)
        theta_dot = xp.clip(theta_dot + (15.0 * xp.sin(theta) + 3.0 * torque) * 0.05, -8.0, 8.0)
        theta = theta + theta_dot * 0.05
        theta = theta - xp.floor((theta + math.pi) * (0.5 / math.pi)) * (2 * math.pi)
        return xp.stack((theta, theta_dot), 1), rewards, xp.zeros_like(rewards, dtype=bool)


TASKS = {"cartpole": CartPole, "pendulum": Pendulum}


def spaces_of(name: str) -> tuple[Any, Any]:
    """Return the spaces of observations and actions, as Gymnasium has them."""
    from gymnasium.spaces import Box, Discrete

    seen = Box(-np.inf, np.inf, (OBSERVATIONS[name],))
    return seen, Discrete(2) if name == "cartpole" else Box(-2.0, 2.0, (1,))


class Step(NamedTuple):
    """What a step led to; every field has a row for each copy. The last three are numpy's alone."""

    obs: Array
    rewards: Array
    terminated: Array
    truncated: Array
    final_obs: Array = None
    returns: Array = None
    lengths: Array = None


class TorchEnv:
    """Copies that are tensors.

    Restarts go through `torch.where` on fresh states for all copies: no index, no copy to the host.
    """

    def __init__(self, name: str, num_envs: int, device: str = "cpu") -> None:
        import torch

        self.xp, self.task = torch, TASKS[name]
        self.num_envs, self.device, self.time_limit = num_envs, device, self.task.time_limit
        self.starts = torch.tensor(self.task.starts, device=device)
        self.reset()

    def fresh(self) -> Array:
        """Draw a state for each copy in which an episode starts."""
        return self.xp.empty(self.num_envs, len(self.starts), device=self.device).uniform_(-1.0, 1.0) * self.starts

    def reset(self) -> Array:
        """Start an episode in every copy."""
        self.state = self.fresh()
        self.lengths = self.xp.zeros(self.num_envs, dtype=self.xp.int64, device=self.device)
        return self.task.observe(self.xp, self.state)

    def step(self, actions: Array) -> Step:
        """Move every copy, and restart those whose episode ended."""
        state, rewards, terminated = self.task.move(self.xp, self.state, actions.reshape(-1).to(self.xp.float32))
        lengths = self.lengths + 1
        truncated = (lengths >= self.time_limit) & ~terminated
        ended = terminated | truncated
        self.state = self.xp.where(ended.unsqueeze(-1), self.fresh(), state)
        self.lengths = lengths * ~ended
        return Step(self.task.observe(self.xp, self.state), rewards, terminated, truncated)


class NumpyEnv:
    """Copies that are arrays, with returns and lengths of their episodes."""

    def __init__(self, name: str, num_envs: int, seed: int) -> None:
        self.task, self.num_envs, self.random = TASKS[name], num_envs, np.random.default_rng(seed)
        self.reset()

    def fresh(self, count: int) -> Array:
        """Draw states in which episodes start."""
        starts = np.array(self.task.starts)
        return (self.random.uniform(-1.0, 1.0, (count, len(starts))) * starts).astype(np.float32)

    def reset(self) -> Array:
        """Start an episode in every copy."""
        self.state = self.fresh(self.num_envs)
        self.lengths = np.zeros(self.num_envs, dtype=np.int64)
        self.returns = np.zeros(self.num_envs, dtype=np.float32)
        return self.task.observe(np, self.state)

    def step(self, actions: Array) -> Step:
        """Move every copy, and restart those whose episode ended."""
        self.state, rewards, terminated = self.task.move(np, self.state, actions.reshape(-1).astype(np.float32))
        self.lengths += 1
        self.returns += rewards
        truncated = (self.lengths >= self.task.time_limit) & ~terminated
        final_obs = obs = self.task.observe(np, self.state)
        lengths, returns = self.lengths.copy(), self.returns.copy()
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            self.state = self.state.copy()
            self.state[ended] = self.fresh(ended.size)
            self.lengths[ended] = 0
            self.returns[ended] = 0
            obs = final_obs.copy()
            obs[ended] = self.task.observe(np, self.state[ended])
        return Step(obs, rewards, terminated, truncated, final_obs, returns, lengths)

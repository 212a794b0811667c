"""CartPole-v1 and Pendulum-v1 in numpy, many copies at once, each restarted in the step that ends its episode.

The equations are Gymnasium's. These are the environments of the libraries that step numpy arrays, and the ones in which
every library's policy is evaluated.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Step(NamedTuple):
    """What a step led to; every field has a row for each copy."""

    obs: Array
    rewards: Array
    terminated: Array
    truncated: Array
    final_obs: Array
    returns: Array
    lengths: Array


class VectorEnv:
    """Time limits, restarts, returns and lengths; a subclass supplies the physics.

    Args:
        num_envs: Copies.
        seed: Seed of the restarts.
    """

    time_limit: int

    def __init__(self, num_envs: int, seed: int) -> None:
        self.num_envs = num_envs
        self.random = np.random.default_rng(seed)
        self.lengths = np.zeros(num_envs, dtype=np.int64)
        self.returns = np.zeros(num_envs, dtype=np.float32)
        self.state = self.fresh(num_envs)

    def fresh(self, count: int) -> Array:
        """Draw states in which episodes start."""
        raise NotImplementedError

    def observe(self, state: Array) -> Array:
        """Return what is seen of states."""
        raise NotImplementedError

    def move(self, actions: Array) -> tuple[Array, Array, Array]:
        """Return the next states, rewards, and whether the task ended there."""
        raise NotImplementedError

    def reset(self) -> Array:
        """Start an episode in every copy."""
        self.state = self.fresh(self.num_envs)
        self.lengths[:] = 0
        self.returns[:] = 0
        return self.observe(self.state)

    def step(self, actions: Array) -> Step:
        """Move every copy, and restart those whose episode ended."""
        self.state, rewards, terminated = self.move(actions)
        self.lengths += 1
        self.returns += rewards
        truncated = (self.lengths >= self.time_limit) & ~terminated
        final_obs = obs = self.observe(self.state)
        lengths, returns = self.lengths.copy(), self.returns.copy()
        ended = np.flatnonzero(terminated | truncated)
        if ended.size:
            self.state[ended] = self.fresh(ended.size)
            self.lengths[ended] = 0
            self.returns[ended] = 0
            obs = final_obs.copy()
            obs[ended] = self.observe(self.state[ended])
        return Step(obs, rewards, terminated, truncated, final_obs, returns, lengths)


class CartPole(VectorEnv):
    """CartPole-v1."""

    time_limit = 500

    def fresh(self, count: int) -> Array:
        """Draw each number within 0.05 of rest."""
        return self.random.uniform(-0.05, 0.05, (count, 4)).astype(np.float32)

    def observe(self, state: Array) -> Array:
        """Return the state as it is."""
        return state.copy()

    def move(self, actions: Array) -> tuple[Array, Array, Array]:
        """Push left (0) or right (1)."""
        _, x_dot, theta, theta_dot = self.state.T
        cos, sin = np.cos(theta), np.sin(theta)
        force = actions.reshape(-1).astype(np.float32) * 20.0 - 10.0
        temp = (force + 0.05 * theta_dot * theta_dot * sin) / 1.1
        theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - (0.1 / 1.1) * cos * cos))
        x_acc = temp - (0.05 / 1.1) * theta_acc * cos
        state = self.state + 0.02 * np.stack((x_dot, x_acc, theta_dot, theta_acc), axis=1)
        state = state.astype(np.float32, copy=False)
        terminated = (np.abs(state[:, 0]) > 2.4) | (np.abs(state[:, 2]) > 12 * 2 * math.pi / 360)
        return state, np.ones(self.num_envs, dtype=np.float32), terminated


class Pendulum(VectorEnv):
    """Pendulum-v1."""

    time_limit = 200

    def fresh(self, count: int) -> Array:
        """Draw any angle and a small speed."""
        return (self.random.uniform(-1.0, 1.0, (count, 2)) * (math.pi, 1.0)).astype(np.float32)

    def observe(self, state: Array) -> Array:
        """Return cosine and sine of the angle, and the speed."""
        theta = state[:, 0]
        return np.stack((np.cos(theta), np.sin(theta), state[:, 1]), axis=1)

    def move(self, actions: Array) -> tuple[Array, Array, Array]:
        """Apply torques."""
        theta, theta_dot = self.state.T
        torque = np.clip(actions.reshape(-1), -2.0, 2.0).astype(np.float32)
        rewards = -(theta * theta + 0.1 * theta_dot * theta_dot + 0.001 * torque * torque)
        theta_dot = np.clip(theta_dot + (15.0 * np.sin(theta) + 3.0 * torque) * 0.05, -8.0, 8.0)
        theta = theta + theta_dot * 0.05
        theta = theta - np.floor((theta + math.pi) * (0.5 / math.pi)) * (2 * math.pi)
        state = np.stack((theta, theta_dot), axis=1).astype(np.float32, copy=False)
        return state, rewards.astype(np.float32, copy=False), np.zeros(self.num_envs, dtype=bool)


def make(name: str, num_envs: int, seed: int) -> VectorEnv:
    """Make copies of `"cartpole"` or `"pendulum"`."""
    return {"cartpole": CartPole, "pendulum": Pendulum}[name](num_envs, seed)

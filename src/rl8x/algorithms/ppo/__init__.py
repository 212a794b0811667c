"""Proximal policy optimisation."""

from rl8x.algorithms.ppo.config import PPOConfig
from rl8x.algorithms.ppo.ppo import PPO

__all__ = ["PPO", "PPOConfig"]

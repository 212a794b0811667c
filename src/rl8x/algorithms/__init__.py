"""Algorithms: each gathers experience with `collect()` and learns from it with `step()`."""

from rl8x.algorithms.base import AlgorithmConfig, GenericAlgorithmBase
from rl8x.algorithms.ppo.config import PPOConfig
from rl8x.algorithms.ppo.ppo import PPO

__all__ = ["PPO", "AlgorithmConfig", "GenericAlgorithmBase", "PPOConfig"]

"""Algorithms: each gathers experience with `collect()` and learns from it with `step()`."""

from rl8x.algorithms.base import AlgorithmConfig, GenericAlgorithmBase
from rl8x.algorithms.ppo import PPO
from rl8x.algorithms.ppo_config import PPOConfig

__all__ = ["PPO", "AlgorithmConfig", "GenericAlgorithmBase", "PPOConfig"]

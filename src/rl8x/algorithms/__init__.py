"""Algorithms: each learns with `step()`; one with an environment gathers experience with `collect()` before it."""

from rl8x.algorithms.base import AlgorithmConfig, GenericAlgorithmBase
from rl8x.algorithms.bc import BC, BCConfig
from rl8x.algorithms.distillation import Distillation, DistillationConfig, distill
from rl8x.algorithms.dqn import DQN, DQNConfig
from rl8x.algorithms.iql import IQL, IQLConfig
from rl8x.algorithms.off_policy import Learner, LearnerConfig, OffPolicyConfig
from rl8x.algorithms.on_policy import OnPolicyAlgorithm, OnPolicyConfig
from rl8x.algorithms.online import OnlineConfig
from rl8x.algorithms.ppo import PPO, PPOConfig
from rl8x.algorithms.pqn import PQN, PQNConfig
from rl8x.algorithms.sac import SAC, FastSACConfig, FlashSACConfig, SACConfig
from rl8x.algorithms.td3 import TD3, FastTD3Config, TD3Config

__all__ = [
    "BC",
    "DQN",
    "IQL",
    "PPO",
    "PQN",
    "SAC",
    "TD3",
    "AlgorithmConfig",
    "BCConfig",
    "DQNConfig",
    "Distillation",
    "DistillationConfig",
    "FastSACConfig",
    "FastTD3Config",
    "FlashSACConfig",
    "GenericAlgorithmBase",
    "IQLConfig",
    "Learner",
    "LearnerConfig",
    "OffPolicyConfig",
    "OnPolicyAlgorithm",
    "OnPolicyConfig",
    "OnlineConfig",
    "PPOConfig",
    "PQNConfig",
    "SACConfig",
    "TD3Config",
    "distill",
]

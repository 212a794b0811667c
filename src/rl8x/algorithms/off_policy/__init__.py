"""The base of algorithms that learn from stored transitions: networks, updates, and the source of rows."""

from rl8x.algorithms.off_policy.config import ActorCriticConfig, LearnerConfig, OffPolicyConfig, ValueConfig
from rl8x.algorithms.off_policy.learner import Learner

__all__ = ["ActorCriticConfig", "Learner", "LearnerConfig", "OffPolicyConfig", "ValueConfig"]

"""The base of algorithms that learn from stored transitions: networks, updates, a replay or a data set."""

from rl8x.algorithms.off_policy.config import ActorCriticConfig, LearnerConfig, OffPolicyConfig, ValueConfig
from rl8x.algorithms.off_policy.learner import Learner
from rl8x.algorithms.off_policy.off_policy import OffPolicyAlgorithm
from rl8x.algorithms.off_policy.offline import OfflineAlgorithm

__all__ = [
    "ActorCriticConfig",
    "Learner",
    "LearnerConfig",
    "OffPolicyAlgorithm",
    "OffPolicyConfig",
    "OfflineAlgorithm",
    "ValueConfig",
]

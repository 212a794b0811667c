"""The base of algorithms that learn from rollouts: collecting one, and epochs of minibatches of it."""

from rl8x.algorithms.on_policy.algorithm import OnPolicyAlgorithm
from rl8x.algorithms.on_policy.config import OnPolicyConfig
from rl8x.algorithms.on_policy.minibatches import SequenceBatch
from rl8x.algorithms.on_policy.update import Objective

__all__ = ["Objective", "OnPolicyAlgorithm", "OnPolicyConfig", "SequenceBatch"]

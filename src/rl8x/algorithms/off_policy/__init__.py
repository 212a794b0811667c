"""What algorithms that learn from a replay share: collecting into it, the updates that are due for it, networks."""

from rl8x.algorithms.off_policy.config import OffPolicyConfig
from rl8x.algorithms.off_policy.off_policy import OffPolicyAlgorithm

__all__ = ["OffPolicyAlgorithm", "OffPolicyConfig"]

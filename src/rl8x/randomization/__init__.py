"""Distributions of an environment's physical parameters: those that stand still, and those that move with training."""

from rl8x.randomization.adaptive import Adaptive
from rl8x.randomization.base import ParameterDistribution
from rl8x.randomization.curriculum import MovingDistribution
from rl8x.randomization.distributions import KINDS, Choice, Grid, LogUniform, Normal, Uniform, from_dict
from rl8x.randomization.learnable import Learnable
from rl8x.randomization.scheduled import Scheduled

KINDS.update({Scheduled.kind: Scheduled, Adaptive.kind: Adaptive, Learnable.kind: Learnable})

__all__ = [
    "KINDS",
    "Adaptive",
    "Choice",
    "Grid",
    "Learnable",
    "LogUniform",
    "MovingDistribution",
    "Normal",
    "ParameterDistribution",
    "Scheduled",
    "Uniform",
    "from_dict",
]

"""Distributions of an environment's physical parameters: stationary ones, and ones that move during training."""

from rl8x.randomization.adaptive import Adaptive as Adaptive
from rl8x.randomization.curriculum import MovingDistribution as MovingDistribution
from rl8x.randomization.distributions import KINDS as KINDS
from rl8x.randomization.distributions import Choice as Choice
from rl8x.randomization.distributions import Grid as Grid
from rl8x.randomization.distributions import LogUniform as LogUniform
from rl8x.randomization.distributions import Normal as Normal
from rl8x.randomization.distributions import ParameterDistribution as ParameterDistribution
from rl8x.randomization.distributions import Uniform as Uniform
from rl8x.randomization.distributions import from_dict as from_dict
from rl8x.randomization.learnable import Learnable as Learnable
from rl8x.randomization.scheduled import Scheduled as Scheduled

for _each in (Scheduled, Adaptive, Learnable):
    KINDS[_each.kind] = _each

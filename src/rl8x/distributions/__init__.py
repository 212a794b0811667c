"""Distributions over actions, made from a model's features."""

from rl8x.distributions.base import BUILTIN as BUILTIN
from rl8x.distributions.base import Actions as Actions
from rl8x.distributions.base import Distribution as Distribution
from rl8x.distributions.base import Params as Params
from rl8x.distributions.base import make_distribution as make_distribution
from rl8x.distributions.composite import Composite as Composite
from rl8x.distributions.continuous import NoisyDeterministic as NoisyDeterministic
from rl8x.distributions.continuous import Normal as Normal
from rl8x.distributions.continuous import SquashedNormal as SquashedNormal
from rl8x.distributions.discrete import Bernoulli as Bernoulli
from rl8x.distributions.discrete import Categorical as Categorical
from rl8x.distributions.discrete import EpsilonGreedy as EpsilonGreedy
from rl8x.distributions.discrete import MultiCategorical as MultiCategorical

BUILTIN.update(
    categorical=Categorical,
    normal=Normal,
    squashed_normal=SquashedNormal,
    multi_categorical=MultiCategorical,
    bernoulli=Bernoulli,
    composite=Composite,
    epsilon_greedy=EpsilonGreedy,
)

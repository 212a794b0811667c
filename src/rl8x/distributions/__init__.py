"""Distributions over actions, made from a model's features."""

from rl8x.distributions.base import BUILTIN, Actions, Distribution, Params, make_distribution
from rl8x.distributions.composite import Composite
from rl8x.distributions.continuous import NoisyDeterministic, Normal, SquashedNormal
from rl8x.distributions.discrete import Bernoulli, Categorical, EpsilonGreedy, MultiCategorical

BUILTIN.update(
    categorical=Categorical,
    normal=Normal,
    squashed_normal=SquashedNormal,
    multi_categorical=MultiCategorical,
    bernoulli=Bernoulli,
    composite=Composite,
    epsilon_greedy=EpsilonGreedy,
)

__all__ = [
    "BUILTIN",
    "Actions",
    "Bernoulli",
    "Categorical",
    "Composite",
    "Distribution",
    "EpsilonGreedy",
    "MultiCategorical",
    "NoisyDeterministic",
    "Normal",
    "Params",
    "SquashedNormal",
    "make_distribution",
]

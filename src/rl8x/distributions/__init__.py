"""Distributions over actions, made from a model's features."""

from rl8x.distributions.base import Actions, Distribution, Params
from rl8x.distributions.bernoulli import Bernoulli
from rl8x.distributions.categorical import Categorical, MultiCategorical
from rl8x.distributions.composite import Composite
from rl8x.distributions.epsilon_greedy import EpsilonGreedy
from rl8x.distributions.noisy_deterministic import NoisyDeterministic
from rl8x.distributions.normal import Normal
from rl8x.distributions.registry import BUILTIN, make_distribution
from rl8x.distributions.squashed_normal import SquashedNormal

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

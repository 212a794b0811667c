"""What distributions refuse: calls, the error of each, and what it says."""

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text

from rl8x.distributions import Categorical, Composite, NoisyDeterministic, Normal, SquashedNormal, make_distribution

BOX, HALF, TWO = Box(-1.0, 1.0, (2,)), Box(-np.inf, 1.0, (2,)), Discrete(2)
MIXED = Dict({"go": Discrete(3), "steer": BOX})
SHARE = "`epsilon` must be at least 0 and at most 1"
REFUSED = [
    (ValueError, "Did you mean 'categorical'", lambda: make_distribution("categorial", TWO)),
    (ValueError, "Did you mean 'std'.*initial_std", lambda: make_distribution(None, BOX, {"sdt": "free"})),
    (ValueError, "Categorical takes nothing in `dist", lambda: make_distribution(None, TWO, {"std": "free"})),
    (ValueError, "Discrete, Box, MultiDiscrete, MultiBinary, Dict, Tuple", lambda: make_distribution(None, Text(3))),
    (TypeError, "Box", lambda: make_distribution("normal", TWO)),
    (TypeError, "MultiDiscrete", lambda: make_distribution("multi_categorical", Discrete(3))),
    (TypeError, "MultiBinary", lambda: make_distribution("bernoulli", TWO)),
    (TypeError, "EpsilonGreedy needs a Discrete", lambda: make_distribution("epsilon_greedy", MultiDiscrete([2, 3]))),
    (ValueError, SHARE, lambda: make_distribution("epsilon_greedy", TWO, {"epsilon": 1.1})),
    (TypeError, "subclass of Distribution", lambda: make_distribution(3, BOX)),
    (TypeError, "discrete", lambda: Categorical(TWO).rsample(None, torch.rand(1, 1))),
    (TypeError, "floating-point", lambda: Normal(Box(0, 255, (2,), np.uint8))),
    (ValueError, "'free' or 'state'", lambda: Normal(BOX, std="fixed")),
    (ValueError, "initial_std", lambda: Normal(BOX, initial_std=100.0)),
    (ValueError, "smaller first", lambda: Normal(BOX, log_std_bounds=(1.0, -1.0))),
    (ValueError, "two numbers", lambda: Normal(BOX, log_std_bounds=3.0)),
    (ValueError, "finite bounds", lambda: SquashedNormal(HALF)),
    (TypeError, "NoisyDeterministic needs a Box action space; got Discrete", lambda: NoisyDeterministic(TWO)),
    (ValueError, r"finite bounds; got Box.*or use Normal", lambda: NoisyDeterministic(HALF)),
    *(
        (ValueError, "`noise_std` must be greater than 0", lambda options=options: NoisyDeterministic(BOX, **options))
        for options in ({"noise_std": 0.0}, {"noise_std": 0.1, "noise_std_min": 0.2}, {"noise_std": math.nan})
    ),
    (NotImplementedError, "NoisyDeterministic defines no `kl`", lambda: NoisyDeterministic(BOX).kl(None, None)),
    (TypeError, "Dict or Tuple", lambda: Composite(BOX)),
    (ValueError, "at least one part", lambda: Composite(Dict({}))),
    (ValueError, "Did you mean 'steer'", lambda: Composite(MIXED, ster={})),
    (TypeError, "must map names", lambda: Composite(MIXED, steer="squashed_normal")),
]


@pytest.mark.parametrize(("error", "message", "make"), REFUSED)
def test_what_is_not_legal_is_refused_with_what_is(error, message, make):
    with pytest.raises(error, match=message):
        make()

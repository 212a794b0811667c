"""What layers, models, distributions and functions of tensors refuse: calls, and what the error says."""

import math
import threading

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text

from rl8x import functional, nn
from rl8x.distributions import Categorical, Composite, NoisyDeterministic, Normal, SquashedNormal, make_distribution
from rl8x.models import AttentionModel, CNNModel, GRUModel, MLPModel, Model, make_model
from rl8x.models.encoders import FlatObservations

WHOLE = "must be .*whole number.? of at least 1"
LAYERS = [
    *(("sizes", lambda sizes=sizes: nn.MLP(sizes)) for sizes in ([], [3, 0], [3, 2.5], "34")),
    *((f"`num_inputs` {WHOLE}; got", lambda width=width: nn.linear(width, 3)) for width in (0, 2.5, True, "3", None)),
    (f"`num_outputs` {WHOLE}; got", lambda: nn.linear(3, 0)),
    (r"reads rows \[..., 3\]; got \[5, 4\]", lambda: nn.MLP([3, 2])(torch.rand(5, 4))),
    ("no activation 'squared-relu'. Did you mean 'squared_relu'", lambda: nn.activation("squared-relu")),
    ("must divide the width; got 3 and 8", lambda: nn.Attention(8, 3)),
    (f"`num_heads` {WHOLE}", lambda: nn.Attention(8, 0)),
    (f"`context_width` {WHOLE}", lambda: nn.CrossAttention(8, 1, context_width=0)),
    (f"`sizes` {WHOLE}", lambda: nn.CrossAttention(8, 1, hidden_size=0)),
    (f"`num_layers` {WHOLE}", lambda: nn.SelfAttentionStack(8, 2, 0)),
    (f"`max_length` {WHOLE}", lambda: nn.PositionalEmbedding(0, 8)),
    ("6 elements is longer than `max_length`, which is 5", lambda: nn.PositionalEmbedding(5, 3)(torch.randn(2, 6, 3))),
    (f"`num_outputs` {WHOLE}", lambda: nn.Skip("none", 8, 0)),
    ("Did you mean 'residual'", lambda: nn.Skip("residul", 3, 3)),
    ("equal widths; got 3 and 4", lambda: nn.Skip("residual", 3, 4)),
    (f"`num_latents` {WHOLE}; got 0", lambda: nn.Perceiver(6, 0, 8)),
    ("latents keep their width", lambda: nn.Perceiver(6, 4, 8, skip="cat")),
    (f"`query_width` {WHOLE}; got 0", lambda: nn.PointerNetwork(3, 0, 5)),
]


# -- models and encoders


FIVE, PICTURE = Box(-1.0, 1.0, (5,), np.float32), Box(0, 255, (8, 9, 3), np.uint8)


class Mine(Model):
    def __init__(self, observation_space, num_features, width=3):
        super().__init__(observation_space, num_features)
        self.width = width


LOCKED = Mine(FIVE, 2)
LOCKED.lock = threading.Lock()
MODELS = [
    ("Did you mean 'lstm'.*mlp, lstm, gru, cnn, attention", lambda: make_model("lsmt", FIVE, 2)),
    ("Did you mean 'lstm'", lambda: make_model("LSTM", FIVE, 2)),
    ("'hidden_size' of MLPModel.* It is 'hidden_sizes' here", lambda: make_model("mlp", FIVE, 2, {"hidden_size": 3})),
    ("It is 'hidden_size' here", lambda: make_model("lstm", FIVE, 2, {"hidden_sizes": 3})),
    ("width", lambda: make_model(Mine, FIVE, 2, {"depth": 3})),
    ("not an instance of Mine", lambda: make_model(Mine(FIVE, 2), FIVE, 2, {"width": 3})),
    ("num_features=3.*needs 2", lambda: make_model(Mine(FIVE, 3), FIVE, 2)),
    (r"a copy of the Mine given, .*lock.*: give the class, and its arguments", lambda: make_model(LOCKED, FIVE, 2)),
    *(("subclass of Model", lambda spec=spec: make_model(spec, FIVE, 2)) for spec in (torch.nn.Linear, 5)),
    *(
        ("hidden_sizes", lambda sizes=sizes: MLPModel(FIVE, 2, hidden_sizes=sizes))
        for sizes in (3, "64", (64, 0), (True,))
    ),
    ("Did you mean 'relu'", lambda: MLPModel(FIVE, 2, activation="relou")),
    *(("hidden_size", lambda size=size: GRUModel(FIVE, 2, hidden_size=size)) for size in (0, "8")),
    ("encoder_sizes", lambda: GRUModel(FIVE, 2, encoder_sizes=8)),
    *(("window", lambda window=window: AttentionModel(FIVE, 3, window=window)) for window in (1, 0, 2.5)),
    ("rank 3", lambda: CNNModel(FIVE, 2)),
    ("kernel of 9 does not fit the 8 x 9", lambda: CNNModel(PICTURE, 2, convolutions=[(4, 9, 1)])),
    ("channels, kernel, stride", lambda: CNNModel(PICTURE, 2, convolutions=[(4, 3)])),
    ("'auto', 'first' or 'last'", lambda: CNNModel(PICTURE, 2, channels="middle")),
    ("Pass a Model of your own", lambda: FlatObservations(Text(5))),
    ("Text", lambda: FlatObservations(Dict({"a": Text(5)}))),
]


# -- distributions


BOX, HALF, TWO = Box(-1.0, 1.0, (2,)), Box(-np.inf, 1.0, (2,)), Discrete(2)
MIXED = Dict({"go": Discrete(3), "steer": BOX})
SHARE = "`epsilon` must be at least 0 and at most 1"
DISTRIBUTIONS = [
    (ValueError, "Did you mean 'categorical'", lambda: make_distribution("categorial", TWO)),
    (ValueError, "Did you mean 'std'.*initial_std", lambda: make_distribution(None, BOX, {"sdt": "free"})),
    (ValueError, "Categorical takes nothing in `dist", lambda: make_distribution(None, TWO, {"std": "free"})),
    (ValueError, "Discrete, Box, MultiDiscrete, MultiBinary, Dict, Tuple", lambda: make_distribution(None, Text(3))),
    (TypeError, "Box", lambda: make_distribution("normal", TWO)),
    (TypeError, "MultiDiscrete", lambda: make_distribution("multi_categorical", Discrete(3))),
    (TypeError, "MultiBinary", lambda: make_distribution("bernoulli", TWO)),
    (TypeError, "EpsilonGreedy needs a Discrete", lambda: make_distribution("epsilon_greedy", MultiDiscrete([2, 3]))),
    *(
        (ValueError, SHARE, lambda share=share: make_distribution("epsilon_greedy", TWO).set_epsilon(share))
        for share in (-0.1, 1.5, math.nan)
    ),
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
    (ValueError, "Did you mean 'steer'", lambda: Composite(MIXED, ster={})),
    (TypeError, "must map names", lambda: Composite(MIXED, steer="squashed_normal")),
]


# -- functions of tensors


NEVER, R, V = torch.zeros(4, 3, dtype=torch.bool), torch.rand(4, 3), torch.rand(5, 3)


def advantages(rewards=R, values=V, final_values=R, terminated=NEVER, truncated=NEVER, **factors):
    factors = {"gamma": 0.9, "gae_lambda": 0.8} | factors
    return functional.generalized_advantages(rewards, values, final_values, terminated, truncated, **factors)


def returns(rewards=R, cuts=NEVER, carry=R[0], gamma=0.9):
    return functional.running_returns(rewards, cuts, carry, gamma)


FUNCTIONS = [
    (r"one row more than `rewards`: \[5, 3\]; got \[4, 3\]", lambda: advantages(values=R)),
    (
        r"`terminated` must be shaped like `rewards`, \[4, 3\]; got \[4, 1\]",
        lambda: advantages(terminated=NEVER[:, :1]),
    ),
    (r"a step or more; got \[\]", lambda: advantages(*[torch.tensor(0.0)] * 3, *[torch.tensor(False)] * 2)),
    (r"`carry` must be shaped \[3\]; got \[4\]", lambda: returns(carry=torch.zeros(4))),
    *(("`gamma` must be at least 0 and at most 1", lambda g=g: returns(gamma=g)) for g in (-0.1, 1.5, math.nan)),
    ("`gae_lambda` must be at least 0 and", lambda: advantages(gae_lambda=1.5)),
    (
        r"`batch` must be shaped \[..., 3\]; got \[5, 2\]",
        lambda: functional.RunningMoments((3,)).update(torch.rand(5, 2)),
    ),
    (
        r"`mask` must be shaped \[5\], one a row; got \[4\]",
        lambda: functional.RunningMoments((3,)).update(V, NEVER[:, 0]),
    ),
    (
        r"must have one shape; got \[4\], \[4\] and \[1\]",
        lambda: functional.explained_variance(R[:, 0], R[:, 0], NEVER[:1, 0]),
    ),
    (r"`mask` \[rows\]; got \[4, 3\] and \[1\]", lambda: functional.moments(R, NEVER[:1, 0])),
    (r"`batch` must be shaped \[rows, ...\] .*; got \[\]", lambda: functional.moments(torch.tensor(1.0))),
    # of one atom a distance would be 0 / 0
    (r"at least two; got \[4, 1\], \[4, 1\], \[1\]", lambda: functional.project(R[:, :1], R[:, :1], torch.zeros(1))),
    (r"got \[4, 3\], \[4, 1\], \[3\]", lambda: functional.project(R, R[:, :1], torch.arange(3.0))),
]


REFUSED = [*((ValueError, *row) for row in (*LAYERS, *FUNCTIONS)), *(((ValueError, TypeError), *row) for row in MODELS)]


@pytest.mark.parametrize(("error", "message", "make"), [*REFUSED, *DISTRIBUTIONS])
def test_what_is_not_legal_is_refused_with_what_is(error, message, make):
    with pytest.raises(error, match=message):
        make()

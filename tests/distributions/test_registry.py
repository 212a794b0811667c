from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.probes import noise_of

from rl8x.distributions import (
    BUILTIN,
    Bernoulli,
    Categorical,
    Composite,
    MultiCategorical,
    Normal,
    SquashedNormal,
    make_distribution,
)

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def test_the_space_picks_a_distribution():
    assert type(make_distribution(None, spaces.Discrete(3))) is Categorical
    assert type(make_distribution(None, BOX)) is Normal
    assert type(make_distribution(None, spaces.MultiDiscrete([2, 3]))) is MultiCategorical
    assert type(make_distribution(None, spaces.MultiBinary(3))) is Bernoulli
    assert type(make_distribution(None, spaces.Dict({"a": BOX}))) is Composite
    assert type(make_distribution(None, spaces.Tuple([BOX]))) is Composite


def test_names_classes_and_arguments():
    assert type(make_distribution("squashed_normal", BOX)) is SquashedNormal
    by_class = make_distribution(Normal, BOX, {"std": "state"})
    assert isinstance(by_class, Normal)
    assert by_class.num_features == 4

    class Mine(Normal):
        pass

    assert type(make_distribution(Mine, BOX, {"initial_std": 0.5})) is Mine


def test_the_users_config_stays_as_it_is():
    config = {"std": "state"}
    make_distribution(None, BOX, config)
    assert config == {"std": "state"}


@pytest.mark.parametrize(
    ("spec", "space", "config", "error", "says"),
    [
        ("categorial", spaces.Discrete(2), None, ValueError, "Did you mean 'categorical'"),
        (None, BOX, {"sdt": "free"}, ValueError, "Did you mean 'std'.*initial_std"),
        (None, spaces.Discrete(2), {"std": "free"}, ValueError, "Categorical takes nothing in `distribution_config`"),
        (None, spaces.Text(3), None, ValueError, "Discrete, Box, MultiDiscrete, MultiBinary, Dict, Tuple"),
        ("normal", spaces.Discrete(2), None, TypeError, "Box"),
        (3, BOX, None, TypeError, "subclass of Distribution"),
        (dict, BOX, None, TypeError, "subclass of Distribution"),
    ],
)
def test_what_is_wrong_is_said(spec, space, config, error, says):
    with pytest.raises(error, match=says):
        make_distribution(spec, space, config)


CASES = [
    ("categorical", spaces.Discrete(4), {}),
    ("categorical", spaces.Discrete(40), {}),
    ("normal", BOX, {"std": "free"}),
    ("normal", BOX, {"std": "state"}),
    ("squashed_normal", BOX, {}),
    ("multi_categorical", spaces.MultiDiscrete([3, 3]), {}),
    ("multi_categorical", spaces.MultiDiscrete([2, 5, 3]), {}),
    ("bernoulli", spaces.MultiBinary(4), {}),
    ("epsilon_greedy", spaces.Discrete(5, start=-2), {"epsilon": 0.3}),
    ("composite", spaces.Dict({"go": spaces.Discrete(3), "steer": BOX}), {}),
]


def leaves(tree):
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for part in tree.values() for leaf in leaves(part)]


def everything(distribution, features, noise):
    params = distribution.from_features(features)
    actions, logp = distribution.sample(params, noise)
    mode = distribution.mode(params)
    return (
        actions,
        logp,
        mode,
        distribution.logp(params, mode),
        distribution.entropy(params),
        distribution.kl(params, params),
    )


def test_every_built_in_distribution_is_among_the_cases_below():
    assert {name for name, _, _ in CASES} == set(BUILTIN)


@pytest.mark.parametrize(("name", "space", "config"), CASES)
def test_nothing_depends_on_values_that_the_host_would_have_to_see(name, space, config):
    # Tensors on the meta device have shapes only: reading a value, or a shape that depends on one, raises.
    distribution = make_distribution(name, space, config).to("meta")
    features = torch.empty(3, 5, distribution.num_features, device="meta")
    noise = noise_of(distribution, (3, 5), None, "meta")
    actions, logp, mode, *rest = everything(distribution, features, noise)
    for tensor in (*leaves(actions), *leaves(mode)):
        assert tensor.shape[:2] == (3, 5)
    assert all(value.shape == (3, 5) for value in (logp, *rest))


@pytest.mark.parametrize(("name", "space", "config"), CASES)
def test_everything_traces_as_one_graph(name, space, config):
    distribution = make_distribution(name, space, config)
    features, noise = torch.randn(6, distribution.num_features), noise_of(distribution, (6,), None, "cpu")
    torch.compiler.reset()
    traced = torch.compile(everything, backend="eager", fullgraph=True)
    theirs = traced(distribution, features, noise)
    for mine, other in zip(everything(distribution, features, noise), theirs, strict=True):
        assert all(torch.equal(*pair) for pair in zip(leaves(mine), leaves(other), strict=True))


@pytest.mark.parametrize(("name", "space", "config"), CASES)
def test_samples_are_elements_of_the_space_scored_to_the_bit_like_stored_actions(name, space, config):
    distribution = make_distribution(name, space, config)
    features = torch.randn(3, 50, distribution.num_features)
    params = distribution.from_features(features)
    actions, logp = distribution.sample(params, noise_of(distribution, (3, 50), None, "cpu"))
    assert torch.equal(logp, distribution.logp(params, actions))
    for each in (actions, distribution.mode(params)):
        first = keyed(distribution.env_actions(each), lambda leaf: leaf[1, 7].detach().numpy())
        # Gymnasium takes numpy integers for Discrete, not arrays without a dimension.
        assert space.contains(keyed(first, lambda leaf: leaf[()] if leaf.shape == () else leaf))


def keyed(tree, function):
    return {key: keyed(part, function) for key, part in tree.items()} if isinstance(tree, dict) else function(tree)

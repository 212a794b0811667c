from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.probes import Steps

from rl8x import PPOConfig
from rl8x.algorithms import SACConfig, TD3Config
from rl8x.distributions import NoisyDeterministic, SquashedNormal
from rl8x.envs import GymnasiumEnv
from rl8x.spaces import (
    AsymmetricDict,
    check_supported,
    describe_space,
    leaves,
    map_spaces,
    named_parts,
    only_legal,
    space_from_plain,
    space_to_plain,
)

PAIRS = spaces.MultiDiscrete([2, 3], start=[1, 0])
NESTED = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Dict({"c": spaces.Box(0, 1, ())})})


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (None, "got None"),
        (spaces.Text(3), "^space must be a gymnasium.spaces.*; got Text"),
        (spaces.Dict({"a": spaces.Tuple([spaces.Discrete(2), spaces.Text(3)])}), r"space\['a'\]\[1\] must be .*; got "),
        (spaces.Tuple([]), r"space must have at least one part; got Tuple\(\)"),
        *(  # keys that name no tensor
            (
                spaces.Dict({"x": spaces.Dict({key: spaces.Box(0, 1, (2,))})}),
                rf"^space\['x'\] must have texts without '/' as keys; got {key!r}\.",
            )
            for key in (0, "arm/angle")
        ),
    ],
)
def test_unsupported_spaces_are_named(space, message):
    check_supported(NESTED, "space")
    with pytest.raises(ValueError, match=message):
        check_supported(space, "space")


EMPTY = spaces.Box(-1, 1, (0,), np.float32)


@pytest.mark.parametrize(
    ("space", "shown"),
    [
        (EMPTY, r"Box\(\[0\], float32\)"),
        (spaces.Box(-1, 1, (3, 0), np.float32), r"Box\(\[3, 0\], float32\)"),
        (spaces.MultiDiscrete(np.zeros(0, np.int64)), r"MultiDiscrete\(\[0\], int64\)"),
        (spaces.Dict({"a": EMPTY, "b": spaces.Tuple([EMPTY])}), "Dict"),
    ],
)
def test_spaces_without_a_number_are_refused(space, shown):
    for owner in ("observation", "action"):
        other = spaces.Box(-1, 1, (2,), np.float32)
        both = (space, other) if owner == "observation" else (other, space)
        declared = dict(zip(("observation_space", "action_space"), both, strict=True))
        with pytest.raises(ValueError, match=rf"single_{owner}_space must have at least one number; got {shown}"):
            GymnasiumEnv(type("Mine", (Steps,), declared), 2)
    beside = spaces.Dict([("one", spaces.Discrete(1)), ("in", spaces.Dict([("empty", space)]))])
    check_supported(beside, "a part without numbers beside another")
    assert repr(space_from_plain(json.loads(json.dumps(space_to_plain(beside))))) == repr(beside)
    with pytest.raises(ValueError, match="a space must have at least one number"):
        space_to_plain(space)


def test_the_parts_of_a_tuple_are_named_by_their_place():
    space = spaces.Dict({"b": spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(3)]), "a": spaces.Discrete(5)})
    assert named_parts(space.spaces["b"]) == [("0", spaces.Discrete(2)), ("1", spaces.MultiBinary(3))]
    assert [path for path, _ in leaves(space)] == [("a",), ("b", "0"), ("b", "1")]
    assert leaves(spaces.Discrete(2)) == [((), spaces.Discrete(2))]
    nine = spaces.Discrete(9)
    assert map_spaces(space, lambda part: nine) == spaces.Dict({"a": nine, "b": spaces.Tuple([nine, nine])})
    assert describe_space(space) == "Dict(a: Discrete(5), b: Tuple(Discrete(2), MultiBinary([3], int8)))"


@pytest.mark.parametrize(
    ("space", "actions", "mask", "legal"),
    [
        (spaces.Discrete(3, start=5), [5, 6, 7], [[0, 1, 1], [1, 0, 1], [0, 0, 1]], [6, 5, 7]),
        (spaces.Discrete(3), [2, 0], [[0] * 3] * 2, [2, 0]),  # all are legal then
        (PAIRS, [[1, 1], [1, 2]], [[0, 1, 1, 0, 1], [1, 0, 0, 0, 1]], [[2, 0], [1, 2]]),
        (spaces.MultiBinary([2, 2]), [[[1, 1], [1, 1]]], [[1, 0, 0, 1]], [[[1, 0], [0, 1]]]),
    ],
)
def test_forbidden_actions_give_way_to_the_first_legal_one(space, actions, mask, legal):
    assert only_legal(torch.tensor(actions), torch.tensor(mask), space).tolist() == legal


def test_only_parts_with_a_mask_are_made_legal():
    both = spaces.Dict({"gear": spaces.Discrete(2), "steer": spaces.Box(-1, 1, (1,))})
    actions = {"gear": torch.tensor([0]), "steer": torch.tensor([[0.5]])}
    legal = only_legal(actions, {"gear": torch.tensor([[0, 1]])}, both)
    assert (legal["gear"].tolist(), legal["steer"].tolist()) == ([1], [[0.5]])


@pytest.mark.parametrize("names", [["b", "x"], "bc"])
def test_a_critics_part_that_is_none_is_refused(names):
    with pytest.raises(ValueError, match=r"`critic_only` names parts: a, b; got '[xc]'"):
        AsymmetricDict(NESTED.spaces, critic_only=names)


LARGEST = {dtype: float(np.finfo(dtype).max) for dtype in (np.float16, np.float32, np.float64)}


class Moves(Steps):
    """One copy of a task of single steps whose actions may be bounded by anything."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    length = 1

    def __init__(self, action_space):
        self.action_space = action_space


def build_moves(config, action_space, **options):
    env = functools.partial(GymnasiumEnv, lambda: Moves(action_space))
    small = {"num_envs": 2, "horizon": 4, "seed": 0, "device": "cpu", "execution": "eager"}
    return config(**small, **options).build(env)


HUGE = [
    *((low, LARGEST[dtype], dtype) for dtype in LARGEST for low in (-LARGEST[dtype], 0.0)),
    *((-bound, 1.0, np.float64) for bound in (LARGEST[np.float32], 1e300, 1e12, np.inf)),
]
OWNERS = {
    "SAC": (SACConfig, {}),
    "TD3": (TD3Config, {}),
    "SquashedNormal": (PPOConfig, {"distribution": SquashedNormal}),
    "NoisyDeterministic": (PPOConfig, {"distribution": NoisyDeterministic}),
}


@pytest.mark.filterwarnings("error:overflow")
@pytest.mark.parametrize(
    ("owner", "bounds"), [*(("SAC", each) for each in HUGE), *((each, HUGE[2]) for each in OWNERS)]
)
def test_bounds_that_nothing_can_be_scaled_to_are_refused(owner, bounds):
    (config, options), (low, high, dtype) = OWNERS[owner], bounds
    with pytest.raises(ValueError, match=rf"{owner} needs actions with finite bounds; got Box.* up to .*as good as no"):
        build_moves(config, spaces.Box(low, high, (2,), dtype), **options)


@pytest.mark.parametrize("config", [SACConfig, TD3Config])
def test_actions_in_large_bounds_train(config):
    algorithm = build_moves(config, spaces.Box(-9e8, 9e8, (2,), np.float64), warmup_steps=8, batch_size=8)
    flags = set()
    for _ in range(8):
        stats = dict(algorithm.collect()) | dict(algorithm.step())
        flags |= {name for name, value in stats.items() if name.startswith("finite/") and value}
    assert algorithm.counters["algorithm/updates"] > 0
    assert not flags

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.probes import Steps

from rl8x.algorithms import SACConfig, TD3Config
from rl8x.envs import GymnasiumEnv
from rl8x.spaces import (
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


def test_a_part_without_numbers_may_stand_beside_another():
    beside = spaces.Dict([("one", spaces.Discrete(1)), ("in", spaces.Dict([("empty", spaces.Box(-1, 1, (0,)))]))])
    check_supported(beside, "space")
    assert space_from_plain(json.loads(json.dumps(space_to_plain(beside)))) == beside


@pytest.mark.parametrize("key", [1, None, 0.5, True, "a/b"])
def test_keys_in_a_file_that_are_no_names_are_refused(key):
    plain = space_to_plain(spaces.Dict(x=spaces.Discrete(2)))
    plain["parts"][0][0] = key
    with pytest.raises(ValueError, match=r"must have texts without '/' as keys; got"):
        space_from_plain(plain)


class Moves(Steps):
    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Box(-9e8, 9e8, (2,), np.float64)
    length = 1


@pytest.mark.parametrize("config", [SACConfig, TD3Config])
def test_actions_in_large_bounds_train(config):
    small = {"num_envs": 2, "horizon": 4, "seed": 0, "device": "cpu", "warmup_steps": 8, "batch_size": 8}
    algorithm = config(**small, execution="eager").build(functools.partial(GymnasiumEnv, Moves))
    flags = set()
    for _ in range(8):
        stats = dict(algorithm.collect()) | dict(algorithm.step())
        flags |= {name for name, value in stats.items() if name.startswith("finite/") and value}
    assert algorithm.counters["algorithm/updates"] > 0
    assert not flags

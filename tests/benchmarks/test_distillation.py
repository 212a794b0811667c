"""The benchmark of distillation: its environment, and a run of it that is too short to learn."""

import json

import torch
from benchmarks.distillation import ROWS, PartlySeenCartPole, main

from rl8x.envs import CartPole, validate


def test_the_parts_are_those_of_cartpoles_observation():
    env, whole = PartlySeenCartPole(3, seed=0), CartPole(3, seed=0)
    validate(env)
    parts, obs = env.reset()[0], whole.reset()[0]
    assert torch.equal(parts["positions"], obs[:, [0, 2]])
    assert torch.equal(parts["velocities"], obs[:, [1, 3]])
    blind = PartlySeenCartPole(3, blind=True)
    assert blind.reset()[0].keys() == blind.single_observation_space.spaces.keys() == {"positions"}


def test_a_short_run_has_a_row_for_each_policy(tmp_path):
    assert main(["--seeds", "1", "--transitions", "2048", "--out", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == list(ROWS)
    assert [row["env_steps"] for row in rows] == [2048] * 4 + [4096]

"""The benchmark of randomisation: its arithmetic, a run of it that is too short to learn, and what the page says."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from benchmarks import randomization

DOCUMENT = json.loads(randomization.DEFAULT_OUT.read_text())


def test_a_difference_has_welchs_interval():
    from scipy import stats  # a second for each worker that collects this file

    ours, theirs = [3.0, 4.5, 2.0, 6.0, 5.5], [1.0, 1.5, 0.5]
    ahead, half = randomization.difference(ours, theirs)
    found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    assert (ahead - half, ahead + half) == pytest.approx((found.low, found.high))
    mean, half = randomization.interval(ours)
    error = stats.sem(ours)
    assert (mean - half, mean + half) == pytest.approx(stats.t.interval(0.95, 4, loc=mean, scale=error))


def test_the_rows_are_of_the_settings_as_they_are_and_of_all_methods_and_seeds():
    for name, task in randomization.TASKS.items():
        settings = {key: value for key, value in DOCUMENT["tasks"][name].items() if key != "machine"}
        assert settings == json.loads(json.dumps(task.described))
        mine = [row for row in DOCUMENT["rows"] if row["task"] == name]
        runs = {(method, seed) for method in randomization.METHODS for seed in range(5)}
        assert {(row["method"], row["seed"]) for row in mine} == runs
        assert len(mine) == len(runs)
        assert {row["env_steps"] for row in mine} == {task.transitions}
        for row in mine:
            cells = np.sort(row["cells"])
            assert len(cells) == task.cells**2
            assert row["cvar"] == pytest.approx(cells[: -(-len(cells) // 10)].mean(), abs=0.1)
            assert row["mean"] == pytest.approx(cells.mean(), abs=0.1)


def test_the_page_has_the_measurement():
    table = randomization.report(DOCUMENT["rows"])
    assert f"<!-- randomization -->\n{table}\n<!-- /randomization -->" in randomization.PAGE.read_text()


def test_a_short_run_of_each_method_replaces_its_row_and_those_of_other_settings(tmp_path, monkeypatch):
    small = {"num_envs": 8, "horizon": 16, "sgd_minibatch_size": 64, "num_sgd_iters": 1}
    task = randomization.TASKS["cartpole"]
    task = dataclasses.replace(task, transitions=256, cells=3, episodes=2, config={**task.config, **small})
    monkeypatch.setitem(randomization.TASKS, "cartpole", task)
    out = tmp_path / "found.json"
    arguments = ["--tasks", "cartpole", "--seeds", "3", "--out", str(out)]
    assert randomization.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == list(randomization.METHODS)
    assert {row["env_steps"] for row in rows} == {256}
    assert rows[0]["support"] == {"length": [0.5, 0.5], "force_mag": [10.0, 10.0]}
    assert rows[0]["at_fixed"] == rows[0]["cells"][0 * 3 + 1]  # length 0.1 and force 13 are next to 0.5 and 10
    assert rows[0]["outside"] == pytest.approx((sum(rows[0]["cells"]) - rows[0]["at_fixed"]) / 8, abs=0.1)
    assert randomization.main([*arguments, "--methods", "uniform"]) == 0
    assert len(json.loads(out.read_text())["rows"]) == 4
    monkeypatch.setitem(randomization.TASKS, "cartpole", dataclasses.replace(task, solved=400.0))
    assert randomization.main([*arguments, "--methods", "uniform"]) == 0
    assert [row["method"] for row in json.loads(out.read_text())["rows"]] == ["uniform"]


def test_each_cell_is_played_under_its_own_physics():
    task = dataclasses.replace(randomization.TASKS["cartpole"], cells=2, episodes=3)
    assert task.grid["length"] == pytest.approx([0.1] * 6 + [5.0] * 6)
    assert task.grid["force_mag"] == pytest.approx(([1.0] * 3 + [25.0] * 3) * 2)

    class Left:
        """Push left, always; the pole falls as it must under each physics."""

        def initial_state(self, num_envs):
            return {}

        def act(self, obs, state, starts, noise):
            assert noise is None, "tests are deterministic"
            return type("Act", (), {"actions": torch.zeros(len(obs), dtype=torch.int64), "state": state})

        def env_actions(self, actions):
            return actions

    returns = randomization.tested(task, Left(), seed=5)
    env = task.env(12, seed=5)
    env.reset(config=task.grid)
    lengths = torch.zeros(12)
    for _ in range(500):
        going = lengths == 0
        _, _, terminated, _, info = env.step(torch.zeros(12, dtype=torch.int64))
        lengths = torch.where(going & terminated, info["episode"]["l"].float(), lengths)
    assert (lengths > 0).all()
    assert returns.equal(lengths.view(4, 3).mean(1))
    assert returns[0] < returns[2]  # a longer pole falls later

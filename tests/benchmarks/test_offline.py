"""The offline tasks of the learning benchmark: what their data hold, and when a seed passes."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import learning, offline_data, offline_tasks  # noqa: E402
from rl8x.algorithms import BCConfig  # noqa: E402


def test_tasks_are_compared_with_those_that_are_measured_before():
    names = [*offline_tasks.OFFLINE]
    for name, task in offline_tasks.OFFLINE.items():
        task.algorithm(**task.settings)  # the settings are legal
        assert name.startswith(task.data)
        if task.above is not None:
            other = offline_tasks.OFFLINE[task.above]
            assert names.index(task.above) < names.index(name)
            assert (other.data, other.seeds, other.episodes) == (task.data, task.seeds, task.episodes)


def test_a_seed_passes_near_the_data_or_above_another_task():
    task = offline_tasks.OfflineTask(data="cartpole-mixed", algorithm=BCConfig, updates=1, lr=1e-3)
    assert task.passes(-1e9, 100.0)
    near = dataclasses.replace(task, near=0.05)
    assert [near.passes(mean, 100.0) for mean in (94.9, 95.1, 104.9, 105.1)] == [False, True, True, False]
    assert near.passes(-102.0, -100.0)
    above = dataclasses.replace(task, above="other")
    assert [above.passes(mean, 0.0, 50.0) for mean in (49.9, 50.0)] == [False, True]


@pytest.fixture
def short(monkeypatch):
    """Data of policies that hardly learned, and tasks of a few updates."""
    tasks = {"cartpole": offline_data.TASKS["cartpole"].changed(4096)}
    recipe = offline_data.Recipe("cartpole", {"random": 2000, "medium": 3000}, medium_at=5.0)
    monkeypatch.setattr(offline_data, "TASKS", tasks)
    monkeypatch.setattr(offline_data, "REFERENCE", 6000)
    monkeypatch.setitem(offline_data.RECIPES, "cartpole-mixed", recipe)
    for cached in (offline_data.make_data, offline_data.recorded, offline_data.policy_of):
        cached.cache_clear()
    names = ("cartpole-mixed-bc", "cartpole-mixed-iql")
    chosen = {name: dataclasses.replace(offline_tasks.OFFLINE[name], updates=100, episodes=8) for name in names}
    monkeypatch.setattr(learning, "OFFLINE", chosen)
    yield chosen
    for cached in (offline_data.make_data, offline_data.recorded, offline_data.policy_of):
        cached.cache_clear()


def test_data_are_those_of_the_recipe_and_rows_are_written(short, tmp_path, capsys):
    data = offline_data.make_data("cartpole-mixed")
    assert data.dataset.size == 5000
    assert (data.score(data.random), data.score(data.expert)) == (0.0, 100.0)
    assert data.random < data.mean < data.expert
    # Random actions, then those of a policy that acts deterministically.
    actions = data.dataset.transitions["actions"][:2000].float()
    assert abs(actions.mean() - 0.5) < 4 * 0.5 / 2000**0.5
    policy = offline_data.policy_of("cartpole", 5.0)
    obs = data.dataset.transitions["obs"][2000:]
    acts = policy.act(obs, {}, torch.ones(3000, dtype=torch.bool), None).actions
    assert torch.equal(acts, data.dataset.transitions["actions"][2000:])

    out = tmp_path / "learning.json"
    with pytest.raises(SystemExit, match="cartpole-mixed-iql is compared with cartpole-mixed-bc: measure that"):
        learning.main(["--tasks", "cartpole-mixed-iql", "--seeds", "0", "--out", str(out)])
    learning.main(["--tasks", *short, "--seeds", "0", "--out", str(out)])
    rows = learning.held(out)["rows"]
    assert [row["task"] for row in rows] == [*short]
    bc, iql = rows
    assert iql["passed"] == (iql["return_mean"] >= bc["return_mean"])
    assert bc["score"] == pytest.approx(data.score(bc["return_mean"]), abs=0.06)
    assert bc["data_mean"] == pytest.approx(data.mean, abs=0.006)
    assert f"| {bc['data_mean']:.1f} | {bc['return_mean']:.1f} |" in capsys.readouterr().out

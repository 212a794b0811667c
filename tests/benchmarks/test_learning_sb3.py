"""The comparison with Stable-Baselines3 on Ant: what is evaluated when, and the row of each seed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

pytest.importorskip("stable_baselines3")

from benchmarks import learning_sb3 as sb3
from rl8x import tuned


def test_the_best_evaluation_and_the_last_policy_of_each_seed_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sb3, "ENV", "Pendulum-v1")
    monkeypatch.setattr(sb3, "TRANSITIONS", 5 * 64)
    monkeypatch.setattr(sb3, "ZOO", {**sb3.ZOO, "n_steps": 64, "n_epochs": 1})
    for name, value in {"STEPS_PER_EVAL": 2, "EVAL_EPISODES": 2, "EPISODES": 3}.items():
        monkeypatch.setattr(sb3, name, value)
    played = []
    whole = sb3.returns

    def returns(model, envs, episodes):
        played.append((episodes, whole(model, envs, episodes)))
        training = model.get_vec_normalize_env()
        np.testing.assert_array_equal(envs.obs_rms.mean, training.obs_rms.mean)
        assert training.obs_rms.count > 0
        return played[-1][1]

    monkeypatch.setattr(sb3, "returns", returns)
    out = tmp_path / "rows.json"
    sb3.main(["--seeds", "1", "0", "--out", str(out)])
    document = json.loads(out.read_text())
    assert document["about"]["settings"]["n_steps"] == 64
    assert [row["seed"] for row in document["rows"]] == [0, 1]
    row = document["rows"][1]
    assert [at for at, _ in row["evaluations"]] == [128, 256, 320]
    assert [episodes for episodes, _ in played[:4]] == [2, 2, 2, 3]
    means = [found[0] for _, found in played[:4]]
    assert row["best"] == round(max(means[:3]), 2)
    assert row["best_at"] == (128, 256, 320)[int(np.argmax(means[:3]))]
    assert row["return_mean"] == round(means[3], 2)
    assert -2000 < row["return_min"] <= row["return_mean"] < 0


def test_both_learn_as_long_and_are_evaluated_as_often():
    run = tuned("Ant-v5")
    assert run.run.stop_conditions[0]["hits_upper_bound"] == ["env/steps", sb3.TRANSITIONS]
    config = run.algorithm.make_config()
    ours = run.run.steps_per_eval * config.num_envs * config.horizon
    assert ours == sb3.STEPS_PER_EVAL * sb3.ZOO["n_steps"]
    assert run.trainer.num_eval_envs == sb3.EVAL_EPISODES

"""The speed of algorithms with a replay: what is asked of each library, and what is made of the answers."""

from __future__ import annotations

import dataclasses
import json

import pytest
from benchmarks.common import REPLAY_WORKS, WORKS, Job
from benchmarks.peers.rl8x import make_config

from benchmarks import limits, replay
from rl8x.algorithms import DQNConfig, PPOConfig, SACConfig


def test_a_job_comes_back_with_its_work():
    for work in (REPLAY_WORKS["dqn-64"], WORKS["small"]):
        job = Job(work=work, seed=3, tracks=False)
        assert Job.from_json(job.to_json()) == job


def test_the_config_is_the_works():
    config = make_config(Job(work=REPLAY_WORKS["dqn-256"], execution="compile", threads=1))
    assert isinstance(config, DQNConfig)
    assert config.updates_per_collect == REPLAY_WORKS["dqn-256"].updates_per_block == 32
    assert (config.double, config.n_step, config.execution) == (False, 1, "compile")
    assert config.model_config == {"hidden_sizes": [256, 256], "layer_norm": False}
    config = make_config(Job(work=REPLAY_WORKS["sac-256"]))
    assert isinstance(config, SACConfig)
    assert config.updates_per_collect == REPLAY_WORKS["sac-256"].updates_per_block == 64
    assert (config.critic_hidden_sizes, config.tau, config.max_grad_norm) == ([256, 256], 0.005, None)
    config = make_config(Job(work=WORKS["small"]))
    assert isinstance(config, PPOConfig)
    assert (config.num_envs, config.sgd_minibatch_size, config.gae_lambda) == (16, 64, 0.95)


def test_the_products_of_an_update_by_hand():
    work = dataclasses.replace(REPLAY_WORKS["dqn-64"], hidden=8, batch_size=5)
    forward = [(5, 4, 8), (5, 8, 8), (5, 8, 2)]
    assert sorted(work.products) == sorted([*forward, *forward, (8, 5, 4), (8, 5, 8), (2, 5, 8), (5, 8, 8), (5, 2, 8)])


def test_the_products_of_an_update_with_critics_by_hand():
    work = dataclasses.replace(REPLAY_WORKS["sac-256"], hidden=8, batch_size=5)
    policy, policy_back = [(5, 3, 8), (5, 8, 8), (5, 8, 2)], [(8, 5, 3), (8, 5, 8), (2, 5, 8), (5, 8, 8), (5, 2, 8)]
    critic, critic_back = [(5, 4, 8), (5, 8, 8), (5, 8, 1)], [(8, 5, 4), (8, 5, 8), (1, 5, 8), (5, 8, 8), (5, 1, 8)]
    # Through the critics to the actions: each layer's inputs have a gradient, its weights none.
    through = [(5, 8, 4), (5, 8, 8), (5, 1, 8)]
    assert sorted(work.products) == sorted(2 * policy + policy_back + 2 * (3 * critic + critic_back + through))


def test_as_many_products_take_as_much_longer(monkeypatch):
    monkeypatch.setattr(limits, "seconds_a_call", lambda call, device, budget_s: call().shape[0] * 1e-3)
    # Rows of the results: 3 + 3 + 5.
    rate = limits.products_per_s([(3, 4, 2), (3, 4, 2), (5, 2, 2)], "fp32", "cpu", 0.0)
    assert rate == pytest.approx(1 / 11e-3)


def test_measured_rows_become_tables(tmp_path, monkeypatch):
    rates = {"eager fp32": 10.0, "compile fp32": 44.0, "compile fp32 untracked": 80.0, "as it comes": 4.0}

    def run(peer, job, extra, timeout_s):
        asked = {"execution": job.execution, "precision": job.precision, "tracks": job.tracks}
        default = {"execution": "eager", "precision": "fp32", "tracks": True}
        variants = replay.VARIANTS["rl8x" if peer.title == "rl8x" else "sb3"]
        (variant,) = [name for name, fields in variants.items() if {**default, **fields} == asked]
        return {"transitions_per_s": rates[variant]} if variant in rates else {"error": "none"}

    monkeypatch.setattr(replay, "run", run)
    monkeypatch.setattr(replay, "call", lambda *_: {"per_s": 22.0})
    args = replay.parse(["--only", "dqn-64", "--passes", "2", "--out", str(tmp_path / "replay.json")])
    result = replay.measure(args)
    assert json.loads((tmp_path / "replay.json").read_text())["rows"] == result["rows"]
    text = replay.render(result)
    assert "| rl8x | compile fp32 | 44 | 44 - 44 | 11 | 50% of 22 |" in text
    assert "| rl8x | eager bf16 | failed |" in text
    assert "| compile fp32 | Stable-Baselines3 | 11.0 | 11 |" in text  # tracked, as it comes
    assert "Tianshou" not in text

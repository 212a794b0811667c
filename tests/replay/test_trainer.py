"""A replay in a run: damaged, and gone on with. Bits after a resume are those of algorithms/test_conformance.py."""

import warnings

import pytest
import torch

from rl8x.algorithms import DQNConfig
from rl8x.envs import CartPole
from rl8x.tracking import NullTracker
from rl8x.trainers import Trainer


def run(folder, steps=2):
    options = {"num_envs": 4, "horizon": 4, "warmup_steps": 8, "batch_size": 8, "seed": 3, "device": "cpu"}
    options |= {"model_config": {"hidden_sizes": [8]}, "buffer_size": 100, "n_step": 1, "gamma": 0.5}
    trainer = Trainer(DQNConfig(**options).build(CartPole), tracker=NullTracker(), checkpoints=folder, eval_env=False)
    trainer.run(max_steps=steps, progress="none")
    return trainer


def test_rows_keep_their_returns_where_a_resume_changes_what_returns_are(tmp_path):
    stored = run(tmp_path).algorithm.replay.as_tensordict()
    says = "the 32 rows of the replay keep the returns of n_step=1 and gamma=0.5; rows from here on have n_step=3 and "
    with pytest.warns(RuntimeWarning, match=f"{says}gamma=0.9, and replace the others within 100 transitions"):
        second = Trainer.resume(tmp_path, overrides={"gamma": 0.9, "n_step": 3})
    second.run(max_steps=4, progress="none")
    rows_now = second.algorithm.replay.as_tensordict()
    assert torch.equal(rows_now["discounts"][:32], stored["discounts"])
    assert {0.5} == {*stored["discounts"][stored["discounts"] > 0].tolist()}
    assert rows_now["discounts"][32:].max() == pytest.approx(0.9**3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer.resume(tmp_path)  # nothing changes now
        Trainer.resume(tmp_path, overrides={"lr": 1e-4})

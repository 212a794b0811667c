"""`set_lr` against a schedule that steps to the same rate: every algorithm, all its networks, eager and traced."""

import functools
import math

import numpy as np
import pytest
import torch
from tests.algorithms.test_conformance import EACH, build, train, weights
from tests.probes import traced_only, weights_of

from rl8x import MemoryTracker, Trainer, keys
from rl8x.algorithms.base import LR, AlgorithmConfig, GenericAlgorithmBase

CASES = [*EACH, "ppo, gru", "sac from data", "td3 from data"]


def steps(algorithm, count):
    return [float(row[LR]) for row in train(algorithm, count)]


@pytest.mark.parametrize(
    ("name", "execution"), [*((name, "eager") for name in CASES), ("pqn", "compile"), ("td3", "compile")]
)
def test_a_rate_that_is_set_is_that_of_a_schedule_that_steps_to_it(name, execution, monkeypatch):
    if execution == "compile":
        traced_only(monkeypatch)
    make = functools.partial(build, name, execution=execution)
    mine = make(lr=1e-3)
    assert steps(mine, 2) == [1e-3, 1e-3]
    later = mine.counters[mine.clock] + (mine.env is not None)  # the transitions of a step count before it learns
    scheduled = make(lr_schedule=[[0, 1e-3], [later, 0.25]])
    steps(scheduled, 2)
    assert torch.equal(weights(mine), weights(scheduled))
    mine.set_lr(np.float32(0.25))
    assert steps(mine, 2) == steps(scheduled, 2) == [0.25, 0.25]
    assert torch.equal(weights(mine), weights(scheduled))
    assert not torch.equal(weights(mine), weights(make(lr=1e-3)))

    # A state has the rate, and one of an algorithm without it goes back to the config's.
    other, fresh = make(lr=1e-3), make(lr=1e-3)
    plain = fresh.state_dict()
    other.load_state_dict(mine.state_dict())
    assert steps(other, 1) == steps(mine, 1) == [0.25]
    other.load_state_dict(plain)
    assert steps(other, 1) == [1e-3]
    mine.set_lr(None)
    assert steps(mine, 1) == [1e-3]
    before = weights_of(mine)
    mine.set_lr(0)
    assert steps(mine, 2) == [0.0, 0.0]
    assert torch.equal(weights_of(mine), before)


@pytest.mark.parametrize("lr", [-1e-3, math.nan, math.inf, True, "1e-3", [[0, 1e-3]]])
def test_other_rates_are_refused_and_change_nothing(lr):
    algorithm = build("ppo", lr=1e-3)
    error = ValueError if isinstance(lr, float) else TypeError
    with pytest.raises(error, match=r"the learning rate must be .*got"):
        algorithm.set_lr(lr)
    assert steps(algorithm, 1) == [1e-3]


class Idle(GenericAlgorithmBase):
    step = learned_state = load_learned_state = None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: build("dqn, schedules"), "the learning rate follows `lr_schedule`, which set_lr would break"),
        (lambda: Idle(AlgorithmConfig(device="cpu"), None, 0), "Idle has no learning rate"),
    ],
)
def test_where_no_rate_can_be_set_it_is_said(make, message):
    algorithm = make()
    with pytest.raises(ValueError, match=message):
        algorithm.set_lr(1e-4)


# -- in a run


def lowers(trainer, stats):
    if stats[keys.STEPS] == 2:
        trainer.algorithm.set_lr(1e-4)


@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        ({}, 1e-4),
        ({"gamma": 0.9}, 1e-4),
        ({"lr": 5e-4}, 5e-4),
        ({"lr": 1e-3}, 1e-3),
        ({"lr_schedule": [[0, 7e-4]]}, 7e-4),
    ],
)
def test_a_resume_with_another_rate_forgets_it(overrides, rate, tmp_path):
    options = {"eval_env": False, "callbacks": [lowers], "checkpoints": tmp_path}
    Trainer(build("ppo", lr=1e-3), tracker=MemoryTracker(), **options).run(max_steps=3, progress="none")
    resumed = Trainer.resume(tmp_path, tracker=MemoryTracker(), overrides=overrides, callbacks=[lowers])
    assert resumed.run(max_steps=4, progress="none")[LR] == rate
    again = Trainer.resume(tmp_path, tracker=MemoryTracker(), callbacks=[lowers])  # the checkpoint of that
    assert again.run(max_steps=5, progress="none")[LR] == rate

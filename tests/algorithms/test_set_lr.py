"""`set_lr` against a schedule that steps to the same rate: every algorithm, all its networks, eager and traced."""

import functools
import math

import numpy as np
import pytest
import torch
from tests.probes import traced_only
from tests.ranks.problems import rows

from rl8x import MemoryTracker, Trainer, distill, keys
from rl8x.algorithms import (
    BCConfig,
    DistillationConfig,
    DQNConfig,
    IQLConfig,
    PPOConfig,
    PQNConfig,
    SACConfig,
    TD3Config,
)
from rl8x.algorithms.base import LR, GenericAlgorithmBase
from rl8x.checkpoint import Checkpoints
from rl8x.envs import CartPole, Pendulum

SMALL = {"seed": 5, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
ONLINE = SMALL | {"num_envs": 4, "horizon": 4}
REPLAY = ONLINE | {"warmup_steps": 0, "batch_size": 8, "updates_per_sample": 0.25}
OFFLINE = SMALL | {"batch_size": 8, "updates_per_step": 2}
CRITICS = {"critic_hidden_sizes": [8]}


def distillation(**options):
    teacher = PPOConfig(**ONLINE).build(CartPole).policy
    return distill(teacher, DistillationConfig(**ONLINE, num_sgd_iters=2, **options), CartPole)


def of(config, given, env=None, **more):
    return lambda **options: config(**given, **more, **options).build(*([] if env is None else [env]))


ALGORITHMS = {
    "ppo": of(PPOConfig.rl8, ONLINE, CartPole, num_sgd_iters=2),
    "ppo, memory": of(
        PPOConfig.rl8, ONLINE | {"model_config": {"hidden_size": 8}}, CartPole, model="gru", num_sgd_iters=1
    ),
    "pqn": of(PQNConfig, ONLINE, CartPole, sgd_minibatch_size=8),
    "dqn": of(DQNConfig, REPLAY, CartPole),
    "sac": of(SACConfig, REPLAY | CRITICS, Pendulum),
    "td3": of(TD3Config, REPLAY | CRITICS, Pendulum),
    "distillation": distillation,
    "bc": lambda **options: BCConfig(**OFFLINE, dataset=rows(), **options).build(),
    "iql": lambda **options: IQLConfig(**OFFLINE, **CRITICS, dataset=rows(), **options).build(),
    "sac, offline": lambda **options: SACConfig(**OFFLINE, **CRITICS, dataset=rows(), **options).build(),
    "td3, offline": lambda **options: TD3Config(**OFFLINE, **CRITICS, dataset=rows(), **options).build(),
}


def steps(algorithm, count):
    rates = []
    for _ in range(count):
        algorithm.collect()
        rates.append(float(algorithm.step()[LR]))
    return rates


def weights(algorithm):
    """All that optimizers move: weights and moments of every network."""
    state = algorithm.state_dict()
    found = [tensor.flatten() for tensor in algorithm.policy.parameters()]
    optimizers = state["nets"]["optimizers"] if "nets" in state else {"": state["optimizer"]}
    found += [each.flatten() for one in optimizers.values() for part in one["state"].values() for each in part.values()]
    if "nets" in state:
        found += [each.flatten() for one in state["nets"]["modules"].values() for each in one.values()]
    return torch.cat([tensor.detach().double() for tensor in found])


@pytest.mark.parametrize(
    ("name", "execution"), [*((name, "eager") for name in ALGORITHMS), ("pqn", "compile"), ("td3", "compile")]
)
def test_a_rate_that_is_set_is_that_of_a_schedule_that_steps_to_it(name, execution, monkeypatch):
    if execution == "compile":
        traced_only(monkeypatch)
    make = functools.partial(ALGORITHMS[name], execution=execution)
    mine = make(lr=1e-3)
    assert steps(mine, 2) == [1e-3, 1e-3]
    later = mine.counters[mine.clock] + (mine.env is not None)  # the transitions of a step count before it learns
    scheduled = make(lr_schedule=[[0, 1e-3], [later, 0.25]])
    steps(scheduled, 2)
    assert torch.equal(weights(mine), weights(scheduled))
    mine.set_lr(0.25)
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


@pytest.mark.parametrize("name", ["ppo", "sac", "iql"])
def test_with_a_rate_of_0_nothing_moves(name):
    algorithm = ALGORITHMS[name](lr=1e-2)
    steps(algorithm, 1)
    before = {key: each.clone() for key, each in algorithm.policy.named_parameters()}
    algorithm.set_lr(0)
    steps(algorithm, 2)
    assert all(torch.equal(each, before[key]) for key, each in algorithm.policy.named_parameters())
    algorithm.set_lr(np.float32(0.5))
    assert steps(algorithm, 1) == [0.5]
    assert any(not torch.equal(each, before[key]) for key, each in algorithm.policy.named_parameters())


@pytest.mark.parametrize(
    ("lr", "error"),
    [
        (-1e-3, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        (True, TypeError),
        ("1e-3", TypeError),
        ([[0, 1e-3]], TypeError),
    ],
)
def test_other_rates_are_refused_and_change_nothing(lr, error):
    algorithm = ALGORITHMS["ppo"](lr=1e-3)
    with pytest.raises(error, match=r"the learning rate must be .*got"):
        algorithm.set_lr(lr)
    assert steps(algorithm, 1) == [1e-3]


@pytest.mark.parametrize("name", ["ppo", "sac", "bc"])
def test_a_rate_beside_a_schedule_is_refused(name):
    algorithm = ALGORITHMS[name](lr_schedule=[[0, 1e-3], [10**9, 1e-4]])
    with pytest.raises(ValueError, match="the learning rate follows `lr_schedule`, which set_lr would break"):
        algorithm.set_lr(1e-4)


def test_an_algorithm_without_a_rate_says_so():
    class Idle(GenericAlgorithmBase):
        step = learned_state = load_learned_state = None

    with pytest.raises(ValueError, match="Idle has no learning rate"):
        object.__new__(Idle).set_lr(1e-3)


# -- in a run


def lowers(trainer, stats):
    if stats[keys.STEPS] == 2:
        trainer.algorithm.set_lr(1e-4)


class Killed(BaseException):
    pass


def dies(trainer, stats):
    if stats[keys.STEPS] == 4:
        raise Killed


def trained(callbacks, **options):
    tracker = MemoryTracker()
    return Trainer(ALGORITHMS["ppo"](lr=1e-3), tracker=tracker, eval_env=False, callbacks=callbacks, **options)


def test_a_callback_sets_it_and_a_resumed_run_goes_on_with_it(tmp_path):
    straight = trained([lowers])
    straight.run(max_steps=6, progress="none")
    rates = [value for _, value in straight.tracker.history(LR)]
    assert rates == [1e-3, 1e-3, 1e-4, 1e-4, 1e-4, 1e-4]  # from the next step on, and in its row

    killed = trained([lowers, dies], checkpoints=Checkpoints(tmp_path, every_steps=1))
    with pytest.raises(Killed):
        killed.run(max_steps=6, progress="none")
    resumed = Trainer.resume(tmp_path, tracker=killed.tracker, callbacks=[lowers])
    resumed.run(progress="none")
    assert [value for _, value in killed.tracker.history(LR)] == rates
    assert torch.equal(weights(resumed.algorithm), weights(straight.algorithm))


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
    trained([lowers], checkpoints=tmp_path).run(max_steps=3, progress="none")
    resumed = Trainer.resume(tmp_path, tracker=MemoryTracker(), overrides=overrides, callbacks=[lowers])
    assert resumed.run(max_steps=4, progress="none")[LR] == rate
    again = Trainer.resume(tmp_path, tracker=MemoryTracker(), callbacks=[lowers])  # the checkpoint of that
    assert again.run(max_steps=5, progress="none")[LR] == rate

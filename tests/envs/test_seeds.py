"""Seeds that leave rl8x: of 31 bits, for simulators that take no others."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
from tests.probes import Steps

from rl8x import NullTracker, PPOConfig, Trainer
from rl8x.algorithms.hyperparameters import part_seed
from rl8x.envs import CartPole, GymnasiumEnv, MjlabEnv
from rl8x.envs.cells import make_cells
from rl8x.envs.checks import narrow_seed
from rl8x.trainers.grid import CellEvaluator


def check(seed):
    """Refuse what a generator of 32 bits with a sign refuses, as does `RandomState` what is negative or more."""
    if seed is not None and not 0 <= seed < 2**31:
        raise ValueError(f"the seed must be of 31 bits; got {seed}")


class Narrow(Steps):
    """A task of one copy, of two steps an episode, whose generator is `RandomState`."""

    length = 2

    def observation(self):
        return self.random.rand(1).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        check(seed)
        self.random = np.random.RandomState(seed)
        return super().reset()


class OwnNarrow(CartPole):
    """An environment of tensors whose author has a generator of 32 bits beside rl8x's."""

    def __init__(self, num_envs, *, seed=None, **options):
        check(seed)
        super().__init__(num_envs, seed=seed, **options)


def factory(num_envs, *, device, seed):
    """Make an environment as a user's function does, with the seed for what it makes."""
    check(seed)
    return GymnasiumEnv(Narrow, num_envs, device=device, seed=seed, time_limit=3)


# Both get their seeds at one of two places: `SimulatorEnv`, and where the environment of a training is made.
MAKERS = {"factory": factory, "own": functools.partial(OwnNarrow, time_limit=3)}


def train(env, seed):
    """Train two steps with an evaluation after each; a seed out of its range raises in the stubs."""
    small = {"num_envs": 2, "horizon": 4, "device": "cpu", "execution": "eager", "model_config": {"hidden_sizes": [4]}}
    trainer = Trainer(PPOConfig(**small, seed=seed).build(env), tracker=NullTracker())
    trainer.run(max_steps=2, steps_per_eval=1)
    return trainer


@pytest.mark.parametrize("name", MAKERS)
def test_environments_of_32_bits_train_and_are_evaluated(name):
    seed = 2**63 - 1
    trainer = train(MAKERS[name], seed)
    assert trainer.evaluations.env is not trainer.algorithm.env
    if name == "own":  # the one that has parameters
        CellEvaluator(trainer.algorithm, make_cells({"length": [0.5]}, None, 0), episodes=2, seed=seed).evaluate()


@pytest.mark.parametrize("seed", [7, 2**31 - 1, 2**70, -3, np.int64(2**40)])
def test_a_reset_takes_any_whole_number(seed):
    env = GymnasiumEnv(Narrow, 3)
    obs, _ = env.reset(seed=seed)
    firsts = [np.random.RandomState((int(seed) % (2**31 - 2**24)) + i).rand(1) for i in range(3)]
    np.testing.assert_allclose(obs, np.stack(firsts), rtol=1e-6)
    CartPole(1).reset(seed=seed)


def test_mjlab_trains_and_is_evaluated_and_processes_start_afterwards(monkeypatch):
    pytest.importorskip("mjlab", reason="mjlab is not installed: pip install 'rl8x[mjlab]'")
    monkeypatch.setenv("MJLAB_WARP_QUIET", "1")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    trainer = train(functools.partial(MjlabEnv, "Mjlab-Cartpole-Balance", time_limit=3), 2**40)
    assert trainer.evaluations.env is not trainer.algorithm.env
    assert "PYTHONHASHSEED" not in os.environ
    subprocess.run([sys.executable, "-c", ""], check=True)
    MjlabEnv("Mjlab-Cartpole-Balance", 1).reset(seed=2**32)


def test_rl8xs_own_environments_get_the_whole_seed():
    whole, narrow = (
        PPOConfig(num_envs=2, horizon=4, device="cpu", seed=3).build(kind).env for kind in (CartPole, OwnNarrow)
    )
    assert whole.generator.initial_seed() == part_seed(3, "env") > 2**32
    assert narrow.generator.initial_seed() == narrow_seed(part_seed(3, "env"))

"""Seeds that leave rl8x: of 31 bits, for simulators that take no others."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from rl8x import NullTracker, PPOConfig, Trainer
from rl8x.algorithms.hyperparameters import part_seed
from rl8x.envs import BraxEnv, CartPole, GymnasiumEnv, MjlabEnv, VmasEnv
from rl8x.envs.cells import make_cells
from rl8x.envs.checks import narrow_seed
from rl8x.trainers.grid import CellEvaluator

SEEDS = (0, 7, 2**31 - 1, 2**32 - 1, 2**32, 2**40 + 3, 2**70)


def check(seed):
    """Refuse what a generator of 32 bits with a sign refuses, as does `RandomState` what is negative or more."""
    if seed is not None and not 0 <= seed < 2**31:
        raise ValueError(f"the seed must be of 31 bits; got {seed}")


class Narrow(gymnasium.Env):
    """A task of one copy, of two steps an episode, whose generator is `RandomState`."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        check(seed)
        self.random = np.random.RandomState(seed)
        self.steps = 0
        return self.random.rand(1).astype(np.float32), {}

    def step(self, action):
        self.steps += 1
        return self.random.rand(1).astype(np.float32), 1.0, self.steps == 2, False, {}


class ManyNarrow(VectorEnv):
    """All copies of `Narrow` as one simulator, as its `vector_entry_point`."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs=2, **kwargs):
        self.num_envs, self.copies = num_envs, [Narrow() for _ in range(num_envs)]
        self.single_observation_space, self.single_action_space = Narrow.observation_space, Narrow.action_space
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.closed = False

    def reset(self, *, seed=None, options=None):
        check(seed)
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        return np.stack([copy.reset(seed=own)[0] for copy, own in zip(self.copies, seeds, strict=True)]), {}

    def step(self, actions):
        zeros = np.zeros(self.num_envs, bool)
        obs = np.stack([copy.step(0)[0] for copy in self.copies])
        return obs, np.ones(self.num_envs), np.array([copy.steps >= 2 for copy in self.copies]), zeros, {}


class OwnNarrow(CartPole):
    """An environment of tensors whose author has a generator of 32 bits beside rl8x's."""

    def __init__(self, num_envs, *, seed=None, **options):
        check(seed)
        super().__init__(num_envs, seed=seed, **options)


def factory(num_envs, *, device, seed):
    """Make an environment as a user's function does, with the seed for what it makes."""
    check(seed)
    return GymnasiumEnv(Narrow, num_envs, device=device, seed=seed, time_limit=3)


@pytest.fixture(autouse=True)
def registered():
    gymnasium.register("Narrow-v0", Narrow, vector_entry_point=ManyNarrow, max_episode_steps=3)
    yield
    gymnasium.registry.pop("Narrow-v0")


MAKERS = {
    "id": "Narrow-v0",
    "vector": functools.partial(GymnasiumEnv, "Narrow-v0", vectorization="vector"),
    "function": functools.partial(GymnasiumEnv, Narrow),
    "factory": factory,
    "own": functools.partial(OwnNarrow, time_limit=3),
    "vmas": lambda *args, **options: VmasEnv("balance", *args, time_limit=3, n_agents=2, **options),
    "brax": lambda *args, **options: BraxEnv("fast", *args, time_limit=3, **options),
}
INSTANCES = {
    "sync": lambda: SyncVectorEnv([Narrow] * 2, autoreset_mode=AutoresetMode.SAME_STEP),
    "disabled": lambda: SyncVectorEnv([Narrow] * 2, autoreset_mode=AutoresetMode.DISABLED),
    "next_step": lambda: ManyNarrow(2),
}


def train(env, seed):
    """Train two steps with an evaluation after each; a seed out of its range raises in the stubs."""
    small = {"num_envs": 2, "horizon": 4, "device": "cpu", "execution": "eager", "model_config": {"hidden_sizes": [4]}}
    trainer = Trainer(PPOConfig(**small, seed=seed).build(env), tracker=NullTracker())
    trainer.run(max_steps=2, steps_per_eval=1)
    return trainer


def test_seeds_that_fit_stay_and_others_are_folded():
    limit = 2**31 - 2**24
    assert [narrow_seed(seed) for seed in (0, 5, limit - 1)] == [0, 5, limit - 1]
    assert [narrow_seed(seed) for seed in (limit, limit + 3, 5 * limit + 3, -1)] == [0, 3, 3, limit - 1]


def test_rl8xs_own_environments_get_the_whole_seed():
    env = PPOConfig(num_envs=2, horizon=4, device="cpu", seed=3).build(CartPole).env
    assert env.generator.initial_seed() == part_seed(3, "env") > 2**32
    env = PPOConfig(num_envs=2, horizon=4, device="cpu", seed=3).build(OwnNarrow).env
    assert env.generator.initial_seed() == narrow_seed(part_seed(3, "env"))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("seed", [2**32 - 1, 2**70])
def test_environments_of_32_bits_train_and_are_evaluated(name, seed):
    if name in ("vmas", "brax"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'rl8x[{name}]'")
    trainer = train(MAKERS[name], seed)
    assert trainer.evaluator.env is not trainer.algorithm.env
    if name == "own":  # the one that has parameters
        CellEvaluator(trainer.algorithm, make_cells({"length": [0.5]}, None, 0), episodes=2, seed=seed).evaluate()


@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.filterwarnings("ignore:.*can neither be copied nor made again")
def test_vector_environments_of_32_bits_train(name):
    train(INSTANCES[name](), 2**40 + 3)


@pytest.mark.parametrize("seed", [*SEEDS, -3, np.int64(2**40)])
def test_a_reset_takes_any_whole_number(seed):
    env = GymnasiumEnv("Narrow-v0", 3)
    obs, _ = env.reset(seed=seed)
    firsts = [np.random.RandomState((int(seed) % (2**31 - 2**24)) + i).rand(1) for i in range(3)]
    np.testing.assert_allclose(obs, np.stack(firsts), rtol=1e-6)
    CartPole(1).reset(seed=seed)


def test_mjlab_trains_and_is_evaluated_and_processes_start_afterwards(monkeypatch):
    pytest.importorskip("mjlab", reason="mjlab is not installed: pip install 'rl8x[mjlab]'")
    monkeypatch.setenv("MJLAB_WARP_QUIET", "1")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    trainer = train(functools.partial(MjlabEnv, "Mjlab-Cartpole-Balance", time_limit=3), 2**40)
    assert trainer.evaluator.env is not trainer.algorithm.env
    assert "PYTHONHASHSEED" not in os.environ
    subprocess.run([sys.executable, "-c", ""], check=True)
    MjlabEnv("Mjlab-Cartpole-Balance", 1).reset(seed=2**32)

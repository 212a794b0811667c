"""The tasks of the learning benchmark: what is trained, and what is asked of it.

What users have by name, `rl8x.tuned`, is measured here as it is. The other tasks ask for one ability each, or are
controls without it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rl8x import tuned
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.config import RunSpec
from rl8x.config.tuned import tuned_files
from rl8x.envs import Env

# How a run is watched is no part of what is trained.
WATCHING = ("steps_per_eval", "num_eval_envs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and what is asked of the result.

    Attributes:
        run: Environment, algorithm, hyperparameters, and the transitions to train on.
        bound: The return that every seed must reach; with `fails`, that no seed may reach. None: any.
        first_within: Transitions within which every seed must reach the bound for the first time; None: any.
        steps_per_eval: Steps of the trainer from one evaluation to the next, which say when that was; None: none.
        fails: Whether this is a control that must not learn the task.
        seeds: How many seeds are run, 0, 1, ...
        episodes: Fresh episodes that the final policy is judged by.
        eval_episodes: Episodes of an evaluation on the way; None: as many.
        best_bound: What the best evaluation on the way must be, in the mean over seeds; None: any.
    """

    run: RunSpec
    bound: float | None = None
    first_within: int | None = None
    steps_per_eval: int | None = None
    fails: bool = False
    seeds: int = 5
    episodes: int = 256
    eval_episodes: int | None = None
    best_bound: float | None = None

    @property
    def transitions(self) -> int:
        """Transitions to train on."""
        (stop,) = self.run.run.stop_conditions
        return int(stop["hits_upper_bound"][1])

    @property
    def num_eval_envs(self) -> int:
        """Copies, and so episodes, of an evaluation on the way."""
        return self.eval_episodes or self.episodes

    @property
    def described(self) -> dict[str, Any]:
        """All of the task, as the JSON file has it."""
        trained = {name: value for name, value in self.run.to_plain().items() if name not in WATCHING}
        asked = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "run"}
        return {"run": {**trained, "algorithm": self.run.algorithm.algorithm}, **asked}

    def passes(self, mean: float, first_at: int | None = None) -> bool:
        """Whether a mean return at the end is what is asked, and the transitions when the bound was first reached."""
        in_time = self.first_within is None or (first_at is not None and first_at <= self.first_within)
        return in_time and (self.bound is None or (mean < self.bound if self.fails else mean >= self.bound))

    def changed(self, transitions: int | None = None, **hyperparameters: Any) -> Task:
        """Return the task with other hyperparameters, or with another number of transitions."""
        run, stop = self.run, {"hits_upper_bound": ["env/steps", transitions or self.transitions]}
        config = {**run.algorithm.algorithm_config, **hyperparameters}
        return dataclasses.replace(self, run=run.replace(algorithm_config=config, stop_conditions=[stop]))

    def make_algorithm(self, seed: int) -> GenericAlgorithmBase[Any]:
        """Build environment and algorithm."""
        return self.changed(seed=seed).run.make_algorithm()

    def make_env(self, num_envs: int, **kwargs: Any) -> Env:
        """Make the environment with so many copies."""
        return self.run.env.maker(self.run.trusted)(num_envs, **kwargs)


def own(env: str, transitions: int, lr: float, env_kwargs: dict[str, Any] | None = None, **config: Any) -> RunSpec:
    """Return the run of a task of the benchmark's own, by PPO; the learning rate falls to 0 in a straight line."""
    schedule = {"kind": "interp", "points": [[0, lr], [transitions, 0.0]]}
    return RunSpec.from_plain(
        {
            "env": env,
            "env_kwargs": env_kwargs or {},
            "algorithm_config": {"lr_schedule": schedule, **COMMON, **config},
            "stop_conditions": [{"hits_upper_bound": ["env/steps", transitions]}],
        },
        trust=True,
    )


def published(env: str, algorithm: str, best_bound: float | None, bound: float | None, seeds: int) -> Task:
    """Return a task that others published a number for: the best of the evaluations of ten episodes on the way.

    Args:
        env: The environment.
        algorithm: What learns it.
        best_bound: What the mean over seeds of ours must be; Tianshou's README has numbers of Gym's v3.
        bound: What the last policy of every seed must be.
        seeds: How many seeds there are.
    """
    run = tuned(env, algorithm)
    watched = {"steps_per_eval": run.run.steps_per_eval, "eval_episodes": 10, "episodes": 64}
    return Task(run=run, bound=bound, best_bound=best_bound, seeds=seeds, **watched)


SMALL = {"hidden_sizes": [64, 64]}
BATCH = {"num_envs": 64, "horizon": 32, "sgd_minibatch_size": 512}
# Written out, so that what was measured stays what it was where a default changes.
COMMON = {
    "num_sgd_iters": 4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_param": 0.2,
    "entropy_coeff": 0.0,
    "vf_coeff": 1.0,
    "vf_clip_param": 5.0,
    "max_grad_norm": 0.5,
    "normalize_observations": False,
    "normalize_rewards": True,
    "normalize_advantages": True,
    "model": "mlp",
    "model_config": {**SMALL, "activation": "relu"},
    "device": "cpu",
    "num_threads": 1,
}
MASKED = {
    "env": "benchmarks.learning_envs.MaskedCartPole",
    "transitions": 262_144,
    "lr": 5e-3,
    "num_envs": 128,
    "horizon": 32,
    "sgd_minibatch_size": 1024,
    # Without it the angle, a tenth of the position, is hardly seen, and the policy at the end is not a stable one.
    "normalize_observations": True,
}
TRADING = {
    "env": "AlgoTrading",
    "env_kwargs": {"time_limit": 32},
    "transitions": 245_760,
    "lr": 3e-3,
    "num_envs": 256,
    "horizon": 32,
    "sgd_minibatch_size": 2048,
    "gamma": 0.9,
}
PIXELS = {"convolutions": [[16, 4, 2], [32, 3, 1]], "hidden_sizes": [64]}
ATTENTION = {"window": 8, "width": 32, "num_heads": 2}
SWINGS = {"bound": -200.0, "first_within": 10_000, "steps_per_eval": 16}  # Pendulum, from a replay

TASKS = {
    "cartpole": Task(run=tuned("CartPole"), bound=475.0),
    "cartpole-dqn": Task(run=tuned("CartPole", "DQN"), bound=475.0, first_within=50_000, steps_per_eval=16),
    "cartpole-pqn": Task(run=tuned("CartPole", "PQN"), bound=475.0, steps_per_eval=8, seeds=3),
    "pendulum": Task(run=tuned("Pendulum"), bound=-200.0),
    "pendulum-sac": Task(run=tuned("Pendulum", "SAC"), **SWINGS),
    "pendulum-td3": Task(run=tuned("Pendulum", "TD3"), **SWINGS),
    "acrobot": Task(run=tuned("Acrobot"), bound=-100.0),
    "masked-cartpole-gru": Task(
        run=own(**MASKED, model="gru", model_config={"hidden_size": 64}, seq_len=16), bound=450.0
    ),
    "masked-cartpole-mlp": Task(run=own(**MASKED), bound=450.0, fails=True),
    "catch-pixels": Task(
        run=own("benchmarks.learning_envs.Catch", 196_608, 5e-3, **BATCH, model="cnn", model_config=PIXELS),
        bound=0.95,
        seeds=3,
    ),
    # Whoever saw the mask takes 12.48 in the mean, sum over k of P(k legal) k / (k + 1), sixteen times.
    "action-mask": Task(run=own("benchmarks.learning_envs.Traps", 131_072, 5e-3, **BATCH, gamma=0.5), bound=12.2),
    "trading-mlp": Task(run=own(**TRADING), bound=18.0, fails=True, seeds=3, episodes=1024),
    "trading-lstm": Task(run=tuned("AlgoTrading"), bound=20.0, seeds=3, episodes=1024),
    "trading-attention": Task(
        run=own(**TRADING, model="attention", model_config=ATTENTION, seq_len=8), bound=20.0, seeds=3, episodes=1024
    ),
    "lunar-lander": Task(run=tuned("LunarLander-v3"), bound=200.0, seeds=3, episodes=128),
    # Published: PPO 5784 +- 1244, 2609 +- 701, 3589 +- 757; SAC 12139 +- 1049, 3542 +- 52; TD3 10201, 3472.
    "half-cheetah": published("HalfCheetah-v5", "PPO", 5391, 3000, seeds=5),
    "half-cheetah-sac": published("HalfCheetah-v5", "SAC", 10925, 9104, seeds=2),
    "half-cheetah-td3": published("HalfCheetah-v5", "TD3", 7651, 7651, seeds=1),
    "hopper": published("Hopper-v5", "PPO", 2387, 1800, seeds=5),
    "hopper-sac": published("Hopper-v5", "SAC", 3188, 2656, seeds=2),
    "hopper-td3": published("Hopper-v5", "TD3", 2604, 2604, seeds=1),
    "walker2d": published("Walker2d-v5", "PPO", 3350, 2000, seeds=5),
    "ant": published("Ant-v5", "PPO", None, None, seeds=5),
}
_OF_TASK = {"CartPole": 475.0, "Pendulum": -200.0, "Acrobot": -100.0, "MountainCar": -110.0, "LunarLander": 200.0}
_NAMED = {(task.run.env.env, task.run.algorithm.algorithm.lower()) for task in TASKS.values()}
TASKS |= {
    f"{env}-{algorithm}".lower(): Task(
        run=tuned(env, algorithm), bound=_OF_TASK.get(env.partition("-")[0]), seeds=3, episodes=100
    )
    for env, algorithms in tuned_files().items()
    for algorithm in algorithms
    if (env, algorithm) not in _NAMED
}

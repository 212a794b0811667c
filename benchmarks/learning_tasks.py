"""The tasks of the learning benchmark: what is trained, and what is asked of it.

What users have by name, `rl8x.tuned`, is measured here as it is. The other tasks ask for one ability each, or are
controls without it. `PRECISIONS` are the same tasks in both precisions; `DEFAULTS` have nothing given but the
environment, or one number halved or doubled, since a default should not stand on an edge. `DISTILLED` compare students
of a teacher that sees everything with what learns from scratch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.learning_runs import Notes, Task
from rl8x import Trainer, distill, tuned
from rl8x.config import RunSpec
from rl8x.config.tuned import tuned_files
from rl8x.plain import thawed
from rl8x.randomization import LogUniform

Fields = dict[str, Any]


def falling(lr: float, end: float) -> Fields:
    """Return a learning rate that falls to 0 in a straight line."""
    return {"kind": "interp", "points": [[0, lr], [end, 0.0]]}


def run_of(env: str, transitions: int, lr: float | None, config: Fields, **others: Any) -> RunSpec:
    """Return a run of so many transitions; a learning rate that is given falls to 0."""
    schedule = {} if lr is None else {"lr_schedule": falling(lr, transitions)}
    stop = {"hits_upper_bound": ["env/steps", transitions]}
    plain = {"env": env, "algorithm_config": {**schedule, **config}, "stop_conditions": [stop], **others}
    return RunSpec.from_plain(plain, trust=env.startswith("benchmarks."))


def own(env: str, transitions: int, lr: float, env_kwargs: Fields | None = None, **config: Any) -> RunSpec:
    """Return the run of a task of the benchmark's own, by PPO."""
    return run_of(env, transitions, lr, {**COMMON, **config}, env_kwargs=env_kwargs or {})


def published(env: str, algorithm: str, best_bound: float | None, bound: float | None, seeds: int) -> Task:
    """Return a task that others published a number for: the best of the evaluations of ten episodes on the way.

    `best_bound` is what that must be in the mean over seeds (Tianshou's README has numbers of Gym's v3), `bound` what
    the last policy of every seed must be.
    """
    run = tuned(env, algorithm)
    watched = {"steps_per_eval": run.run.steps_per_eval, "eval_episodes": 10, "episodes": 64}
    return Task(run=run, bound=bound, best_bound=best_bound, seeds=seeds, **watched)


ON_ONE_THREAD = {"device": "cpu", "num_threads": 1}
SMALL = {"hidden_sizes": [64, 64]}
BATCH = {"num_envs": 64, "horizon": 32, "sgd_minibatch_size": 512}
# Written out, so that what was measured stays what it was where a default changes.
COMMON: Fields = {"num_sgd_iters": 4, "gamma": 0.99, "gae_lambda": 0.95, "clip_param": 0.2, "entropy_coeff": 0.0}
COMMON |= {"vf_coeff": 1.0, "vf_clip_param": 5.0, "max_grad_norm": 0.5, "normalize_observations": False}
COMMON |= {"normalize_rewards": True, "normalize_advantages": True, **ON_ONE_THREAD}
COMMON |= {"model": "mlp", "model_config": {**SMALL, "activation": "relu"}}
MASKED: Fields = {"env": "benchmarks.learning_envs.MaskedCartPole", "transitions": 262_144, "lr": 5e-3}
MASKED |= {"num_envs": 128, "horizon": 32, "sgd_minibatch_size": 1024}
# Without it the angle, a tenth of the position, is hardly seen, and the policy at the end is not a stable one.
MASKED |= {"normalize_observations": True}
TRADING: Fields = {"env": "AlgoTrading", "env_kwargs": {"time_limit": 32}, "transitions": 245_760, "lr": 3e-3}
TRADING |= {"num_envs": 256, "horizon": 32, "sgd_minibatch_size": 2048, "gamma": 0.9}
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
    # learning_sb3.py: Stable-Baselines3 with its zoo's settings, run here on v5, whose observations are not v3's.
    "ant": published("Ant-v5", "PPO", 825, 500, seeds=5),
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

PRECISIONS = {
    f"{name} {precision}": task.changed(precision=precision, execution="eager")
    for name, task in TASKS.items()
    for precision in ("fp32", "bf16")
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByDefaults(Task):
    """An environment and an algorithm, with nothing else given or with one number halved or doubled."""

    @property
    def described(self) -> dict[str, Any]:
        """All of the task, and the values that it is trained with."""
        config = self.run.algorithm.make_config()
        options = {field.name: thawed(getattr(config, field.name)) for field in dataclasses.fields(config)}
        return {**super().described, "config": {name: value for name, value in options.items() if name != "seed"}}


def by_defaults(env: str, algorithm: str, transitions: int, bound: float, **given: Any) -> ByDefaults:
    """Return the task of an environment; it passes with at least 4 of its 5 seeds."""
    run = run_of(env, transitions, None, given, algorithm=algorithm)
    return ByDefaults(run=run, bound=bound, seeds=1 if given else 5, episodes=100)


def near(name: str, width: Sequence[int]) -> dict[str, ByDefaults]:
    """Return the task of a name with each of `NUMBERS` halved, and doubled; its hidden layers have some widths."""
    task = BY_DEFAULTS[name]
    config, tasks = task.run.algorithm.make_config(), {}
    assert task.bound is not None
    for number, (word, factor) in itertools.product(NUMBERS, FACTORS.items()):
        if number == "width":
            widths = [int(factor * each) for each in width]
            given: Fields = {"model_config": {"hidden_sizes": widths}}
            given |= {"critic_hidden_sizes": widths} if hasattr(config, "critic_hidden_sizes") else {}
        else:
            value = getattr(config, number)
            given = {number: type(value + 0)(value * factor)}
        changed = by_defaults(task.run.env.env, task.run.algorithm.algorithm, task.transitions, task.bound, **given)
        tasks[f"{name}-{number}-{word}"] = changed
    return tasks


FACTORS = {"half": 0.5, "double": 2.0}
NUMBERS = ("lr", "num_envs", "horizon", "width")
BY_DEFAULTS = {
    "ppo-cartpole": by_defaults("CartPole", "PPO", 200_000, 475.0),
    "ppo-pendulum": by_defaults("Pendulum", "PPO", 400_000, -250.0),
    "ppo-acrobot": by_defaults("Acrobot", "PPO", 200_000, -100.0),
    "ppo-lunarlander": by_defaults("LunarLander-v3", "PPO", 1_000_000, 200.0),
    "dqn-cartpole": by_defaults("CartPole", "DQN", 200_000, 475.0),
    "dqn-acrobot": by_defaults("Acrobot", "DQN", 200_000, -100.0),
    "pqn-cartpole": by_defaults("CartPole", "PQN", 500_000, 475.0),
    "sac-pendulum": by_defaults("Pendulum", "SAC", 20_000, -200.0),
    "td3-pendulum": by_defaults("Pendulum", "TD3", 20_000, -200.0),
}
NEAR = {"ppo-cartpole": near("ppo-cartpole", (64, 64)), "sac-pendulum": near("sac-pendulum", (256, 256))}
DEFAULTS = {**BY_DEFAULTS, **{name: task for tasks in NEAR.values() for name, task in tasks.items()}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Student(Task):
    """A policy that the teacher of the same seed teaches, and that sees less."""

    def make_algorithm(self, seed: int) -> Any:
        """Train the teacher, if it is not there yet, and build its student."""
        return distill(teacher(seed), self.changed(seed=seed).run.algorithm.make_config())


@functools.cache
def teacher(seed: int) -> Trainer[Any]:
    """Train the teacher of a seed; the second call returns the first's."""
    return DISTILLED["teacher"].train(seed, Notes(None, {}))


def partly_seen(transitions: int, model: Fields, *, env_kwargs: Fields | None = None, taught: bool = False) -> Task:
    """Return the task of CartPole with hidden velocities, and pole and motor drawn anew for each episode."""
    by, lr, config = ({"algorithm": "distillation"}, 2e-3, BY_TEACHER) if taught else ({"preset": "rl8"}, 3e-3, BY_PPO)
    drawn = {name: distribution.to_dict() for name, distribution in PHYSICS.items()}
    others = {"env_kwargs": env_kwargs or {}, "env_config": drawn, **by}
    env, config = "benchmarks.learning_envs.PartlySeenCartPole", {**DRAWN, **model, **config}
    return (Student if taught else Task)(run=run_of(env, transitions, lr, config, **others))


PHYSICS = {"length": LogUniform(0.1, 2.0), "force_mag": LogUniform(4.0, 25.0)}
DRAWN = {"num_envs": 32, "horizon": 64, **ON_ONE_THREAD, "execution": "eager", "max_grad_norm": 0.5}
MLP = {"model": "mlp", "model_config": {"hidden_sizes": [64, 64], "activation": "tanh"}}
GRU = {"model": "gru", "model_config": {"hidden_size": 64, "encoder_sizes": [64]}, "seq_len": 16}
BY_PPO = {"gamma": 0.99, "vf_clip_param": None, "normalize_rewards": True, "sgd_minibatch_size": 256}
BY_TEACHER = {"sgd_minibatch_size": 512, "teacher_obs": ["velocities", "parameters"]}
BLIND = {"blind": True}
# A student with memory beside the same network trained by PPO from scratch, on as many transitions as the student, and
# on as many as teacher and student together. Settings were chosen on seeds from 10 on.
DISTILLED = {
    "teacher": partly_seen(100_000, MLP, env_kwargs={"observe_parameters": "all"}),
    "student-gru": partly_seen(100_000, GRU, taught=True),
    "student-mlp": partly_seen(100_000, MLP, taught=True),
    "ppo-gru": partly_seen(100_000, GRU, env_kwargs=BLIND),
    "ppo-gru-both": partly_seen(200_000, GRU, env_kwargs=BLIND),
}

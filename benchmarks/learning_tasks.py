"""The tasks of the learning benchmark: what is trained, with which settings, for how long, and what is asked of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.learning_envs import Catch, MaskedCartPole, Traps
from rl8x.algorithms import DQNConfig, OnlineConfig, PPOConfig, PQNConfig, SACConfig, TD3Config
from rl8x.envs import Acrobot, AlgoTrading, CartPole, Env, GymnasiumEnv, Pendulum


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, for how long, and what is asked of the result.

    Attributes:
        env: The environment's class, or the id of a Gymnasium one.
        transitions: Transitions to train on.
        lr: Learning rate at the start; it falls to 0 in a straight line.
        bound: The return that every seed must reach; with `fails`, that no seed may reach.
        config: The other hyperparameters, where they are not the defaults.
        algorithm: The class of the hyperparameters.
        first_within: Transitions within which every seed must reach the bound for the first time; None: any.
        steps_per_eval: Steps of the trainer from one evaluation to the next, which say when that was; None: none.
        fails: Whether this is a control that must not learn the task.
        seeds: How many seeds are run, 0, 1, ...
        episodes: Fresh episodes that the final policy is judged by.
        time_limit: Steps of an episode, where the environment itself has no end.
    """

    env: type[Env] | str
    transitions: int
    lr: float
    bound: float
    config: dict[str, Any]
    algorithm: type[OnlineConfig] = PPOConfig
    first_within: int | None = None
    steps_per_eval: int | None = None
    fails: bool = False
    seeds: int = 5
    episodes: int = 256
    time_limit: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `algorithm` but for the seed."""
        schedule = {"kind": "interp", "points": [[0, self.lr], [self.transitions, 0.0]]}
        common = {"lr_schedule": schedule, "max_grad_norm": 0.5, "device": "cpu", "num_threads": 1}
        return {**common, **self.config}

    @property
    def described(self) -> dict[str, Any]:
        """All of the task, as the JSON file has it."""
        name = self.env if isinstance(self.env, str) else self.env.__name__
        algorithm = self.algorithm.__name__.removesuffix("Config")
        return {**dataclasses.asdict(self), "env": name, "algorithm": algorithm, "config": self.settings}

    def passes(self, mean: float, first_at: int | None = None) -> bool:
        """Whether a mean return at the end is what is asked, and the transitions when the bound was first reached."""
        in_time = self.first_within is None or (first_at is not None and first_at <= self.first_within)
        return in_time and (mean < self.bound if self.fails else mean >= self.bound)

    def make_env(self, num_envs: int, **kwargs: Any) -> Env:
        """Make the environment: what `build` of a config takes."""
        if isinstance(self.env, str):
            return GymnasiumEnv(self.env, num_envs, **kwargs)
        return self.env(num_envs, **kwargs, **({} if self.time_limit is None else {"time_limit": self.time_limit}))


SMALL = {"hidden_sizes": [64, 64]}
BATCH = {"num_envs": 64, "horizon": 32, "sgd_minibatch_size": 512}
MASKED = {
    **BATCH,
    "num_envs": 128,
    "sgd_minibatch_size": 1024,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "num_sgd_iters": 4,
    # Without it the angle, a tenth of the position, is hardly seen, and the policy at the end is not a stable one.
    "normalize_observations": True,
}
MUJOCO = {
    "num_envs": 16,
    "horizon": 128,
    "sgd_minibatch_size": 256,
    "num_sgd_iters": 10,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "vf_clip_param": None,
    "vf_coeff": 0.5,
    "normalize_observations": True,
    "model_config": {**SMALL, "activation": "tanh"},
    "distribution_config": {"initial_std": 0.6},
}
# Of SAC and TD3: an update for each transition, after every 32.
SWINGS = {
    "num_envs": 16,
    "horizon": 2,
    "batch_size": 256,
    "warmup_steps": 1_000,
    "gamma": 0.98,
    "tau": 0.01,
    "max_grad_norm": None,
    "model_config": {"hidden_sizes": [256, 256]},
}
TRADING = {
    "num_envs": 256,
    "horizon": 32,
    "sgd_minibatch_size": 2048,
    "gamma": 0.9,
}

TASKS = {
    "cartpole": Task(
        env=CartPole,
        transitions=81_920,
        lr=1e-2,
        bound=475.0,
        config={**BATCH, "gamma": 0.99, "gae_lambda": 0.95, "num_sgd_iters": 4, "model_config": SMALL},
    ),
    "cartpole-dqn": Task(
        env=CartPole,
        algorithm=DQNConfig,
        transitions=100_096,
        lr=1.5e-3,
        bound=475.0,
        first_within=50_000,
        steps_per_eval=16,
        config={
            "num_envs": 64,
            "horizon": 2,
            "batch_size": 128,
            "updates_per_sample": 1.0,
            "n_step": 3,
            "gamma": 0.99,
            "target_interval": 200,
            "huber_delta": None,
            "max_grad_norm": 10.0,
            "model_config": SMALL,
        },
    ),
    "cartpole-pqn": Task(
        env=CartPole,
        algorithm=PQNConfig,
        transitions=499_712,
        lr=1e-4,
        bound=475.0,
        steps_per_eval=8,
        config={
            "num_envs": 32,
            "horizon": 64,
            "num_sgd_iters": 4,
            "sgd_minibatch_size": 128,
            "gamma": 0.99,
            "q_lambda": 0.95,
            "epsilon_schedule": {"kind": "interp", "points": [[0, 1.0], [50_000, 0.05]]},
            "max_grad_norm": 10.0,
            "model_config": {"hidden_sizes": [256, 256]},
        },
        seeds=3,
    ),
    "pendulum": Task(
        env=Pendulum,
        transitions=131_072,
        lr=6e-3,
        bound=-200.0,
        config={
            **BATCH,
            "gamma": 0.98,
            "gae_lambda": 0.9,
            "num_sgd_iters": 4,
            "model_config": SMALL,
            "distribution_config": {"initial_std": 2.0},
        },
    ),
    "pendulum-sac": Task(
        env=Pendulum,
        algorithm=SACConfig,
        transitions=12_000,
        lr=2e-3,
        bound=-200.0,
        first_within=10_000,
        steps_per_eval=16,
        config=SWINGS,
    ),
    "pendulum-td3": Task(
        env=Pendulum,
        algorithm=TD3Config,
        transitions=12_000,
        lr=2e-3,
        bound=-200.0,
        first_within=10_000,
        steps_per_eval=16,
        config=SWINGS,
    ),
    "acrobot": Task(
        env=Acrobot,
        transitions=131_072,
        lr=5e-3,
        bound=-100.0,
        config={
            **BATCH,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "num_sgd_iters": 4,
            "model_config": {**SMALL, "activation": "tanh"},
            "normalize_observations": True,
        },
    ),
    "masked-cartpole-gru": Task(
        env=MaskedCartPole,
        transitions=262_144,
        lr=5e-3,
        bound=450.0,
        config={**MASKED, "model": "gru", "model_config": {"hidden_size": 64}, "seq_len": 16},
    ),
    "masked-cartpole-mlp": Task(
        env=MaskedCartPole,
        transitions=262_144,
        lr=5e-3,
        bound=450.0,
        config={**MASKED, "model_config": SMALL},
        fails=True,
    ),
    "catch-pixels": Task(
        env=Catch,
        transitions=196_608,
        lr=5e-3,
        bound=0.95,
        config={
            **BATCH,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "num_sgd_iters": 4,
            "model": "cnn",
            "model_config": {"convolutions": [[16, 4, 2], [32, 3, 1]], "hidden_sizes": [64]},
        },
        seeds=3,
    ),
    # Whoever saw the mask takes 12.48 in the mean, sum over k of P(k legal) k / (k + 1), sixteen times.
    "action-mask": Task(
        env=Traps,
        transitions=131_072,
        lr=5e-3,
        bound=12.2,
        config={**BATCH, "gamma": 0.5, "num_sgd_iters": 4, "model_config": SMALL},
    ),
    "trading-mlp": Task(
        env=AlgoTrading,
        transitions=245_760,
        lr=3e-3,
        bound=18.0,
        config={**TRADING, "model_config": SMALL},
        fails=True,
        seeds=3,
        episodes=1024,
        time_limit=32,
    ),
    "trading-lstm": Task(
        env=AlgoTrading,
        transitions=245_760,
        lr=3e-3,
        bound=20.0,
        config={**TRADING, "model": "lstm", "model_config": {"hidden_size": 64}, "seq_len": 8},
        seeds=3,
        episodes=1024,
        time_limit=32,
    ),
    "trading-attention": Task(
        env=AlgoTrading,
        transitions=245_760,
        lr=3e-3,
        bound=20.0,
        config={
            **TRADING,
            "model": "attention",
            "model_config": {"window": 8, "width": 32, "num_heads": 2},
            "seq_len": 8,
        },
        seeds=3,
        episodes=1024,
        time_limit=32,
    ),
    "lunar-lander": Task(
        env="LunarLander-v3",
        transitions=1_000_000,
        lr=1e-3,
        bound=200.0,
        config={
            "num_envs": 32,
            "horizon": 128,
            "sgd_minibatch_size": 512,
            "num_sgd_iters": 6,
            "gamma": 0.999,
            "gae_lambda": 0.98,
            "entropy_coeff": 0.01,
            "vf_clip_param": None,
            "vf_coeff": 0.5,
            "model_config": SMALL,
        },
        seeds=3,
        episodes=128,
    ),
    "half-cheetah": Task(
        env="HalfCheetah-v5", transitions=1_000_000, lr=6e-4, bound=3000.0, config=MUJOCO, seeds=3, episodes=64
    ),
    "half-cheetah-sac": Task(
        env="HalfCheetah-v5",
        algorithm=SACConfig,
        transitions=300_000,
        lr=6e-4,
        bound=5000.0,
        config={
            "num_envs": 4,
            "horizon": 4,
            "batch_size": 256,
            "updates_per_sample": 1.0,
            "warmup_steps": 5_000,
            "max_grad_norm": None,
            "model_config": {"hidden_sizes": [256, 256]},
        },
        seeds=1,
        episodes=64,
    ),
    "hopper": Task(env="Hopper-v5", transitions=1_000_000, lr=6e-4, bound=1800.0, config=MUJOCO, seeds=3, episodes=64),
}

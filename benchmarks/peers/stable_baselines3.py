"""Stable-Baselines3: its PPO, DQN and SAC on a numpy vector environment, logging to a CSV file."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from benchmarks.peers.envs import NumpyEnv, spaces_of
from benchmarks.recorder import Recorder, recorded
from benchmarks.works import MAX_ITERATIONS, Job, ReplayWork, Work

Array = np.ndarray[Any, Any]


class Adapter(VecEnv):
    """A batched numpy environment in Stable-Baselines3's interface, with what its monitor would say of episodes."""

    def __init__(self, name: str, num_envs: int, seed: int) -> None:
        self.env = NumpyEnv(name, num_envs, seed)
        self.actions: Array | None = None
        super().__init__(num_envs, *spaces_of(name))

    def reset(self) -> Array:
        """Start an episode in every copy."""
        return self.env.reset()

    def step_async(self, actions: Array) -> None:
        """Take actions."""
        self.actions = actions

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:
        """Move every copy."""
        assert self.actions is not None
        step = self.env.step(self.actions)
        done = step.terminated | step.truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for index in np.flatnonzero(done):
            infos[index] = {
                "terminal_observation": step.final_obs[index],
                "TimeLimit.truncated": bool(step.truncated[index]),
                "episode": {"r": float(step.returns[index]), "l": int(step.lengths[index]), "t": 0.0},
            }
        return step.obs, step.rewards, done, infos

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Say that there is no rendering, which is all that is asked for."""
        return [{"render_mode": None}[attr_name]] * self.num_envs

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        """Be what the interface asks for and nobody calls."""
        raise NotImplementedError

    close = set_attr = env_method = env_is_wrapped = refuse  # type: ignore[assignment]


class Ticker(BaseCallback):
    """Tells when an iteration of so many rollouts has ended, which is when the next one begins."""

    def __init__(self, recorder: Recorder, rollouts: int) -> None:
        super().__init__()
        self.recorder, self.rollouts, self.begun = recorder, rollouts, 0

    def act(self, obs: Array) -> Array:
        """Return the likeliest actions."""
        return self.model.predict(obs, deterministic=True)[0]

    def _on_rollout_start(self) -> None:
        if self.begun and self.begun % self.rollouts == 0:
            self.recorder.tick(self.act)
        self.begun += 1

    def _on_step(self) -> bool:
        return True


def ppo(job: Job, work: Work, env: VecEnv) -> BaseAlgorithm:
    """Make the `PPO` of a work."""
    return PPO(
        "MlpPolicy",
        env,
        learning_rate=work.lr,
        n_steps=work.horizon,
        batch_size=work.minibatch_size,
        n_epochs=work.passes,
        gamma=work.gamma,
        gae_lambda=work.gae_lambda,
        clip_range=work.clip,
        ent_coef=work.entropy_coeff,
        max_grad_norm=work.max_grad_norm,
        policy_kwargs={"net_arch": {"pi": work.widths, "vf": work.widths}, "activation_fn": torch.nn.ReLU},
        seed=job.seed,
        device=job.device,
    )


def off_policy(job: Job, work: ReplayWork, env: VecEnv) -> BaseAlgorithm:
    """Make the `DQN` or the `SAC` of a work."""
    shared: dict[str, Any] = {
        "learning_rate": work.lr,
        "buffer_size": work.buffer_size,
        "learning_starts": work.warmup_steps,
        "batch_size": work.batch_size,
        "gamma": work.gamma,
        "train_freq": work.horizon,
        "gradient_steps": round(work.num_envs * work.horizon * work.updates_per_sample),
        "policy_kwargs": {"net_arch": work.widths, "activation_fn": torch.nn.ReLU},
        "seed": job.seed,
        "device": job.device,
    }
    if work.algorithm == "sac":
        return SAC("MlpPolicy", env, tau=work.tau, **shared)
    return DQN(
        "MlpPolicy",
        env,
        target_update_interval=work.transitions_per_target,
        exploration_fraction=1e-9,
        exploration_initial_eps=work.epsilon,
        exploration_final_eps=work.epsilon,
        max_grad_norm=work.max_grad_norm,
        **shared,
    )


def train(job: Job, recorder: Recorder) -> None:
    """Train with `learn`."""
    work = job.work
    env: VecEnv = Adapter(work.env, work.num_envs, job.seed)
    if isinstance(work, Work) and work.normalize_rewards:
        env = VecNormalize(env, norm_obs=False, clip_reward=np.inf, gamma=work.gamma)
    model = off_policy(job, work, env) if isinstance(work, ReplayWork) else ppo(job, work, env)
    model.set_logger(configure(".", ["csv"]))
    ticker = Ticker(recorder, work.blocks)
    recorder.start()
    model.learn(MAX_ITERATIONS * work.transitions, callback=ticker)
    recorder.tick(ticker.act)


answer = recorded(train, "stable-baselines3", "torch", "gymnasium", "numpy")

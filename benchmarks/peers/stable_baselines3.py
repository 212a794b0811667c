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
from benchmarks.works import MAX_ITERATIONS, Job, Work

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
    """Tells when the next rollout begins."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def act(self, obs: Array) -> Array:
        """Return the likeliest actions."""
        return self.model.predict(obs, deterministic=True)[0]

    def _on_rollout_start(self) -> None:
        self.recorder.block(self.act)

    def _on_step(self) -> bool:
        return True


def model_of(job: Job, env: VecEnv) -> BaseAlgorithm:
    """Make the `PPO`, `DQN` or `SAC` of a work."""
    work, relu = job.work, {"activation_fn": torch.nn.ReLU}
    given: dict[str, Any] = {"policy": "MlpPolicy", "env": env, "learning_rate": work.lr, "gamma": work.gamma}
    given |= {"seed": job.seed, "device": job.device, "policy_kwargs": {"net_arch": work.widths, **relu}}
    if isinstance(work, Work):
        given["policy_kwargs"]["net_arch"] = {"pi": work.widths, "vf": work.widths}
        return PPO(
            **given,
            **work.fields("gae_lambda", "max_grad_norm"),
            n_steps=work.horizon,
            batch_size=work.minibatch_size,
            n_epochs=work.passes,
            clip_range=work.clip,
            ent_coef=work.entropy_coeff,
        )
    given |= work.fields("buffer_size", "batch_size") | {"learning_starts": work.warmup_steps}
    updates = round(work.num_envs * work.horizon * work.updates_per_sample)
    given |= {"train_freq": work.horizon, "gradient_steps": updates}
    if work.algorithm == "sac":
        return SAC(**given, tau=work.tau)
    return DQN(
        **given,
        target_update_interval=work.transitions_per_target,
        exploration_fraction=1e-9,
        exploration_initial_eps=work.epsilon,
        exploration_final_eps=work.epsilon,
        max_grad_norm=work.max_grad_norm,
    )


def train(job: Job, recorder: Recorder) -> None:
    """Train with `learn`."""
    work = job.work
    env: VecEnv = Adapter(work.env, work.num_envs, job.seed)
    if isinstance(work, Work) and work.normalize_rewards:
        env = VecNormalize(env, norm_obs=False, clip_reward=np.inf, gamma=work.gamma)
    model = model_of(job, env)
    model.set_logger(configure(".", ["csv"]))
    ticker = Ticker(recorder)
    recorder.start()
    model.learn(MAX_ITERATIONS * work.transitions, callback=ticker)
    recorder.tick(ticker.act)


answer = recorded(train, "stable-baselines3", "torch", "gymnasium", "numpy")

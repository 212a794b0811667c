"""Train Stable-Baselines3's PPO on Gymnasium's Ant-v5 by its zoo's settings, as learning.py trains and evaluates rl8x.

    python -m benchmarks.learning_sb3 [SEED ...]    # half an hour a seed; each adds a row to results/learning-sb3.json

What others published of Ant is of v3, whose observations are others. Evaluations are deterministic: ten episodes as
often as rl8x's run file has them, whose best is kept, and 64 fresh ones of the policy at the end.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize, sync_envs_normalization

from benchmarks.results import RESULTS, Row, about, held, save

ENV, TRANSITIONS, OUT = "Ant-v5", 1_003_520, RESULTS / "learning-sb3.json"
# hyperparams/ppo.yml of rl-baselines3-zoo, Ant: normalised observations and rewards, one copy, PPO's own defaults.
SETTINGS: dict[str, Any] = {"n_steps": 2048, "batch_size": 64, "n_epochs": 10, "learning_rate": 3e-4, "gamma": 0.99}
EVAL_EVERY, EVAL_EPISODES, EPISODES = 14 * 2048, 10, 64


class Evaluations(BaseCallback):
    """Evaluates after every `EVAL_EVERY` transitions, and keeps their number and the mean return of each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.envs = evaluation_envs(EVAL_EPISODES, seed)
        self.found: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:  # after the update before it
        if self.num_timesteps and self.num_timesteps % EVAL_EVERY == 0:
            self.found.append((self.num_timesteps, round(float(returns(self.model, self.envs).mean()), 2)))

    _on_training_end = _on_rollout_start


def evaluation_envs(num_envs: int, seed: int) -> VecNormalize:
    """Make copies to evaluate in, which take the moments of training and leave rewards as they are."""
    return VecNormalize(make_vec_env(ENV, num_envs, seed=10_000 + 1_000 * seed), training=False, norm_reward=False)


def returns(model: Any, envs: VecNormalize) -> Any:
    """Return the returns of deterministic episodes, one of each copy."""
    sync_envs_normalization(model.get_vec_normalize_env(), envs)
    found, _ = evaluate_policy(model, envs, envs.num_envs, deterministic=True, return_episode_rewards=True)
    return np.array(found)


def measure(seed: int) -> Row:
    """Train once, and evaluate on the way and at the end."""
    cpu, env = time.process_time(), VecNormalize(make_vec_env(ENV, 1, seed=seed), gamma=SETTINGS["gamma"])
    model, evaluations = PPO("MlpPolicy", env, seed=seed, device="cpu", **SETTINGS), Evaluations(seed)
    model.learn(TRANSITIONS, callback=evaluations)
    cpu, last = time.process_time() - cpu, returns(model, evaluation_envs(EPISODES, seed))
    numbers = {"return_mean": last.mean(), "return_min": last.min(), "return_std": last.std(), "cpu_s": cpu}
    best = max(value for _, value in evaluations.found)
    row = {name: round(float(value), 2) for name, value in numbers.items()}
    return {"env": ENV, "seed": seed, **row, "best": best, "env_steps": model.num_timesteps}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for given in map(int, sys.argv[1:] or range(3)):
        others = [row for row in held(OUT).get("rows", []) if row["seed"] != given]
        made = {"settings": SETTINGS, **about("stable_baselines3", "gymnasium", "mujoco", "torch")}
        save(OUT, {**made, "rows": sorted([*others, measure(given)], key=lambda row: row["seed"])})

"""Measure Stable-Baselines3's PPO on Gymnasium's Ant-v5, by the settings of its zoo, as learning.py measures rl8x.

    python benchmarks/learning_sb3.py [--seeds 0 1 ...] [--out learning-sb3.json]

The best evaluation of 10 episodes on the way, deterministic, as often as rl8x's are, and the policy at the end in 64
fresh episodes. What others published of Ant is of v3, whose observations are others. Rows are written at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize, sync_envs_normalization

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import version
from benchmarks.learning import DEFAULT_OUT, held

ENV, TRANSITIONS = "Ant-v5", 1_003_520
# hyperparams/ppo.yml of rl-baselines3-zoo, Ant-v3: normalised observations and rewards, one copy, PPO's defaults.
ZOO: dict[str, Any] = {
    "n_steps": 2048,
    "batch_size": 64,
    "n_epochs": 10,
    "learning_rate": 3e-4,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "ent_coef": 0.0,
    "vf_coef": 0.5,
    "max_grad_norm": 0.5,
}
STEPS_PER_EVAL = 14  # of n_steps transitions, as in rl8x's run file
EVAL_EPISODES, EPISODES = 10, 64


class Evaluations(BaseCallback):
    """Evaluates at regular intervals, deterministic, and keeps transitions and mean return of each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.envs = evaluation_envs(EVAL_EPISODES, seed)
        self.found: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:  # after the update before it
        if self.num_timesteps and self.num_timesteps % (STEPS_PER_EVAL * ZOO["n_steps"]) == 0:
            self.evaluate()

    def evaluate(self) -> None:
        """Evaluate now."""
        self.found.append((self.num_timesteps, returns(self.model, self.envs, EVAL_EPISODES)[0]))


def evaluation_envs(num_envs: int, seed: int) -> VecNormalize:
    """Make copies to evaluate in, which take the moments of training and leave rewards as they are."""
    envs = make_vec_env(ENV, n_envs=num_envs, seed=10_000 + 1_000 * seed)
    return VecNormalize(envs, training=False, norm_reward=False)


def returns(model: Any, envs: VecNormalize, episodes: int) -> tuple[float, float, float]:
    """Return mean, smallest and standard deviation of the returns of deterministic episodes, one of each copy."""
    sync_envs_normalization(model.get_vec_normalize_env(), envs)
    found, _ = evaluate_policy(model, envs, episodes, deterministic=True, return_episode_rewards=True)
    return float(np.mean(found)), float(np.min(found)), float(np.std(found))


def measure(seed: int) -> dict[str, Any]:
    """Train once, and evaluate on the way and at the end."""
    wall, cpu = time.perf_counter(), time.process_time()
    env = VecNormalize(make_vec_env(ENV, n_envs=1, seed=seed), gamma=ZOO["gamma"])
    model, evaluations = PPO("MlpPolicy", env, seed=seed, device="cpu", **ZOO), Evaluations(seed)
    model.learn(TRANSITIONS, callback=evaluations)
    if not evaluations.found or evaluations.found[-1][0] != model.num_timesteps:
        evaluations.evaluate()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    mean, least, deviation = returns(model, evaluation_envs(EPISODES, seed), EPISODES)
    best_at, best = max(evaluations.found, key=lambda each: each[1])
    return {
        "env": ENV,
        "seed": seed,
        "return_mean": round(mean, 2),
        "return_min": round(least, 2),
        "return_std": round(deviation, 2),
        "best": round(best, 2),
        "best_at": best_at,
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "env_steps": model.num_timesteps,
        "evaluations": [[at, round(value, 2)] for at, value in evaluations.found],
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write the JSON file after every seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT.with_name("learning-sb3.json"))
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for seed in options.seeds:
        row = measure(seed)
        print(json.dumps({name: value for name, value in row.items() if name != "evaluations"}), flush=True)
        others = [each for each in held(options.out).get("rows", []) if each["seed"] != seed]
        rows = ",\n".join(json.dumps(each) for each in sorted([*others, row], key=lambda each: int(each["seed"])))
        versions = {"gymnasium": gymnasium.__version__, "torch": torch.__version__}
        versions |= {name: version(name) for name in ("stable_baselines3", "mujoco")}
        about = json.dumps({"algorithm": "PPO", "settings": ZOO, "versions": versions})
        options.out.write_text(f'{{"about": {about},\n"rows": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()

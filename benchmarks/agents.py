"""PPO with several agents beside BenchMARL's MAPPO and IPPO: `python -m benchmarks.agents --out FOLDER`.

The work is BenchMARL's as it ships it: its task files, 10 copies x 600 steps in a collect, 45 epochs of minibatches of
400 steps of copies, two layers of 256 under tanh. Both play `EPISODES` episodes with the final policy, deterministic; a
result has the mean return of the team and the seconds of the training on one thread. BenchMARL (1.5) is installed by
itself, in an environment of its own whose Python `--benchmarl` names. Nothing was measured with it yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EPISODES = 64
WORKS: dict[str, dict[str, Any]] = {
    "simple_spread": {"family": "pettingzoo", "agents": 3, "steps": 1_000_000, "seeds": 5},
    "balance": {"family": "vmas", "agents": 3, "steps": 300_000, "seeds": 3},
    "navigation": {"family": "vmas", "agents": 3, "steps": 300_000, "seeds": 3},
}
"""Steps are those of agents."""

THEIRS = """
import sys, time, torch
from benchmarl.algorithms import IppoConfig, MappoConfig
from benchmarl.environments import PettingZooTask, VmasTask
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig

family, name, algorithm, frames, episodes, seed = sys.argv[1:]
torch.set_num_threads(1)
config = ExperimentConfig.get_from_yaml()
config.max_n_frames, config.loggers, config.create_json, config.render = int(frames), [], False, False
config.evaluation_episodes, config.evaluation_interval = int(episodes), int(frames)
config.prefer_continuous_actions = family == "vmas"
task = {"vmas": VmasTask, "pettingzoo": PettingZooTask}[family][name.upper()].get_from_yaml()
task.config |= {"max_cycles": 25} if family == "pettingzoo" else {"max_steps": 100}
made = Experiment(
    task=task, algorithm_config={"mappo": MappoConfig, "ippo": IppoConfig}[algorithm].get_from_yaml(), seed=int(seed),
    model_config=MlpConfig.get_from_yaml(), critic_model_config=MlpConfig.get_from_yaml(), config=config,
)
begin = time.perf_counter()
made.run()
print(made.mean_return, time.perf_counter() - begin)
"""


def ours(name: str, algorithm: str, seed: int) -> tuple[float, float]:
    """Train and test PPO; return the team's mean return and the seconds of the training."""
    from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer

    work = WORKS[name]
    model = {"hidden_sizes": [256, 256], "activation": "tanh"}
    size = {"num_envs": 10, "horizon": 600, "sgd_minibatch_size": 1200, "num_sgd_iters": 45}
    plain = {"lr_schedule": None, "vf_clip_param": None, "normalize_observations": False, "normalize_rewards": False}
    here = {"seed": seed, "device": "cpu", "num_threads": 1}
    config = PPOConfig(lr=5e-5, max_grad_norm=5.0, model_config=model, **size, **plain, **here)
    seen = {"state": "shared" if algorithm == "mappo" else None}
    if work["family"] == "vmas":
        env, kwargs = "rl8x.envs.VmasEnv", {"scenario": name, "time_limit": 100, "n_agents": work["agents"]}
    else:
        env, kwargs = "rl8x.envs.PettingZooEnv", {"make": f"mpe2.{name}_v3:parallel_env", "max_cycles": 25}
    trainer = Trainer(
        config.build(env, **kwargs, **seen), tracker=NullTracker(), checkpoints=False, num_eval_envs=EPISODES
    )
    begin = time.perf_counter()
    trainer.run(stop_conditions=[HitsUpperBound("env/steps", work["steps"])], progress="none")
    seconds = time.perf_counter() - begin
    return trainer.eval()["eval/returns/mean"], seconds


def theirs(python: str, name: str, algorithm: str, seed: int) -> tuple[float, float]:
    """Do the same with BenchMARL, by another Python."""
    work = WORKS[name]
    words = [work["family"], name, algorithm, work["steps"] // work["agents"], EPISODES, seed]
    done = subprocess.run([python, "-c", THEIRS, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True)
    mean, seconds = map(float, done.stdout.split()[-2:])
    return mean, seconds


def main() -> None:
    """Measure all works that have no result yet, a file each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of results")
    parser.add_argument("--benchmarl", help="the Python that has BenchMARL; without it rl8x alone is measured")
    parser.add_argument("--works", nargs="*", default=[*WORKS], choices=[*WORKS])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.works:
        for algorithm in ("mappo", "ippo"):
            for seed in range(WORKS[name]["seeds"]):
                for library in ("rl8x", *(["benchmarl"] if options.benchmarl else [])):
                    file = options.out / f"{name}-{algorithm}-{library}-{seed}.json"
                    if file.exists():
                        continue
                    given = (name, algorithm, seed)
                    mean, seconds = ours(*given) if library == "rl8x" else theirs(options.benchmarl, *given)
                    file.write_text(json.dumps({"mean_return": mean, "seconds": seconds}))
                    print(file.stem, f"{mean:.4g}", f"{seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()

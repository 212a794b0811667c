"""How well PPO learns: the final policy, deterministic, in fresh environments, for every seed.

    python benchmarks/learning.py [--tasks cartpole pendulum ...] [--seeds 5] [--out learning.json] [--publish]

Each task has one setting for all seeds and a fixed number of transitions, over which the learning rate falls to 0. What
counts is the policy at the end, not the best one on the way. The exit code is 1 if a seed misses the task's bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

import rl8x
from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer
from rl8x.envs import Acrobot, CartPole, Env, Pendulum
from rl8x.trainers import TrainStats

EVAL_EPISODES = 256
ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = ROOT / "benchmarks" / "results" / "learning.json"


class MaskedCartPole(CartPole):
    """CartPole whose velocities are hidden: only a policy with a memory can tell where cart and pole are going."""

    single_observation_space = Box(-np.inf, np.inf, (2,), np.float32)

    def observe(self, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Return x and theta."""
        return state["physics"][:, ::2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, for how long, and what is asked of the result.

    Attributes:
        env: The environment.
        transitions: Transitions to train on.
        lr: Learning rate at the start; it falls to 0 in a straight line.
        bound: The return that every seed must reach; with `fails`, that no seed may reach.
        config: The other hyperparameters, where they are not the defaults.
        fails: Whether this is a control that must not learn the task.
    """

    env: type[Env]
    transitions: int
    lr: float
    bound: float
    config: dict[str, Any]
    fails: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `PPOConfig` but for the seed."""
        schedule = {"kind": "interp", "points": [[0, self.lr], [self.transitions, 0.0]]}
        common = {"lr_schedule": schedule, "max_grad_norm": 0.5, "device": "cpu", "num_threads": 1}
        return {**common, **self.config}

    def passes(self, mean: float) -> bool:
        """Whether a mean return is what is asked."""
        return mean < self.bound if self.fails else mean >= self.bound


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

TASKS = {
    "cartpole": Task(
        env=CartPole,
        transitions=81_920,
        lr=1e-2,
        bound=475.0,
        config={**BATCH, "gamma": 0.99, "gae_lambda": 0.95, "num_sgd_iters": 4, "model_config": SMALL},
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
}


def measure(name: str, task: Task, seed: int) -> dict[str, Any]:
    """Train once and evaluate what came out."""
    curve: list[list[float]] = []

    def note(trainer: object, stats: TrainStats) -> None:
        if "episodes/returns/mean" in stats:
            curve.append([stats["env/steps"], round(stats["episodes/returns/mean"], 1)])

    wall, cpu = time.perf_counter(), time.process_time()
    algorithm = PPOConfig(seed=seed, **task.settings).build(task.env)
    # The evaluation environment has seeds of its own: it starts from states that training never saw.
    trainer = Trainer(algorithm, tracker=NullTracker(), eval_env=True, num_eval_envs=EVAL_EPISODES, callbacks=[note])
    trainer.run(stop_conditions=[HitsUpperBound("env/steps", task.transitions)], progress="none")
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    result = trainer.eval(deterministic=True)
    mean = result["eval/episodes/returns/mean"]
    return {
        "task": name,
        "seed": seed,
        "return_mean": round(mean, 2),
        "return_min": round(result["eval/episodes/returns/min"], 2),
        "return_std": round(result["eval/episodes/returns/std"], 2),
        "episodes": int(result["eval/episodes/ended"]),
        "passed": task.passes(mean),
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "env_steps": trainer.state["env/steps"],
        "updates": trainer.state["algorithm/updates"],
        "load": round(os.getloadavg()[0], 1),
        "curve": curve,
    }


def machine() -> dict[str, Any]:
    """Say on what it was measured."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gymnasium": gymnasium.__version__,
            "rl8x": rl8x.__version__,
        },
    }


def report(rows: list[dict[str, Any]], tasks: Mapping[str, Task]) -> str:
    """Lay the worst and the median of each task's seeds out as a Markdown table."""
    lines = [
        "| task | bound | worst seed | median seed | transitions | updates | wall s | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, task in tasks.items():
        mine = [row for row in rows if row["task"] == name]
        if not mine:
            continue
        means = [row["return_mean"] for row in mine]
        worst = max(means) if task.fails else min(means)
        middle = {key: statistics.median(row[key] for row in mine) for key in ("return_mean", "wall_s", "cpu_s")}
        lines.append(
            f"| {name} | {'<' if task.fails else '≥'} {task.bound:g} | {worst:.1f} | {middle['return_mean']:.1f} "
            f"| {mine[0]['env_steps']:,} | {mine[0]['updates']:,} | {middle['wall_s']:.1f} | {middle['cpu_s']:.1f} |"
        )
    return "\n".join(lines)


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Draw the returns of the episodes that ended in training, a panel for each task and a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(document["tasks"])
    figure, axes = plt.subplots(1, len(names), figsize=(3.2 * len(names), 2.8), squeeze=False)
    for name, axis in zip(names, axes[0], strict=True):
        for row in (row for row in document["rows"] if row["task"] == name):
            steps, returns = zip(*row["curve"], strict=True)
            axis.plot([step / 1e3 for step in steps], returns, linewidth=1.2, alpha=0.8)
        axis.axhline(document["tasks"][name]["bound"], color="gray", linestyle=":", linewidth=1)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("thousand transitions", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("return of training episodes", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def publish(document: Mapping[str, Any], root: Path = ROOT) -> None:
    """Put the table between the marks of the README, and draw the curves that it shows."""
    page = root / "README.md"
    before, rest = page.read_text().split("<!-- learning -->\n")
    after = rest.split("<!-- /learning -->")[1]
    table = report(document["rows"], TASKS)
    page.write_text(f"{before}<!-- learning -->\n{table}\n<!-- /learning -->{after}")
    draw(document, root / "docs" / "images" / "learning.png")


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0, 1, ... of each task")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--publish", action="store_true", help="put table and curves into README.md and docs/images/")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    print(
        f"{'task':<20} {'seed':>4} {'return':>8} {'min':>7} {'wall s':>7} {'CPU s':>6} {'env steps':>10} {'updates':>8}"
    )
    for name in options.tasks:
        for seed in range(options.seeds):
            row = measure(name, TASKS[name], seed)
            rows.append(row)
            print(
                f"{name:<20} {seed:>4} {row['return_mean']:>8.1f} {row['return_min']:>7.1f} {row['wall_s']:>7.1f} "
                f"{row['cpu_s']:>6.1f} {row['env_steps']:>10,} {row['updates']:>8,}"
                + ("" if row["passed"] else "  MISSED"),
                flush=True,
            )
    print("\n" + report(rows, TASKS))
    settings = {
        name: {**dataclasses.asdict(TASKS[name]), "env": TASKS[name].env.__name__, "config": TASKS[name].settings}
        for name in options.tasks
    }
    document = {"eval_episodes": EVAL_EPISODES, "machine": machine(), "tasks": settings, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    if options.publish:
        publish(document)
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""How well policies generalise by how the physics that they train under is drawn: fixed, Uniform, Adaptive, Learnable.

    python benchmarks/randomization.py [--tasks cartpole pendulum] [--methods ...] [--seeds 0 1 2 3 4] [--out FILE]
    python benchmarks/randomization.py --tasks --publish    # trains nothing, puts the file's table into docs/studies.md

Every method has the same algorithm, hyperparameters and transitions. What is measured is the final policy,
deterministic, on a grid of physics that is the whole range of Uniform and of what the other two may come to: the mean
return of each cell, and of the cells the mean of the worst tenth (CVaR at 10%). Intervals are of Student's t at 95%,
over seeds; those of differences to Uniform are Welch's. `outside` is the mean over the cells that are not those of the
fixed physics. Ranges and Adaptive's settings were chosen on seeds from 10 on, which are not reported; Learnable's table
on narrower ranges. Rows of other tasks, methods and seeds that the file has already stay there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning import machine, put
from rl8x import HitsUpperBound, NullTracker, PPOConfig, Trainer
from rl8x.envs import CartPole, Env, Pendulum
from rl8x.randomization import Adaptive, Learnable, ParameterDistribution, Uniform

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_OUT = ROOT / "benchmarks" / "results" / "randomization.json"
PAGE = ROOT / "docs" / "studies.md"
METHODS = ("fixed", "uniform", "adaptive", "learnable")
WORST = 0.1


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, and on which physics it is tested.

    Attributes:
        env: The environment.
        ranges: The widest range of each parameter that is drawn.
        start: The range of each with which Adaptive begins.
        transitions: How many are trained on.
        thresholds: Adaptive's, of the returns.
        moves: How many of Adaptive's moves go from one end of a parameter's widest range to the other.
        boundary_share: Adaptive's share of episodes at a boundary.
        solved: Learnable's threshold of the returns.
        config: Hyperparameters of PPO.
        cells: Cells of the test grid along each parameter.
        episodes: Episodes in each cell.
    """

    env: type[Env]
    ranges: Mapping[str, tuple[float, float]]
    start: Mapping[str, tuple[float, float]]
    transitions: int
    thresholds: tuple[float, float]
    moves: int
    boundary_share: float
    solved: float
    config: Mapping[str, Any]
    cells: int = 15
    episodes: int = 8

    def base(self, name: str) -> ParameterDistribution:
        """Return what Uniform draws a parameter from, and Learnable its levels."""
        return Uniform(*self.ranges[name])

    def env_config(self, method: str) -> dict[str, ParameterDistribution]:
        """Return the physics that a method trains under."""
        if method == "fixed":
            return {}
        return {name: self._drawn(method, name) for name in self.ranges}

    def _drawn(self, method: str, name: str) -> ParameterDistribution:
        low, high = self.ranges[name]
        if method == "adaptive":
            options: Any = {"thresholds": self.thresholds, "step": (high - low) / self.moves, "limits": (low, high)}
            return Adaptive(self.start[name], **options, episodes=4, boundary_share=self.boundary_share)
        if method == "learnable":
            return Learnable(self.base(name), threshold=self.solved, levels=32, candidates=96, episodes=3)
        return self.base(name)

    @property
    def grid(self) -> dict[str, list[float]]:
        """The physics of each copy of the test environment, cell by cell."""
        axes = [torch.linspace(low, high, self.cells, dtype=torch.float64) for low, high in self.ranges.values()]
        cells = torch.cartesian_prod(*axes).repeat_interleave(self.episodes, 0)
        return dict(zip(self.ranges, cells.T.tolist(), strict=True))

    @property
    def described(self) -> dict[str, Any]:
        """The settings, as the file has them."""
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        methods = {method: _plain(self.env_config(method)) for method in METHODS}
        return {**settings, "env": self.env.__name__, "algorithm": "PPO", "methods": methods}


def _plain(config: Mapping[str, ParameterDistribution]) -> dict[str, Any]:
    return {name: drawn.to_dict() for name, drawn in config.items()}


SHARED: dict[str, Any] = {
    "num_envs": 64,
    "horizon": 64,
    "sgd_minibatch_size": 512,
    "num_sgd_iters": 4,
    "max_grad_norm": 0.5,
    "model_config": {"hidden_sizes": [64, 64]},
    "device": "cpu",
    "num_threads": 1,
}
TASKS: dict[str, Task] = {
    "cartpole": Task(
        env=CartPole,
        ranges={"length": (0.1, 5.0), "force_mag": (1.0, 25.0)},
        start={"length": (0.3, 3.0), "force_mag": (5.0, 15.0)},
        transitions=614_400,
        thresholds=(50.0, 200.0),
        moves=2,
        boundary_share=0.3,
        solved=475.0,
        config={**SHARED, "gamma": 0.99, "gae_lambda": 0.95, "lr": 5e-3},
    ),
    "pendulum": Task(
        env=Pendulum,
        ranges={"m": (0.2, 1.2), "l": (0.2, 1.2)},
        start={"m": (0.2, 0.8), "l": (0.2, 0.8)},
        transitions=1_228_800,
        thresholds=(-1200.0, -300.0),
        moves=2,
        boundary_share=0.3,
        solved=-400.0,
        config={
            **SHARED,
            "num_envs": 256,
            "horizon": 32,
            "sgd_minibatch_size": 1024,
            "gamma": 0.98,
            "gae_lambda": 0.9,
            "lr": 4e-3,
            "distribution_config": {"std": "state", "initial_std": 1.5},
        },
    ),
}


@torch.no_grad()
def tested(task: Task, policy: Any, seed: int) -> torch.Tensor:
    """Return the mean return of each cell of the test grid, `[cells ** parameters]`."""
    grid = task.grid
    num_envs = len(next(iter(grid.values())))
    env = task.env(num_envs, seed=seed)
    obs, _ = env.reset(config=grid)
    running, returns = torch.ones(num_envs, dtype=torch.bool), torch.zeros(num_envs)
    state, starts = policy.initial_state(num_envs), torch.ones(num_envs, dtype=torch.bool)
    while running.any():
        act = policy.act(obs, state, starts, None)
        obs, _, terminated, truncated, info = env.step(policy.env_actions(act.actions))
        returns = torch.where(running, info["episode"]["r"], returns)
        starts, state = terminated | truncated, act.state
        running = running & ~starts
    return returns.view(-1, task.episodes).mean(1)


def measure(name: str, task: Task, method: str, seed: int) -> dict[str, Any]:
    """Train once by a method, and test what came out."""
    wall, cpu = time.perf_counter(), time.process_time()
    config = {
        **task.config,
        "lr_schedule": {"kind": "interp", "points": [[0, task.config["lr"]], [task.transitions, 0]]},
    }
    algorithm = PPOConfig.rl8(**config, seed=seed).build(task.env)
    trainer = Trainer(algorithm, tracker=NullTracker(), eval_env=False)
    trainer.run(
        env_config=task.env_config(method),
        stop_conditions=[HitsUpperBound("env/steps", task.transitions)],
        progress="none",
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    cells = tested(task, algorithm.policy, seed=10_000 + seed)
    fixed = torch.tensor([[task.env.parameters[key].default for key in task.ranges]], dtype=torch.float64)
    spans = torch.tensor([high - low for low, high in task.ranges.values()], dtype=torch.float64)
    physics = torch.tensor([*task.grid.values()], dtype=torch.float64).T[:: task.episodes]
    nearest = int(((physics - fixed) / spans).square().sum(1).argmin())
    others = torch.cat([cells[:nearest], cells[nearest + 1 :]])
    worst = cells.sort().values[: math.ceil(WORST * len(cells))]
    support = algorithm.env.parameter_support()
    return {
        "task": name,
        "method": method,
        "seed": seed,
        "mean": round(float(cells.mean()), 2),
        "cvar": round(float(worst.mean()), 2),
        "outside": round(float(others.mean()), 2),
        "at_fixed": round(float(cells[nearest]), 2),
        "support": {key: [round(end, 4) for end in support[key]] for key in task.ranges},
        "env_steps": trainer.state["env/steps"],
        "wall_s": round(wall, 1),
        "cpu_s": round(cpu, 1),
        "load": round(os.getloadavg()[0], 1),
        "cells": [round(value, 1) for value in cells.tolist()],
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds and the half width of its 95% interval, infinite for one seed."""
    from scipy import stats

    if len(values) < 2:
        return statistics.fmean(values), math.inf
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(stats.t.ppf(0.975, len(values) - 1)) * error


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Return by how much the mean is ahead of another and the half width of Welch's 95% interval."""
    from scipy import stats

    ahead = statistics.fmean(ours) - statistics.fmean(theirs)
    if min(len(ours), len(theirs)) < 2:
        return ahead, math.inf
    parts = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    if sum(parts) == 0:
        return ahead, 0.0
    freedom = sum(parts) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, (ours, theirs), strict=True))
    return ahead, float(stats.t.ppf(0.975, freedom)) * math.sqrt(sum(parts))


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay the methods out as a Markdown table, with intervals over seeds."""
    lines = [
        "| task | trained under | CVaR 10% | ahead of Uniform | outside | ahead of Uniform | seeds | CPU s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task in TASKS:
        for method in METHODS:
            mine = [row for row in rows if (row["task"], row["method"]) == (task, method)]
            if not mine:
                continue
            shown = [task, method]
            for key in ("cvar", "outside"):
                shown.append(_pm(interval([row[key] for row in mine])))
                uniform = [row[key] for row in rows if (row["task"], row["method"]) == (task, "uniform")]
                compared = bool(uniform) and method != "uniform"
                shown.append(_pm(difference([row[key] for row in mine], uniform)) if compared else "")
            seconds = statistics.median(row["cpu_s"] for row in mine)
            lines.append(f"| {' | '.join(shown)} | {len(mine)} | {seconds:.0f} |")
    return "\n".join(lines)


def _pm(found: tuple[float, float]) -> str:
    return f"{found[0]:.1f} ± {found[1]:.1f}" if math.isfinite(found[1]) else f"{found[0]:.1f}"


def keep(path: Path, row: dict[str, Any]) -> None:
    """Write a row into the file in the place of the same one; rows of a task under other settings go."""
    held = json.loads(path.read_text()) if path.exists() else {"tasks": {}, "rows": []}
    described = json.loads(json.dumps(TASKS[row["task"]].described))
    known = {key: value for key, value in held["tasks"].get(row["task"], {}).items() if key != "machine"}
    same = ("task", "method", "seed")
    rows = [each for each in held["rows"] if [each[key] for key in same] != [row[key] for key in same]]
    rows = [each for each in rows if each["task"] != row["task"] or known == described] + [row]
    rows.sort(key=lambda each: ([*TASKS].index(each["task"]), METHODS.index(each["method"]), each["seed"]))
    tasks = held["tasks"] | {row["task"]: {**described, "machine": machine()}}
    parts = [",\n".join(f"{json.dumps(name)}: {json.dumps(task)}" for name, task in tasks.items())]
    parts.append(",\n".join(json.dumps(each) for each in rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"tasks": {{\n{parts[0]}\n}},\n"rows": [\n{parts[1]}\n]}}\n')


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the JSON file after every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="*", choices=[*TASKS], default=[*TASKS], help="none: only publish")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--publish", action="store_true", help="put the table into docs/studies.md")
    options = parser.parse_args(argv)
    for name in options.tasks:
        for seed in options.seeds:
            for method in options.methods:
                row = measure(name, TASKS[name], method, seed)
                keep(options.out, row)
                print(
                    f"{name:<9} {method:<10} seed {seed}  CVaR {row['cvar']:>8.1f}  mean {row['mean']:>8.1f}  "
                    f"wall {row['wall_s']:>6.1f} s  CPU {row['cpu_s']:>6.1f} s",
                    flush=True,
                )
    table = report(json.loads(options.out.read_text())["rows"])
    print("\n" + table)
    if options.publish:
        put(PAGE, "randomization", table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

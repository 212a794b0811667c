"""Measure what algorithms learn by their defaults, where nothing is given but the environment and a seed.

    python -m benchmarks.defaults [--tasks ppo-cartpole dqn-cartpole ...] [--seeds 100 101 ...] [--publish]

Seeds are ones that no default was chosen with. What counts is the final policy, deterministic, in fresh episodes, as
`benchmarks/learning.py` measures it. `NEAR` has tasks with one number halved or doubled, one seed each, since a default
should not stand on an edge. Each algorithm has a file of results, such as `benchmarks/results/defaults-ppo.json`; rows
that other defaults made go. `--publish` puts the tables of all files into docs/learning.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.learning import as_text, held, measure, merged, missing, put
from benchmarks.learning_tasks import Task
from rl8x.config import RunSpec
from rl8x.frozen import thawed

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
SEEDS: Final = (100, 101, 102, 103, 104)
FACTORS: Final = {"half": 0.5, "double": 2.0}
NUMBERS: Final = ("lr", "num_envs", "horizon", "width")


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
    stop = {"hits_upper_bound": ["env/steps", transitions]}
    run = RunSpec.from_plain({"env": env, "algorithm": algorithm, "algorithm_config": given, "stop_conditions": [stop]})
    return ByDefaults(run=run, bound=bound, seeds=1 if given else len(SEEDS), episodes=100)


def near(name: str, task: ByDefaults, width: Sequence[int]) -> dict[str, ByDefaults]:
    """Return the task with each of `NUMBERS` halved, and doubled, by name.

    Args:
        name: The task's name.
        task: The task.
        width: The widths of its hidden layers.
    """
    config, tasks = task.run.algorithm.make_config(), {}
    assert task.bound is not None
    for number in NUMBERS:
        for word, factor in FACTORS.items():
            if number == "width":
                widths = [int(factor * each) for each in width]
                given: dict[str, Any] = {"model_config": {"hidden_sizes": widths}}
                if hasattr(config, "critic_hidden_sizes"):
                    given["critic_hidden_sizes"] = widths
            else:
                value = getattr(config, number)
                given = {number: type(value + 0)(value * factor)}
            changed = by_defaults(task.run.env.env, task.run.algorithm.algorithm, task.transitions, task.bound, **given)
            tasks[f"{name}-{number}-{word}"] = changed
    return tasks


TASKS: Final = {
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
NEAR: Final = {
    "ppo-cartpole": near("ppo-cartpole", TASKS["ppo-cartpole"], (64, 64)),
    "sac-pendulum": near("sac-pendulum", TASKS["sac-pendulum"], (256, 256)),
}
ALL: Final[dict[str, ByDefaults]] = {**TASKS, **{name: task for tasks in NEAR.values() for name, task in tasks.items()}}


def file_of(algorithm: str, results: Path = RESULTS) -> Path:
    """Return the file of an algorithm's results."""
    return results / f"defaults-{algorithm.lower()}.json"


def keep(path: Path, row: dict[str, Any]) -> None:
    """Write a row into a file, beside those that stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(merged(held(path), [row], ALL)))


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the returns of each task's seeds as a Markdown table."""
    lines = [
        "| environment | algorithm | transitions | asked of 4 seeds | returns by seed | reached by | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, task in TASKS.items():
        mine = [row for row in rows if row["task"] == name]
        if not mine:
            continue
        returns = ", ".join(f"{row['return_mean']:.1f}" for row in mine)
        reached = f"{sum(row['passed'] for row in mine)} of {len(mine)}"
        seconds = statistics.median(row["cpu_s"] for row in mine)
        named = f"{task.run.env.env} | {task.run.algorithm.algorithm}"
        lines.append(
            f"| {named} | {mine[0]['env_steps']:,} | ≥ {task.bound:g} | {returns} | {reached} | {seconds:.1f} |"
        )
    return "\n".join(lines)


def report_near(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay out the returns with one number halved or doubled as a Markdown table."""
    columns = [f"{number}, {word}" for number in NUMBERS for word in FACTORS]
    lines = [f"| | {' | '.join(columns)} | reached by |", "|---" * (len(columns) + 2) + "|"]
    by_task = {row["task"]: row for row in rows}
    for name, tasks in NEAR.items():
        mine = [by_task.get(each) for each in tasks]
        if not any(mine):
            continue
        cells = ["not measured" if row is None else f"{row['return_mean']:.1f}" for row in mine]
        reached = f"{sum(row is not None and row['passed'] for row in mine)} of {len(mine)}"
        lines.append(
            f"| {TASKS[name].run.algorithm.algorithm}, {TASKS[name].run.env.env} | {' | '.join(cells)} | {reached} |"
        )
    return "\n".join(lines)


def all_rows(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the rows of all files that were measured with the defaults of now."""
    rows = []
    for path in sorted(results.glob("defaults-*.json")):
        document = held(path)
        for name, described in document["tasks"].items():
            known = {key: value for key, value in described.items() if key != "machine"}
            if known == json.loads(json.dumps(ALL[name].described)):
                rows += [row for row in document["rows"] if row["task"] == name]
            else:
                print(f"{name}: measured with other defaults, left out")
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write each row into its algorithm's file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="*", choices=[*ALL], default=[], help="none: only print what was measured")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default: {SEEDS[0]} to {SEEDS[-1]}, as many as it has")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the files")
    parser.add_argument("--publish", action="store_true", help="put the tables into docs/learning.md")
    options = parser.parse_args(argv)
    for name in options.tasks:
        task = ALL[name]
        if package := missing(task):
            print(f"{name} left out: it needs {package}")
            continue
        for seed in options.seeds or SEEDS[: task.seeds]:
            row = measure(name, task, seed)
            missed = "" if row["passed"] else "  MISSED"
            print(f"{name:<32} {seed:>4} {row['return_mean']:>8.1f} {row['cpu_s']:>7.1f} CPU s{missed}", flush=True)
            keep(file_of(task.run.algorithm.algorithm, options.results), row)
    rows = all_rows(options.results)
    print("\n" + report(rows) + "\n\n" + report_near(rows))
    if options.publish:
        put(ROOT / "docs" / "learning.md", "defaults", report(rows))
        put(ROOT / "docs" / "learning.md", "near-defaults", report_near(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure how well algorithms learn: returns of the final, deterministic policy in new environments, for each seed.

    python benchmarks/learning.py [--tasks cartpole pendulum ...] [--seeds 0 1 ...] [--out learning.json] [--publish]

Each task has one setting for all seeds, that of `rl8x tuned` where users have it by name, and a fixed number of
transitions. What counts is the policy at the end; some tasks say besides by when a policy must first be good enough, or
what the best evaluation on the way must be, which is what others publish. Rows of other tasks and seeds that the file
has already stay there. The exit code is 1 if a seed misses the task's bound. `benchmarks/learning_tasks.py` has the
tasks; those on Gymnasium's simulators need `pip install "gymnasium[mujoco,box2d]"` and are left out, with a word, where
it is missing. `--publish` also writes what `rl8x tuned` tells.
`benchmarks/offline_tasks.py` has those that learn from data sets alone, for a fixed number of updates.
Runs of hours go on after they were cut off, by `--checkpoints FOLDER`; several processes may write into one `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rl8x
from benchmarks.common import version
from benchmarks.learning_runs import forget, measure
from benchmarks.learning_tasks import TASKS, Task
from benchmarks.offline_tasks import OFFLINE, OfflineTask, measure_offline, report_offline
from rl8x.config import RunSpec
from rl8x.config.tuned import MEASURED, tuned_files

ROOT = Path(__file__).resolve().parents[1]
# The tasks of the README's table and picture; docs/learning.md has all.
SUFFIXES = ("", "-dqn", "-pqn", "-sac", "-td3")  # of a task's name: the algorithm, nothing for PPO
SHOWN = ("cartpole", "pendulum", "masked-cartpole-gru", "masked-cartpole-mlp", "half-cheetah", "hopper")
# What Gymnasium's environments are made with, by the part of their entry point that tells.
SIMULATORS = {"mujoco": "mujoco", "box2d": "Box2D"}
DEFAULT_OUT = ROOT / "benchmarks" / "results" / "learning.json"


def missing(task: Task | OfflineTask) -> str | None:
    """Name the package that a task's simulator needs and that is not installed."""
    if isinstance(task, OfflineTask) or task.run.env.env not in gymnasium.registry:
        return None
    entry_point = str(gymnasium.spec(task.run.env.env).entry_point)
    needed = (module for part, module in SIMULATORS.items() if part in entry_point)
    return next((module for module in needed if importlib.util.find_spec(module) is None), None)


def machine() -> dict[str, Any]:
    """Say on what it was measured."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    simulators = {name: version(name) for name in ("mujoco", "box2d")}
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gymnasium": gymnasium.__version__,
            "rl8x": rl8x.__version__,
            **{name: number for name, number in simulators.items() if number != "absent"},
        },
    }


def merged(
    old: Mapping[str, Any], rows: list[dict[str, Any]], tasks: Mapping[str, Task | OfflineTask]
) -> dict[str, Any]:
    """Put new rows in the place of those of the same task and seed; rows under other settings go.

    Args:
        old: What the file holds: `tasks` and `rows`; empty where there is none.
        rows: What was measured now.
        tasks: All tasks of the benchmark, in their order; what others the file has goes.
    """
    measured = {row["task"] for row in rows}
    descriptions = dict(old.get("tasks", {}))
    for name in measured:
        described = json.loads(json.dumps(tasks[name].described))
        known = {key: value for key, value in descriptions.get(name, {}).items() if key != "machine"}
        kept = old.get("rows", []) if known == described else []
        new_seeds = {row["seed"] for row in rows if row["task"] == name}
        rows = rows + [row for row in kept if row["task"] == name and row["seed"] not in new_seeds]
        descriptions[name] = {**described, "machine": machine()}
    rows = rows + [row for row in old.get("rows", []) if row["task"] not in measured]
    order = {name: i for i, name in enumerate(tasks)}
    rows = sorted((row for row in rows if row["task"] in order), key=lambda row: (order[row["task"]], row["seed"]))
    return {"tasks": {name: descriptions[name] for name in tasks if name in descriptions}, "rows": rows}


def report(rows: list[dict[str, Any]], tasks: Mapping[str, Task]) -> str:
    """Lay the worst and the median of each task's seeds out as a Markdown table."""
    lines = [
        "| task | bound | worst seed | median seed | best on the way, mean | seeds | transitions | updates | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, task in tasks.items():
        mine = [row for row in rows if row["task"] == name]
        if not mine:
            continue
        means = [row["return_mean"] for row in mine]
        worst = max(means) if task.fails else min(means)
        middle = {key: statistics.median(row[key] for row in mine) for key in ("return_mean", "cpu_s")}
        digits = 2 if max(map(abs, means)) < 20 else 1
        bound = "" if task.bound is None else f"{'<' if task.fails else '≥'} {task.bound:g}"
        first = ""
        if task.first_within is not None:
            bound += f", first within {task.first_within:,}"
            at = [row["first_at"] for row in mine]
            first = ", first never" if None in at else f", first at {max(at):,}"
        lines.append(
            f"| {name} | {bound} | {worst:.{digits}f}{first} "
            f"| {middle['return_mean']:.{digits}f} | {_best(mine, task, digits)} "
            f"| {len(mine)}{'' if len(mine) == task.seeds else f' of {task.seeds}'} "
            f"| {mine[0]['env_steps']:,} | {mine[0]['updates']:,} | {middle['cpu_s']:.1f} |"
        )
    return "\n".join(lines)


def _best(rows: list[dict[str, Any]], task: Task, digits: int) -> str:
    """Write the mean of the seeds' best evaluations on the way, and what it must be; nothing where there are none."""
    if not all("best" in row for row in rows):
        return ""
    mean = statistics.mean(row["best"] for row in rows)
    asked = "" if task.best_bound is None else f" ({'≥' if mean >= task.best_bound else 'misses'} {task.best_bound:g})"
    return f"{mean:.{digits}f}{asked}"


def all_tasks() -> dict[str, Task | OfflineTask]:
    """Return the tasks with an environment, then those that learn from data."""
    return {**TASKS, **OFFLINE}


def compared() -> dict[str, Task]:
    """Return the tasks that docs/which-algorithm.md shows: the same ones by several algorithms."""
    names = [f"{task}{algorithm}" for task in ("cartpole", "pendulum", "half-cheetah") for algorithm in SUFFIXES]
    return {name: TASKS[name] for name in names if name in TASKS}


def shown() -> dict[str, Task]:
    """Return the tasks that the README tells."""
    return {name: TASKS[name] for name in SHOWN if name in TASKS}


def draw(document: Mapping[str, Any], names: Sequence[str], path: Path) -> None:
    """Draw the returns of the episodes that ended in training, a panel for each task and a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in names if name in document["tasks"]]
    columns = min(6, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(2.9 * columns, 2.6 * lines), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for name, axis in zip(names, axes.flat, strict=False):
        for row in (row for row in document["rows"] if row["task"] == name):
            steps, returns = zip(*row["curve"], strict=True)
            axis.plot([step / 1e3 for step in steps], returns, linewidth=1.2, alpha=0.8)
        if document["tasks"][name]["bound"] is not None:
            axis.axhline(document["tasks"][name]["bound"], color="gray", linestyle=":", linewidth=1)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("thousand transitions", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("return of training episodes", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def of_settings(document: Mapping[str, Any], tasks: Mapping[str, Task]) -> dict[str, Any]:
    """Return what `rl8x tuned` tells: of each setting that was measured as it is now, by the name of its run file."""
    results = {}
    for name, task in tasks.items():
        path = tuned_files().get(task.run.env.env, {}).get(task.run.algorithm.algorithm.lower())
        known = {key: value for key, value in document["tasks"].get(name, {}).items() if key != "machine"}
        mine = [row for row in document["rows"] if row["task"] == name]
        if path is None or RunSpec.from_file(path) != task.run or known != task.described or not mine:
            continue
        results[path.stem] = {
            "transitions": mine[0]["env_steps"],
            "returns": [row["return_mean"] for row in mine],
            "seconds": statistics.median(row["cpu_s"] for row in mine),
        }
    return results


def publish(document: Mapping[str, Any], root: Path = ROOT) -> None:
    """Put the results into the package, README.md and pages of docs/, and draw the curves that they show."""
    settings = of_settings(document, TASKS)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(result)}" for name, result in sorted(settings.items()))
    (root / MEASURED.relative_to(ROOT)).write_text(f"{{\n{lines}\n}}\n")
    rows, page = document["rows"], root / "docs" / "learning.md"
    put(root / "README.md", "learning", report(rows, shown()))
    put(page, "learning", report(rows, TASKS))
    put(page, "offline", report_offline(rows, OFFLINE))
    put(root / "docs" / "which-algorithm.md", "learning", report(rows, compared()))
    draw(document, SHOWN, root / "docs" / "images" / "learning.png")
    draw(document, [*TASKS], root / "docs" / "images" / "learning-all.png")
    for suffix in SUFFIXES[1:]:  # PPO's are learning.png
        names = [name for name, task in TASKS.items() if f"-{task.run.algorithm.algorithm.lower()}" == suffix]
        draw(document, names, root / "docs" / "images" / f"learning{suffix}.png")


def put(page: Path, mark: str, table: str) -> None:
    """Put a table between a page's marks of a name."""
    before, rest = page.read_text().split(f"<!-- {mark} -->\n")
    after = rest.split(f"<!-- /{mark} -->")[1]
    page.write_text(f"{before}<!-- {mark} -->\n{table}\n<!-- /{mark} -->{after}")


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the JSON file after every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tasks", nargs="*", choices=[*all_tasks()], help="none: only publish; default: those of the file"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0, 1, ... as many as the task has")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--checkpoints", type=Path, help="save runs there, and go on with those that were cut off")
    parser.add_argument("--add", type=Path, help="take the rows of another file too")
    parser.add_argument("--publish", action="store_true", help="put tables and curves into README.md and docs/")
    options = parser.parse_args(argv)
    passed = True
    print(
        f"{'task':<20} {'seed':>4} {'return':>8} {'min':>7} {'wall s':>7} {'CPU s':>6} "
        f"{'transitions':>11} {'updates':>8}"
    )
    for name in held(options.out).get("tasks", ()) if options.tasks is None else options.tasks:
        task = all_tasks()[name]
        if package := missing(task):
            print(f"{name:<20} left out: it needs {package}")
            continue
        for seed in options.seeds or range(task.seeds):
            if isinstance(task, OfflineTask):
                row = measure_offline(name, task, seed, held(options.out).get("rows", []))
            else:
                row = measure(name, task, seed, options.checkpoints)
            print(
                f"{name:<20} {seed:>4} {row['return_mean']:>8.1f} {row['return_min']:>7.1f} {row['wall_s']:>7.1f} "
                f"{row['cpu_s']:>6.1f} {row['env_steps']:>11,} {row['updates']:>8,}"
                + ("" if row["passed"] else "  MISSED"),
                flush=True,
            )
            passed = passed and row["passed"]
            keep(options.out, [row])
            if options.checkpoints is not None:
                forget(options.checkpoints, name, seed)
    if options.add is not None:
        add(options.add, options.out)
    document = json.loads(options.out.read_text())
    print("\n" + report(document["rows"], TASKS) + "\n\n" + report_offline(document["rows"], OFFLINE))
    if options.publish:
        publish(document)
    return 0 if passed else 1


def held(path: Path) -> dict[str, Any]:
    """Return what a file holds; nothing where it is not there."""
    return json.loads(path.read_text()) if path.exists() else {}


def keep(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows into the file, beside those that stay; of several processes one after another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent):
        beside = path.with_suffix(".tmp")
        beside.write_text(as_text(merged(held(path), rows, all_tasks())))
        beside.replace(path)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process writes into the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def add(path: Path, out: Path) -> None:
    """Take rows from another file, which a longer run wrote, where they were measured under the settings of now."""
    document = held(path)
    for name, described in document["tasks"].items():
        task = all_tasks().get(name)
        rows = [row for row in document["rows"] if row["task"] == name]
        known = {key: value for key, value in described.items() if key != "machine"}
        if task is None or known != json.loads(json.dumps(task.described)):
            print(f"{name:<20} left out: {path.name} has it under other settings")
        else:
            keep(out, rows)


def as_text(document: Mapping[str, Any]) -> str:
    """Write a document as JSON, a line for each task and each row."""
    tasks = ",\n".join(f"{json.dumps(name)}: {json.dumps(task)}" for name, task in document["tasks"].items())
    rows = ",\n".join(json.dumps(row) for row in document["rows"])
    return f'{{"tasks": {{\n{tasks}\n}},\n"rows": [\n{rows}\n]}}\n'


if __name__ == "__main__":
    sys.exit(main())

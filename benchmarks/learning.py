"""Measure how well algorithms learn: of each seed of a task, the final policy in new episodes.

    python -m benchmarks.learning [--tasks cartpole pendulum ...] [--seeds 0 1 ...] [--out learning.json]
    python -m benchmarks.learning --table defaults --tasks ppo-cartpole    # other tables: precision, defaults, ...

Each task has one setting for all seeds, that of `rl8x tuned` where users have it by name, and a fixed number of
transitions. What counts is the policy at the end, deterministic; some tasks say besides by when a policy must first be
good enough, or what the best evaluation on the way must be, which is what others publish. Rows of other tasks and seeds
that the file has already stay there. The exit code is 1 if a seed misses the task's bound. Tasks on Gymnasium's
simulators need `pip install "gymnasium[mujoco,box2d]"` and are left out, with a word, where it is missing.

Tables: `learning` (`learning_tasks.py`, and `offline.py` for what learns from data alone), `precision` (PPO in fp32 and
bf16), `defaults` (by the defaults, with seeds that no default was chosen with), `randomization` and `distillation`.

`python -m benchmarks.pages` writes tables and curves into the pages, and what `rl8x tuned` tells.
Runs of hours go on after they were cut off, by `--checkpoints FOLDER`; several processes may write into one `--out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.learning_runs import forget
from benchmarks.learning_tasks import DEFAULTS, DISTILLED, PRECISIONS, TASKS, ByDefaults
from benchmarks.offline import OFFLINE
from benchmarks.randomization import RANDOMIZED
from benchmarks.results import RESULTS, Row, about, held, save

PACKAGES = ("rl8x", "torch", "gymnasium", "mujoco", "box2d")
TOLD = ("return_mean", "return_min", "cvar", "wall_s", "cpu_s", "env_steps", "updates")


class Table(NamedTuple):
    """Tasks that are measured and shown together."""

    # Each has `seeds`, `described`, `missing`, `measure` and `passes`, as `learning_runs.Task` has them.
    tasks: Mapping[str, Any]
    file: Callable[[str], str]  # the file of a task's results
    first_seed: int = 0  # of those that are run
    curves: bool = False  # whether a page shows the returns in training

    def files(self) -> list[Path]:
        """Return the files of all tasks."""
        return sorted({RESULTS / self.file(name) for name in self.tasks})


TABLES = {
    "learning": Table({**TASKS, **OFFLINE}, lambda name: "learning.json", curves=True),
    "precision": Table(PRECISIONS, lambda name: "precision.json"),
    "defaults": Table(DEFAULTS, lambda name: f"defaults-{name.partition('-')[0]}.json", first_seed=100),
    "randomization": Table(RANDOMIZED, lambda name: "randomization.json"),
    "distillation": Table(DISTILLED, lambda name: "distillation.json"),
}


def is_of_now(described: Mapping[str, Any], task: Any) -> bool:
    """Whether what a file says of a task is what the task is now."""
    if task is None:
        return False
    known = {key: value for key, value in described.items() if key != "machine"}
    now = json.loads(json.dumps(task.described))
    if isinstance(task, ByDefaults) and known:  # a hyperparameter that came or went says nothing of the others
        both = known["config"].keys() & now["config"].keys()
        known, now = ({**each, "config": {name: each["config"][name] for name in both}} for each in (known, now))
    return known == now


def merged(old: Row, row: Row, tasks: Mapping[str, Any]) -> Row:
    """Put a row in the place of a file's of the same task and seed; those of other settings or no task go."""
    name, described = row["task"], dict(old.get("tasks", {}))
    is_known = is_of_now(described.get(name, {}), tasks[name])
    described[name] = {**tasks[name].described, "machine": about(*PACKAGES)}
    rows = [each for each in old.get("rows", []) if each["task"] in tasks and (is_known or each["task"] != name)]
    rows = [row, *(each for each in rows if (each["task"], each["seed"]) != (name, row["seed"]))]
    rows.sort(key=lambda each: ([*tasks].index(each["task"]), each["seed"]))
    return {"tasks": {name: described[name] for name in tasks if name in described}, "rows": rows}


def keep(path: Path, row: Row, tasks: Mapping[str, Any]) -> None:
    """Write a row into the file, beside those that stay, a line each; of several processes one after another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        document = merged(held(path), row, tasks)
        described = ",\n".join(f"{json.dumps(name)}: {json.dumps(task)}" for name, task in document["tasks"].items())
        rows = ",\n".join(map(json.dumps, document["rows"]))
        save(path, f'{{"tasks": {{\n{described}\n}},\n"rows": [\n{rows}\n]}}\n')
    finally:
        os.close(folder)


def measure(
    table: Table, name: str, seed: int, out: Path, checkpoints: Path | None = None, *, enough: float | None = None
) -> bool:
    """Measure a seed of a task, print and keep its row; returns whether it reached what is asked."""
    task, rows = table.tasks[name], held(out).get("rows", [])
    if enough is not None and task.best_bound is not None:
        task = dataclasses.replace(task, ends_at=enough or task.best_bound)
    row = {"task": name, "seed": seed, **task.measure(name, seed, rows, checkpoints)}
    row["passed"] = task.passes(row, rows)
    if not table.curves:
        row.pop("curve", None)
    told = "  ".join(f"{key} {row[key]:,}" for key in TOLD if key in row)
    print(f"{name:<32} {seed:>4}  {told}{'' if row['passed'] else '  MISSED'}", flush=True)
    keep(out, row, table.tasks)
    if checkpoints is not None:
        forget(checkpoints, name, seed)
    return row["passed"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=tuple(TABLES), default="learning")
    parser.add_argument("--tasks", nargs="*", help="default: those that the files have")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: as many as the task has")
    parser.add_argument("--out", type=Path, help="default: the table's files in benchmarks/results")
    parser.add_argument("--checkpoints", type=Path, help="save runs there, and go on with those that were cut off")
    enough = "end a run at an evaluation of so much; without a number, of what the best must be"
    parser.add_argument("--enough", nargs="?", type=float, const=0.0, help=enough)
    options = parser.parse_args(argv)
    table = TABLES[options.table]
    if options.tasks is None:
        files = [options.out] if options.out else table.files()
        options.tasks = [name for path in files for name in held(path).get("tasks", ())]
    if wrong := next((name for name in options.tasks if name not in table.tasks), None):
        parser.error(f"--tasks: there is no {wrong!r} in {options.table}; there are {', '.join(table.tasks)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the JSON file after every row."""
    options = parse(argv)
    table, passed = TABLES[options.table], True
    for name in options.tasks:
        if package := table.tasks[name].missing:
            print(f"{name:<20} left out: it needs {package}")
            continue
        out, first = options.out or RESULTS / table.file(name), table.first_seed
        for seed in options.seeds or range(first, first + table.tasks[name].seeds):
            passed = measure(table, name, seed, out, options.checkpoints, enough=options.enough) and passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

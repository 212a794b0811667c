"""Measure how well algorithms learn: of each seed of a task, the final policy in new episodes.

    python benchmarks/learning.py [--tasks cartpole pendulum ...] [--seeds 0 1 ...] [--out learning.json] [--publish]
    python benchmarks/learning.py --table defaults --tasks ppo-cartpole    # other tables: precision, defaults, ...

Each task has one setting for all seeds, that of `rl8x tuned` where users have it by name, and a fixed number of
transitions. What counts is the policy at the end, deterministic; some tasks say besides by when a policy must first be
good enough, or what the best evaluation on the way must be, which is what others publish. Rows of other tasks and seeds
that the file has already stay there. The exit code is 1 if a seed misses the task's bound. Tasks on Gymnasium's
simulators need `pip install "gymnasium[mujoco,box2d]"` and are left out, with a word, where it is missing.

Tables: `learning` (`learning_tasks.py`, and `offline.py` for what learns from data alone), `precision` (PPO in fp32 and
bf16), `defaults` (by the defaults, with seeds that no default was chosen with), `randomization` and `distillation`.

`--publish` writes tables and curves into the pages, and what `rl8x tuned` tells (`python -m benchmarks.pages`).
Runs of hours go on after they were cut off, by `--checkpoints FOLDER`; several processes may write into one `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rl8x
from benchmarks import results
from benchmarks.learning_runs import forget
from benchmarks.learning_tasks import DEFAULTS, DISTILLED, PRECISIONS, TASKS, ByDefaults
from benchmarks.offline import OFFLINE
from benchmarks.randomization import RANDOMIZED
from benchmarks.results import RESULTS, held

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


def machine() -> dict[str, Any]:
    """Say on what it was measured."""
    about = results.machine()
    simulators = {name: results.version(name) for name in ("mujoco", "box2d")}
    return {
        **{name: about[name] for name in ("cpu", "cores", "system")},
        "versions": {
            "python": about["python"],
            "torch": torch.__version__,
            "gymnasium": gymnasium.__version__,
            "rl8x": rl8x.__version__,
            **{name: number for name, number in simulators.items() if number != "absent"},
        },
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


def merged(old: Mapping[str, Any], rows: list[dict[str, Any]], tasks: Mapping[str, Any]) -> dict[str, Any]:
    """Put new rows in the place of a file's of the same task and seed; those of other settings or no task go."""
    measured = {row["task"] for row in rows}
    descriptions = dict(old.get("tasks", {}))
    for name in measured:
        kept = old.get("rows", []) if is_of_now(descriptions.get(name, {}), tasks[name]) else []
        new_seeds = {row["seed"] for row in rows if row["task"] == name}
        rows = rows + [row for row in kept if row["task"] == name and row["seed"] not in new_seeds]
        descriptions[name] = {**tasks[name].described, "machine": machine()}
    rows = rows + [row for row in old.get("rows", []) if row["task"] not in measured]
    order = {name: i for i, name in enumerate(tasks)}
    rows = sorted((row for row in rows if row["task"] in order), key=lambda row: (order[row["task"]], row["seed"]))
    return {"tasks": {name: descriptions[name] for name in tasks if name in descriptions}, "rows": rows}


def keep(path: Path, rows: list[dict[str, Any]], tasks: Mapping[str, Any]) -> None:
    """Write rows into the file, beside those that stay; of several processes one after another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent):
        results.save(path, as_text(merged(held(path), rows, tasks)))


def as_text(document: Mapping[str, Any]) -> str:
    """Write a document as JSON, a line for each task and each row."""
    tasks = ",\n".join(f"{json.dumps(name)}: {json.dumps(task)}" for name, task in document["tasks"].items())
    rows = ",\n".join(json.dumps(row) for row in document["rows"])
    return f'{{"tasks": {{\n{tasks}\n}},\n"rows": [\n{rows}\n]}}\n'


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process writes into the folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def add(path: Path, out: Path, tasks: Mapping[str, Any]) -> None:
    """Take rows from another file, which a longer run wrote, where they were measured under the settings of now."""
    document = held(path)
    for name, described in document["tasks"].items():
        if is_of_now(described, tasks.get(name)):
            keep(out, [row for row in document["rows"] if row["task"] == name], tasks)
        else:
            print(f"{name:<20} left out: {path.name} has it under other settings")


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
    keep(out, [row], table.tasks)
    if checkpoints is not None:
        forget(checkpoints, name, seed)
    return row["passed"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=tuple(TABLES), default="learning")
    parser.add_argument("--tasks", nargs="*", help="none: only publish; default: those that the files have")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: as many as the task has")
    parser.add_argument("--out", type=Path, help="default: the table's files in benchmarks/results")
    parser.add_argument("--checkpoints", type=Path, help="save runs there, and go on with those that were cut off")
    enough = "end a run at an evaluation of so much; without a number, of what the best must be"
    parser.add_argument("--enough", nargs="?", type=float, const=0.0, help=enough)
    parser.add_argument("--add", type=Path, help="take the rows of another file too")
    parser.add_argument("--publish", action="store_true", help="put tables and curves into the pages")
    options = parser.parse_args(argv)
    table = TABLES[options.table]
    if options.tasks is None:
        files = [options.out] if options.out else table.files()
        options.tasks = [name for path in files for name in held(path).get("tasks", ())]
    if wrong := next((name for name in options.tasks if name not in table.tasks), None):
        parser.error(f"--tasks: there is no {wrong!r} in {options.table}; there are {', '.join(table.tasks)}")
    if options.add and not options.add.exists():
        parser.error(f"--add: there is no file {options.add}")
    if options.add and not options.out and len(table.files()) > 1:
        parser.error(f"--add: {options.table} has several files: name one with --out")
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
    if options.add is not None:
        add(options.add, options.out or table.files()[0], table.tasks)
    if options.publish:
        from benchmarks import pages

        pages.write()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

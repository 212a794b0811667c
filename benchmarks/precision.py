"""Compare what PPO learns in bf16 and in fp32, with the same seeds, on tasks of the learning benchmark.

    python benchmarks/precision.py [--tasks cartpole ...] [--seeds 5] [--execution eager] [--out ...] [--publish]

By default all tasks that train in minutes. Rows of other tasks that the file has already stay there. The exit code is 1
if a seed of either precision misses its task's bound.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.learning import ROOT, as_text, measure, merged, missing
from benchmarks.learning_tasks import TASKS, Task

PRECISIONS = ("fp32", "bf16")
QUICK = [name for name, task in TASKS.items() if task.bound is not None and task.transitions <= 300_000]
DEFAULT_OUT = ROOT / "benchmarks" / "results" / "precision.json"


def variants(execution: str = "eager") -> dict[str, Task]:
    """Return each task in each precision, by names such as `cartpole bf16`."""
    return {
        f"{name} {precision}": task.changed(precision=precision, execution=execution)
        for name, task in TASKS.items()
        for precision in PRECISIONS
    }


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Lay the returns of both precisions out as a Markdown table, of the tasks that have at least two seeds of each."""
    lines = [
        "| task | bound | fp32 worst | fp32 median | bf16 worst | bf16 median | bf16 - fp32, means | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, task in TASKS.items():
        returns = {
            precision: [row["return_mean"] for row in rows if row["task"] == f"{name} {precision}"]
            for precision in PRECISIONS
        }
        if min(map(len, returns.values())) < 2:
            continue
        digits = 2 if max(map(abs, returns["fp32"])) < 20 else 1
        cells = []
        for found in returns.values():
            worst = max(found) if task.fails else min(found)
            cells += [f"{worst:.{digits}f}", f"{statistics.median(found):.{digits}f}"]
        difference = statistics.mean(returns["bf16"]) - statistics.mean(returns["fp32"])
        error = math.sqrt(sum(statistics.variance(found) / len(found) for found in returns.values()))
        seeds = " and ".join(map(str, sorted(set(map(len, returns.values())))))
        lines.append(
            f"| {name} | {'<' if task.fails else '≥'} {task.bound:g} | {' | '.join(cells)} "
            f"| {difference:+.{digits}f} ± {error:.{digits}f} | {seeds} |"
        )
    return "\n".join(lines)


def publish(document: Mapping[str, Any], page: Path = ROOT / "docs" / "learning.md") -> None:
    """Put the table between the marks of docs/learning.md."""
    before, rest = page.read_text().split("<!-- precision -->\n")
    after = rest.split("<!-- /precision -->")[1]
    page.write_text(f"{before}<!-- precision -->\n{report(document['rows'])}\n<!-- /precision -->{after}")


def main(argv: list[str] | None = None) -> int:
    """Measure, print, and write the JSON file after every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="*", choices=[*TASKS], default=QUICK, help="none: only publish")
    parser.add_argument("--seeds", type=int, help="how many; default: as many as the task has")
    parser.add_argument("--execution", choices=("eager", "compile"), default="eager")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--publish", action="store_true", help="put the table into docs/learning.md")
    options = parser.parse_args(argv)
    tasks, passed = variants(options.execution), True
    for task in options.tasks:
        if package := missing(TASKS[task]):
            print(f"{task:<20} left out: it needs {package}")
            continue
        for seed in range(options.seeds or TASKS[task].seeds):
            for name in (f"{task} {precision}" for precision in PRECISIONS):
                row = measure(name, tasks[name], seed)
                del row["curve"]
                missed = "" if row["passed"] else "  MISSED"
                print(f"{name:<25} {seed:>3} {row['return_mean']:>8.2f} {row['cpu_s']:>7.1f} CPU s{missed}", flush=True)
                passed = passed and row["passed"]
                old = json.loads(options.out.read_text()) if options.out.exists() else {}
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(as_text(merged(old, [row], tasks)))
    document = json.loads(options.out.read_text())
    print("\n" + report(document["rows"]))
    if options.publish:
        publish(document)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

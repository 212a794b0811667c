"""Tables and curves of what `learning.py` measured."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import TABLES, is_of_now
from benchmarks.learning_tasks import BY_DEFAULTS, FACTORS, NEAR, NUMBERS, TASKS, Task
from benchmarks.offline import OFFLINE
from benchmarks.randomization import METHODS
from benchmarks.results import Row, held, table
from rl8x.config import RunSpec
from rl8x.config.tuned import tuned_files

SUFFIXES = ("", "-dqn", "-pqn", "-sac", "-td3")  # of a task's name: the algorithm, nothing for PPO
# The tasks of README.md, and those of docs/which-algorithm.md: the same ones by several algorithms.
SHOWN = ("cartpole", "pendulum", "masked-cartpole-gru", "masked-cartpole-mlp", "half-cheetah", "hopper")
COMPARED = [f"{task}{algorithm}" for task in ("cartpole", "pendulum", "half-cheetah") for algorithm in SUFFIXES]


@functools.cache
def rows_of(name: str) -> dict[str, list[Row]]:
    """Return a table's rows by task, in the order of the seeds, of the tasks that were measured as they are now."""
    found: dict[str, list[Row]] = {}
    for path in TABLES[name].files():
        document = held(path)
        for task, described in document.get("tasks", {}).items():
            if is_of_now(described, TABLES[name].tasks.get(task)):
                found[task] = [row for row in document["rows"] if row["task"] == task]
    return found


def faults(name: str) -> list[str]:
    """Return what is wrong with a table's results: other settings than those of now, missing or failed seeds."""
    table, rows, wrong = TABLES[name], rows_of(name), []
    wrong += [
        f"{path.name}: {task} was measured under other settings"
        for path in table.files()
        for task in held(path).get("tasks", {})
        if task not in rows
    ]
    every_row = [row for mine in rows.values() for row in mine]
    for name_of_task, mine in rows.items():
        task, seeds = table.tasks[name_of_task], [row["seed"] for row in mine]
        wanted = [*range(table.first_seed, table.first_seed + task.seeds)]
        # Seeds of hours come one by one, and the table says how many there are; both precisions may have more.
        if seeds != wanted[: len(seeds) if getattr(task, "best_bound", None) else None] and name != "precision":
            wrong.append(f"{name_of_task} has the seeds {seeds}, not {wanted}")
        for row in mine:
            if row["passed"] is not task.passes(row, every_row) or not (row["passed"] or name != "learning"):
                wrong.append(f"{name_of_task}, seed {row['seed']}, does not reach what is asked")
    return wrong


def report(names: Sequence[str]) -> str:
    """Lay out the worst and the median of each task's seeds."""
    rows, lines = rows_of("learning"), []
    for name, task in TASKS.items():
        if name not in names or not (mine := rows.get(name)):
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
        seeds = f"{len(mine)}{'' if len(mine) == task.seeds else f' of {task.seeds}'}"
        spent = [*(_span([row[key] for row in mine]) for key in ("env_steps", "updates")), f"{middle['cpu_s']:.1f}"]
        returns = [f"{worst:.{digits}f}{first}", f"{middle['return_mean']:.{digits}f}", _best(mine, task, digits)]
        lines.append([name, bound, *returns, seeds, *spent])
    header = "task | bound | worst seed | median seed | best on the way, mean | seeds | transitions | updates | CPU s"
    return table(header.split(" | "), lines)


def _span(counts: Sequence[int]) -> str:
    """Write what all seeds have, or from what to what."""
    return " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))


def _best(rows: Sequence[Row], task: Task, digits: int) -> str:
    """Write the mean of the seeds' best evaluations on the way, and what it must be; nothing where there are none."""
    if not all("best" in row for row in rows):
        return ""
    mean = statistics.mean(row["best"] for row in rows)
    asked = "" if task.best_bound is None else f" ({'≥' if mean >= task.best_bound else 'misses'} {task.best_bound:g})"
    return f"{mean:.{digits}f}{asked}"


def report_offline() -> str:
    """Lay out the returns of each task's seeds, and the score of the worst."""
    rows, lines = rows_of("learning"), []
    for name, task in OFFLINE.items():
        if mine := rows.get(name):
            score, cpu = min(row["score"] for row in mine), sorted(row["cpu_s"] for row in mine)[len(mine) // 2]
            about = [f"{score:.0f}", f"{mine[0]['updates']:,}", f"{cpu:.1f}"]
            lines.append([name, task.asked, f"{mine[0]['data_mean']:.1f}", _returns(mine), *about])
    header = "task | asked of every seed | mean of the data | returns by seed | worst score | updates | CPU s"
    return table(header.split(" | "), lines)


def _returns(rows: Sequence[Row]) -> str:
    return ", ".join(f"{row['return_mean']:.1f}" for row in rows)


def report_precision() -> str:
    """Lay out the returns of both precisions, of the tasks that have at least two seeds of each."""
    rows, lines = rows_of("precision"), []
    for name, task in TASKS.items():
        returns = {
            precision: [row["return_mean"] for row in rows.get(f"{name} {precision}", [])]
            for precision in ("fp32", "bf16")
        }
        if min(map(len, returns.values())) < 2:
            continue
        digits, cells = 2 if max(map(abs, returns["fp32"])) < 20 else 1, []
        for found in returns.values():
            worst = max(found) if task.fails else min(found)
            cells += [f"{worst:.{digits}f}", f"{statistics.median(found):.{digits}f}"]
        difference = statistics.mean(returns["bf16"]) - statistics.mean(returns["fp32"])
        error = math.sqrt(sum(statistics.variance(found) / len(found) for found in returns.values()))
        seeds = " and ".join(map(str, sorted(set(map(len, returns.values())))))
        cells += [f"{difference:+.{digits}f} ± {error:.{digits}f}", seeds]
        lines.append([name, f"{'<' if task.fails else '≥'} {task.bound:g}", *cells])
    header = "task | bound | fp32 worst | fp32 median | bf16 worst | bf16 median | bf16 - fp32, means | seeds"
    return table(header.split(" | "), lines)


def report_defaults() -> str:
    """Lay out the returns of each task's seeds."""
    rows, lines = rows_of("defaults"), []
    for name, task in BY_DEFAULTS.items():
        if mine := rows.get(name):
            reached = f"{sum(row['passed'] for row in mine)} of {len(mine)}"
            seconds = statistics.median(row["cpu_s"] for row in mine)
            about = [task.run.env.env, task.run.algorithm.algorithm, f"{mine[0]['env_steps']:,}", f"≥ {task.bound:g}"]
            lines.append([*about, _returns(mine), reached, f"{seconds:.1f}"])
    header = "environment | algorithm | transitions | asked of 4 seeds | returns by seed | reached by | CPU s"
    return table(header.split(" | "), lines)


def report_near() -> str:
    """Lay out the returns with one number halved or doubled."""
    rows, lines = rows_of("defaults"), []
    for name, tasks in NEAR.items():
        mine = [rows.get(each, [None])[0] for each in tasks]
        cells = ["not measured" if row is None else f"{row['return_mean']:.1f}" for row in mine]
        reached = f"{sum(row is not None and row['passed'] for row in mine)} of {len(mine)}"
        run = BY_DEFAULTS[name].run
        lines.append([f"{run.algorithm.algorithm}, {run.env.env}", *cells, reached])
    return table(["", *(f"{number}, {word}" for number in NUMBERS for word in FACTORS), "reached by"], lines)


def report_randomization() -> str:
    """Lay out the methods: intervals are Student's t at 95% over seeds, those of differences to Uniform Welch's."""
    rows, lines = rows_of("randomization"), []
    for task in ("cartpole", "pendulum"):
        for method in METHODS:
            if not (mine := rows.get(f"{task} {method}")):
                continue
            cells = [task, method]
            for key in ("cvar", "outside"):
                values = [row[key] for row in mine]
                uniform = [row[key] for row in rows.get(f"{task} uniform", [])]
                compared = bool(uniform) and method != "uniform"
                cells += [_interval(values), _interval(values, uniform) if compared else ""]
            lines.append([*cells, str(len(mine)), f"{statistics.median(row['cpu_s'] for row in mine):.0f}"])
    header = "task | trained under | CVaR 10% | ahead of Uniform | outside | ahead of Uniform | seeds | CPU s"
    return table(header.split(" | "), lines)


def _interval(ours: Sequence[float], theirs: Sequence[float] | None = None) -> str:
    """Write a mean over seeds, or by how much it is ahead of another, and the half width of its interval."""
    from scipy import stats

    mean = statistics.fmean(ours) - (statistics.fmean(theirs) if theirs else 0.0)
    if min(len(ours), len(theirs or ours)) < 2:
        return f"{mean:.1f}"
    test = stats.ttest_ind(ours, theirs, equal_var=False) if theirs else stats.ttest_1samp(ours, 0.0)
    low, high = test.confidence_interval(0.95)
    half = 0.0 if math.isnan(low) else (high - low) / 2
    return f"{mean:.1f} ± {half:.1f}"


def draw(names: Sequence[str], path: Path) -> None:
    """Draw the returns of the episodes that ended in training, a panel for each task and a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = rows_of("learning")
    names = [name for name in names if name in rows]
    columns = min(6, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(2.9 * columns, 2.6 * lines), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for name, axis in zip(names, axes.flat, strict=False):
        for row in rows[name]:
            steps, returns = zip(*row["curve"], strict=True)
            axis.plot([step / 1e3 for step in steps], returns, linewidth=1.2, alpha=0.8)
        if TASKS[name].bound is not None:
            axis.axhline(TASKS[name].bound, color="gray", linestyle=":", linewidth=1)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("thousand transitions", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("return of training episodes", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def curves() -> dict[str, Sequence[str]]:
    """Return the tasks of each picture in docs/images, by its name; PPO's are learning.png."""
    of_algorithms = {
        f"learning{suffix}.png": [
            name for name, task in TASKS.items() if f"-{task.run.algorithm.algorithm.lower()}" == suffix
        ]
        for suffix in SUFFIXES[1:]
    }
    return {"learning.png": SHOWN, "learning-all.png": [*TASKS], **of_algorithms}


def of_settings() -> str:
    """Return what `rl8x tuned` tells, as JSON: of each setting that users have by name and that was measured."""
    settings: dict[str, Any] = {}
    for name, mine in rows_of("learning").items():
        run = getattr(TASKS.get(name), "run", None)
        path = tuned_files().get(run.env.env, {}).get(run.algorithm.algorithm.lower()) if run else None
        if path is not None and RunSpec.from_file(path) == run:
            settings[path.stem] = {
                "transitions": max(row["env_steps"] for row in mine),
                "returns": [row["return_mean"] for row in mine],
                "seconds": statistics.median(row["cpu_s"] for row in mine),
            }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(result)}" for name, result in sorted(settings.items()))
    return f"{{\n{lines}\n}}\n"

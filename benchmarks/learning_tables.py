"""Tables and curves of what `learning.py` measured."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning import TABLES, is_of_now
from benchmarks.learning_tasks import BY_DEFAULTS, FACTORS, NEAR, NUMBERS, TASKS, Task
from benchmarks.offline import OFFLINE
from benchmarks.results import Row, held, table
from rl8x.config import RunSpec
from rl8x.config.tuned import tuned_files
from rl8x.drawing import LIGHT, Curve, draw_panels

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


def measured(name: str, tasks: Mapping[str, Any]) -> Iterator[tuple[str, Any, list[Row]]]:
    """Yield those of some tasks that a table has rows of, with these."""
    rows = rows_of(name)
    return ((each, task, rows[each]) for each, task in tasks.items() if each in rows)


def numbers(rows: Sequence[Row], key: str = "return_mean") -> list[float]:
    """Return a number of each seed."""
    return [row[key] for row in rows]


def digits_for(values: Sequence[float]) -> int:
    """Return the decimals of returns."""
    return 2 if max(map(abs, values)) < 20 else 1


def median(rows: Sequence[Row], key: str, digits: int = 1) -> str:
    """Write the median over seeds."""
    return f"{statistics.median(numbers(rows, key)):.{digits}f}"


def report(names: Sequence[str]) -> str:
    """Lay out the worst and the median of each task's seeds."""
    lines = []
    for name, task, mine in measured("learning", {name: task for name, task in TASKS.items() if name in names}):
        means, bound, first = numbers(mine), task.asked, ""
        digits = digits_for(means)
        if task.first_within is not None:
            bound += f", first within {task.first_within:,}"
            at = [row["first_at"] for row in mine]
            first = ", first never" if None in at else f", first at {max(at):,}"
        returns = [f"{task.worst(means):.{digits}f}{first}", median(mine, "return_mean", digits)]
        seeds = f"{len(mine)}{'' if len(mine) == task.seeds else f' of {task.seeds}'}"
        spent = [_span(mine, "env_steps"), _span(mine, "updates"), median(mine, "cpu_s")]
        lines.append([name, bound, *returns, _best(mine, task, digits), seeds, *spent])
    header = "task | bound | worst seed | median seed | best on the way, mean | seeds | transitions | updates | CPU s"
    return table(header, lines)


def _span(rows: Sequence[Row], key: str) -> str:
    """Write what all seeds have, or from what to what."""
    counts = numbers(rows, key)
    return " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))


def _best(rows: Sequence[Row], task: Task, digits: int) -> str:
    """Write the mean of the seeds' best evaluations on the way, and what it must be; nothing where there are none."""
    if not all("best" in row for row in rows):
        return ""
    mean = statistics.mean(numbers(rows, "best"))
    asked = "" if task.best_bound is None else f" ({'≥' if mean >= task.best_bound else 'misses'} {task.best_bound:g})"
    return f"{mean:.{digits}f}{asked}"


def report_offline() -> str:
    """Lay out the returns of each task's seeds, and the score of the worst."""
    lines = []
    for name, task, mine in measured("learning", OFFLINE):
        about = [f"{min(numbers(mine, 'score')):.0f}", f"{mine[0]['updates']:,}", median(mine, "cpu_s")]
        lines.append([name, task.asked, f"{mine[0]['data_mean']:.1f}", _returns(mine), *about])
    header = "task | asked of every seed | mean of the data | returns by seed | worst score | updates | CPU s"
    return table(header, lines)


def _returns(rows: Sequence[Row]) -> str:
    return ", ".join(f"{value:.1f}" for value in numbers(rows))


def report_precision() -> str:
    """Lay out the returns of both precisions, of the tasks that have at least two seeds of each."""
    rows, lines = rows_of("precision"), []
    for name, task in TASKS.items():
        returns = [numbers(rows.get(f"{name} {precision}", [])) for precision in ("fp32", "bf16")]
        if min(map(len, returns)) < 2:
            continue
        digits = digits_for(returns[0])
        cells = [f"{of(found):.{digits}f}" for found in returns for of in (task.worst, statistics.median)]
        difference = statistics.mean(returns[1]) - statistics.mean(returns[0])
        error = math.sqrt(sum(statistics.variance(found) / len(found) for found in returns))
        seeds = " and ".join(map(str, sorted(set(map(len, returns)))))
        lines.append([name, task.asked, *cells, f"{difference:+.{digits}f} ± {error:.{digits}f}", seeds])
    header = "task | bound | fp32 worst | fp32 median | bf16 worst | bf16 median | bf16 - fp32, means | seeds"
    return table(header, lines)


def report_defaults() -> str:
    """Lay out the returns of each task's seeds."""
    lines = []
    for _, task, mine in measured("defaults", BY_DEFAULTS):
        about = [task.run.env.env, task.run.algorithm.algorithm, f"{mine[0]['env_steps']:,}", task.asked]
        reached = f"{sum(row['passed'] for row in mine)} of {len(mine)}"
        lines.append([*about, _returns(mine), reached, median(mine, "cpu_s")])
    header = "environment | algorithm | transitions | asked of 4 seeds | returns by seed | reached by | CPU s"
    return table(header, lines)


def report_near() -> str:
    """Lay out the returns with one number halved or doubled."""
    rows, lines = rows_of("defaults"), []
    for name, tasks in NEAR.items():
        mine = [rows.get(each, [None])[0] for each in tasks]
        cells = ["not measured" if row is None else f"{row['return_mean']:.1f}" for row in mine]
        passed = [row["passed"] for row in mine if row is not None]
        reached = f"{sum(passed)} of {len(passed)}"
        run = BY_DEFAULTS[name].run
        lines.append([f"{run.algorithm.algorithm}, {run.env.env}", *cells, reached])
    return table(["", *(f"{number}, {word}" for number in NUMBERS for word in FACTORS), "reached by"], lines)


def report_randomization() -> str:
    """Lay out the methods: intervals are Student's t at 95% over seeds, those of differences to Uniform Welch's."""
    rows, lines = rows_of("randomization"), []
    for name, _, mine in measured("randomization", TABLES["randomization"].tasks):
        task, method = name.split()
        uniform, cells = rows.get(f"{task} uniform", []) if method != "uniform" else [], [task, method]
        for key in ("cvar", "outside"):
            ours, theirs = numbers(mine, key), numbers(uniform, key)
            cells += [_interval(ours), _interval(ours, theirs) if theirs else ""]
        lines.append([*cells, str(len(mine)), median(mine, "cpu_s", 0)])
    header = "task | trained under | CVaR 10% | ahead of Uniform | outside | ahead of Uniform | seeds | CPU s"
    return table(header, lines)


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
    rows = {name: mine for name, mine in rows_of("learning").items() if name in names}
    shown = [name for name in names if name in rows]
    panels = [
        {str(row["seed"]): Curve(*np.array(row["curve"]).T, *[np.array(np.nan)] * 2) for row in rows[name]}
        for name in shown
    ]
    figure = draw_panels(panels, [""] * len(shown), "transitions", LIGHT, width=6)
    for name, panel in zip(shown, figure.axes, strict=False):
        panel.set_title(name)
        if (bound := TASKS[name].bound) is not None:
            panel.axhline(bound, color=LIGHT.text, linestyle=":", linewidth=1)
    figure.axes[0].set_ylabel("return of training episodes")
    figure.savefig(path, dpi=70)


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

"""Tuned settings by task and algorithm: run files of this package, and the results measured with them."""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rl8x.config.files import plain_name
from rl8x.config.spec import AlgorithmSpec, RunSpec
from rl8x.names import did_you_mean
from rl8x.output import in_line

SETTINGS: Final = Path(__file__).parent / "settings"


def tuned(task: str, algorithm: str = "PPO") -> RunSpec:
    """Return a tuned setting that learns a task, as the run in its run file.

    Args:
        task: The environment: a built-in name or a Gymnasium id; `rl8x tuned` lists them.
        algorithm: The algorithm's name, such as `"sac"`.

    Raises:
        ValueError: If there is no such setting; the message lists the existing ones.
    """
    return RunSpec.from_file(tuned_file(task, algorithm))


def tuned_file(task: str, algorithm: str = AlgorithmSpec.algorithm) -> Path:
    """Return the run file of a setting."""
    files = tuned_files()
    if not isinstance(task, str) or task not in files:
        raise ValueError(f"no tuned setting of {in_line(str(task))}.{did_you_mean(str(task), [*files])} {listed()}")
    path = files[task].get(plain_name(str(algorithm)))
    if path is None:
        known = ", ".join(files[task])
        raise ValueError(f"no tuned setting of {task} by {in_line(str(algorithm))}; there are those by {known}.")
    return path


@functools.cache
def tuned_files() -> Mapping[str, Mapping[str, Path]]:
    """Return the run files by task and by the algorithm's name in lower case, PPO first."""
    found = [(*path.stem.rpartition("-")[::2], path) for path in SETTINGS.glob("*.yaml")]
    files: dict[str, dict[str, Path]] = {}
    for task, algorithm, path in sorted(found, key=lambda each: (each[0], each[1] != "ppo", each[1])):
        files.setdefault(task, {})[algorithm] = path
    return files


def listed() -> str:
    """Return all settings as one line of text."""
    each = (f"{task} ({', '.join(algorithms)})" for task, algorithms in tuned_files().items())
    return f"There are {', '.join(each)}."


def tuned_rows() -> list[tuple[str, ...]]:
    """Return the cells of a table of all settings: the transitions that each trains, and what was measured."""
    # Transitions, returns by seed and median CPU seconds of measured settings, by the stems of their files.
    measured: dict[str, Any] = json.loads((SETTINGS / "measured.json").read_text(encoding="utf-8"))
    lines: list[tuple[str, ...]] = [("task", "algorithm", "transitions", "return", "seconds")]
    for path in (path for files in tuned_files().values() for path in files.values()):
        run, result = RunSpec.from_file(path), measured.get(path.stem)
        (stop,) = run.run.stop_conditions
        transitions, cells = stop["hits_upper_bound"][1], ("not measured", "not measured")
        if result is not None:
            returns = result["returns"]
            digits = 2 if abs(max(returns, key=abs)) < 20 else 1
            points = min(returns), statistics.median(returns), max(returns)
            low, middle, high = (f"{value:.{digits}f}" for value in points)
            seeds = f"{low} to {high}, {len(returns)} seeds" if len(returns) > 1 else "1 seed"
            transitions = max(transitions, result["transitions"])  # the last step may go beyond the bound
            fewer = f", after {result['transitions']:,} or fewer" if result["transitions"] < transitions else ""
            cells = f"{middle} ({seeds}{fewer})", f"{result['seconds']:.0f}"
        lines.append((run.env.env, run.algorithm.algorithm, f"{transitions:,}", *cells))
    return lines

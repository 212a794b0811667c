"""One measurement of `rl8x bench`, in a process of its own: reads a job from standard input, prints one line of JSON.

A fresh process starts with empty caches and no memory in use, so that modes do not help or hinder each other.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import resource
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from rl8x import keys
from rl8x.cli.errors import is_users_mistake
from rl8x.cli.options import find_modules_here
from rl8x.config import RunConfig
from rl8x.output import message_of
from rl8x.tracking import MLflowTracker, NullTracker, Tracker
from rl8x.trainers import Trainer

# Two: a row tells how long tracking the row before it took.
_LEAST_ITERATIONS: Final = 2
_MOST_KEPT: Final = 200


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train for a while in one mode.

    Args:
        job: `run`: a run's data, and `trust` in what it names; `execution` and `precision`; `seconds` to time after the
            first iteration; `folder` for MLflow's database.

    Returns:
        What was measured; or `error`, why it was not, in one line, and `mistake`, whether the run itself is not legal.
    """
    trainer = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            run = RunConfig.from_dict(job["run"], trust=job["trust"])
            chosen = {name: job[name] for name in ("execution", "precision")}
            run = dataclasses.replace(run, algorithm_config={**run.algorithm_config, **chosen}, trust=job["trust"])
            trainer = make_trainer(run, job["folder"])
            row = time_iterations(trainer, run, job["seconds"])
        except Exception as error:
            traceback.print_exc()
            early = trainer is None or trainer.state[keys.COLLECTS] == 0
            return {"error": reason(error), "mistake": early and is_users_mistake(error)}
    told = [shown(warning.message) for warning in caught if issubclass(warning.category, RuntimeWarning)]
    return row | {"warnings": list(dict.fromkeys(told))}


def make_trainer(run: RunConfig, folder: str) -> Trainer:
    """Build the run with a tracker to a database that is thrown away; no evaluations and no checkpoints."""
    algorithm = run.make_algorithm()
    if run.env_config is not None:
        algorithm.env.plain_config(run.env_config)  # refused here, before anything is timed
    return Trainer(algorithm, tracker=make_tracker(run, folder), eval_env=False, checkpoints=False)


def make_tracker(run: RunConfig, folder: str) -> Tracker:
    """Return a tracker to a database in a folder, past its beginnings; what keeps nothing where there is no MLflow."""
    if not run.tracking or importlib.util.find_spec("mlflow") is None:
        return NullTracker()
    tracker = MLflowTracker("bench", tracking_uri=f"sqlite:///{folder}/mlflow.db", spool_dir=f"{folder}/spool")
    # MLflow is imported and its database made in the background: once done, that costs the iterations nothing.
    tracker.start(params={}, tags={})
    tracker.flush(120.0)
    tracker.finish("FINISHED")
    return tracker


def time_iterations(trainer: Trainer, run: RunConfig, seconds: float) -> dict[str, Any]:
    """Time the first iteration, and those after it for at least so many seconds."""
    algorithm = trainer.algorithm
    rows: list[Mapping[str, float]] = []
    times: list[float] = []
    while len(times) <= _LEAST_ITERATIONS or sum(times[1:]) < seconds:
        begin = time.perf_counter()
        rows.append(trainer.step(env_config=run.env_config))
        if algorithm.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    trainer.close()
    timed = times[1:]
    # The mean: a simulator's iterations differ where steps that only reset are no transitions.
    transitions = round((rows[-1][keys.ENV_STEPS] - rows[0][keys.ENV_STEPS]) / len(timed))

    def middle(name: str, first: int) -> float:
        return round(statistics.median(row[name] for row in rows[first:]), 4)

    row = {
        "transitions": transitions,
        "transitions_per_s": transitions / statistics.median(timed),
        "first_iteration_s": times[0],
        "iterations": len(timed),
        "seconds": timed[:: max(1, -(-len(timed) // _MOST_KEPT))],
        "slowest_s": max(timed),
        "fastest_s": min(timed),
        "collect_ms": middle("profiling/collect_ms", 1),
        "step_ms": middle("profiling/step_ms", 1),
        "tracking_ms": middle("profiling/tracking_ms", 2),
        "peak_memory_mb": round(peak_memory_mb(), 1),
        "tracker": type(trainer.tracker).__name__,
        "threads": torch.get_num_threads(),
        "ran_as": algorithm.params.get("execution"),
    }
    if algorithm.device.type == "cuda":
        row["peak_device_mb"] = round(torch.cuda.max_memory_allocated(algorithm.device) / 1e6, 1)
    return row


def peak_memory_mb() -> float:
    """Return the most memory that this process had in RAM, in MB (10^6 bytes).

    The kernel's own count where there is one: what `getrusage` tells begins with the parent process's.
    """
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024 / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def reason(error: BaseException) -> str:
    """Say in one line what went wrong: refusals in their own words, anything else with its kind."""
    text = shown(message_of(error))
    if is_users_mistake(error) or type(error).__module__.startswith("rl8x."):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(error: object) -> str:
    """Return the first line of a message, folders taken off the paths in it, so that results can be passed on."""
    lines = str(error).strip().splitlines()
    return re.sub(r"(?:/[\w.@+-]+)+/([\w.@+-]+)", r"\1", " ".join(lines[0].split()) if lines else "")


def main() -> None:
    """Do the job on standard input, and print what was measured as the last line."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what the environment or a library prints is no part of the answer
    job = json.loads(sys.stdin.read())
    find_modules_here(job["trust"])
    row = measure(job)
    sys.stdout.flush()
    os.write(answer, (json.dumps(row) + "\n").encode())


if __name__ == "__main__":
    main()

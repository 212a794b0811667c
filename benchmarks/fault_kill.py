"""Kill random runs by SIGKILL at random times, and resume them as users do."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.fault_process import Child, Ended, side_by_side
from benchmarks.fault_runs import Plan
from benchmarks.fault_tools import database_template, scratch, statuses
from rl8x.checkpoint import CheckpointError, files
from rl8x.checkpoint.tree import mapped, tensors_in
from rl8x.replay.ring import Replay

TIMES = ("profiling/", "memory/")
KILLS = 10  # of each configuration
REAL_ONE_IN = 10  # configurations whose process for MLflow imports it, as it is for users
DEFECTS = ("second_runs", "rows_lost", "rows_doubled", "wrong_rows", "tracebacks")
FIGURES = ("resumed", "equal", "status", "before_start", *DEFECTS)
Points = dict[tuple[str, int], list[float | None]]


def kill(tries: int, first: int = 0) -> dict[str, Any]:
    """SIGKILL at a random instant of a random run, eager, then resume."""
    return _row("SIGKILL at a random instant of a random run, then resume", tries, first, compiled=False)


def kill_compiled(tries: int, first: int = 0) -> dict[str, Any]:
    """Do the same to compiled runs."""
    return _row("SIGKILL at a random instant of a random compiled run, then resume", tries, first, compiled=True)


def _row(fault: str, tries: int, first: int, *, compiled: bool) -> dict[str, Any]:
    kills = min(KILLS, tries)
    with database_template() as template:
        do = functools.partial(_configuration, template=template, kills=kills, compiled=compiled)
        tables = side_by_side(-(-tries // kills), do, first=first, workers=min(2, -(-tries // kills)))
    total: Counter[str] = Counter()
    for table in tables:
        total.update({name: table[name] for name in FIGURES})
    done = kills * len(tables)
    good = total["resumed"] == total["equal"] == total["status"] == done
    lost = sum(total[name] for name in DEFECTS)
    offenders = [offender for table in tables for offender in table["why"]]
    row = {"fault": fault, "tries": done, "ok": good and not lost, "configurations": len(tables)}
    return row | {name: total[name] for name in FIGURES} | {"offenders": offenders[:8]}


def _configuration(seed: int, *, template: Path, kills: int, compiled: bool) -> dict[str, Any]:
    """Train one configuration without a fault, then kill it several times."""
    number, expected = seed, None
    while expected is None:  # some end by themselves as FAILED, by numbers that are not finite
        plan = Plan(number, compiled=compiled, forks=seed % REAL_ONE_IN != REAL_ONE_IN - 1)
        expected = _reference(plan, template, twice=compiled)
        number += 1_000_000
    table: dict[str, Any] = dict.fromkeys(FIGURES, 0) | {"why": []}
    for attempt in range(kills):
        random.seed(f"{seed} {attempt}")
        with scratch(template) as root:
            found = _killed(plan, root, expected)
        for name in FIGURES:
            table[name] += found[name]
        if found["why"]:
            table["why"].append(f"--seed {seed}, kill {attempt}: {found['why']:.600}; {plan!r:.300}")
    return table


def _reference(plan: Plan, template: Path, *, twice: bool) -> dict[str, Any] | None:
    """Train without a fault; None where the run is none that finishes."""
    for _ in range(1 + twice):  # what is compiled is found in a cache the second time
        with scratch(template) as root:
            began = time.monotonic()
            ended = Child(lambda root=root: plan(root), root, forks=plan.forks).wait(timeout_s=500)  # type: ignore[misc]
            duration = time.monotonic() - began
            if ended.code != 0 or statuses(root) != ["FINISHED"]:
                return None
            expected = {"duration": duration, "points": points(root), "state": state(plan, root)}
    return expected


def _killed(plan: Plan, root: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Kill a run once or twice, let it come to its end, and compare."""
    said = []
    for _ in range(random.choice([1, 1, 2])):
        child = Child(lambda: plan(root), root, forks=plan.forks)
        child.kill_after(random.uniform(0.0, expected["duration"]))
        said.append(ended := child.wait())
        if over := ended.code == 0 or "to continue training: " in ended.said:
            break
    before_start = state(plan, root) is None
    if not over:  # else it had said that it was over: nobody starts it again
        said.append(ended := Child(lambda: plan(root), root, forks=plan.forks).wait())
    said.append(Child(_sync, root).wait())
    found: dict[str, Any] = _compared(points(root), expected["points"]) | {"second_runs": len(statuses(root)) - 1}
    found["before_start"] = before_start
    found["resumed"] = over or ended.code == 0
    found["equal"] = state(plan, root) == expected["state"]
    found["status"] = statuses(root) == ["FINISHED"] and said[-1].code == 0
    found["tracebacks"] = sum(part.tracebacks for part in said)
    wrong = [name for name in ("resumed", "equal", "status") if not found[name]]
    wrong += [name for name in DEFECTS if found[name]]
    found["why"] = f"{', '.join(wrong)} ({statuses(root)}; {_last_lines(said)})" if wrong else ""
    return found


def _sync() -> None:
    """Send what a kill before the first checkpoint left."""
    from rl8x.cli.main import main

    raise SystemExit(main(["sync"]))


def _last_lines(said: list[Ended]) -> str:
    return " | ".join(line for part in said for line in part.said.strip().splitlines()[-2:])


def points(root: Path) -> Points:
    """Read the points of the run that has most of them, by name and step; one that is not finite is None."""
    runs: dict[str, Points] = {}
    with contextlib.closing(sqlite3.connect(root / "mlruns" / "mlflow.db")) as database:
        for run, key, step, value, is_nan in database.execute("SELECT run_uuid, key, step, value, is_nan FROM metrics"):
            runs.setdefault(run, {}).setdefault((key, step), []).append(None if is_nan else value)
    return max(runs.values(), key=lambda found: sum(map(len, found.values())), default={})


def _compared(actual: Points, expected: Points) -> dict[str, int]:
    lost = doubled = wrong = 0
    for key in expected.keys() | actual.keys():
        mine, theirs = actual.get(key, []), expected.get(key, [])
        lost += max(0, len(theirs) - len(mine))
        doubled += max(0, len(mine) - len(theirs))
        if len(mine) == len(theirs) and not key[0].startswith(TIMES):
            wrong += sorted(map(repr, mine)) != sorted(map(repr, theirs))
    return {"rows_lost": lost, "rows_doubled": doubled, "wrong_rows": wrong}


def state(plan: Plan, root: Path) -> str | None:
    """Return a digest of the newest checkpoint: weights, optimizer, normalisers, counters, how the run ended."""
    folder = plan.folder(root)
    if folder is None:
        return None
    try:
        checkpoint = files.read(files.listed(folder)[-1])
    except (CheckpointError, IndexError):
        return None
    state = with_rows(checkpoint.state["trainer"]["algorithm"])
    plain, tensors = mapped(lambda leaf, _: None if isinstance(leaf, torch.Tensor) else leaf, state), tensors_in(state)
    about = [checkpoint.metadata[name] for name in ("status", "stop_reason", "counters")]
    hashed = hashlib.sha256(repr((plain, about, sorted(tensors))).encode())
    for name in sorted(tensors):
        hashed.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def with_rows(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an algorithm with its replay's rows for their segments, which no two runs name alike."""
    if "replay" not in state:
        return state
    plain = {name: value for name, value in state["replay"].items() if name != "segments"}
    replay = Replay(plain["capacity"], torch.device("cpu"))
    replay.load_state_dict(state["replay"])
    rows = replay.as_tensordict().flatten_keys("/") if replay.size else {}
    return state | {"replay": plain | {"rows": dict(rows)}}

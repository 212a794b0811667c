"""Odd spools, all in one folder, through `rl8x sync`; and good ones among them."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from benchmarks.fault_process import Child, Ended, obey_permissions
from benchmarks.fault_tools import database_template, scratch
from benchmarks.fault_tries import command
from benchmarks.odd_spools import ROWS, OddSpool, header, odd_spools

TITLE = "odd spools, through rl8x sync"
GOOD = ("0-good", "m-good", "zz-good")  # the first, one in the middle, and the last


def spools(tries: int, first: int = 0) -> dict[str, Any]:
    """Sync a folder of odd spools, twice."""
    random.seed(f"spools {first}")
    with database_template() as template, scratch(template) as root:
        folder, database = root / "mlruns" / "spool", root / "mlruns" / "mlflow.db"
        odd = odd_spools(folder, f"sqlite:///{database}")
        chosen = random.sample(odd, min(tries, len(odd)))
        for spool in odd:
            if spool not in chosen:
                spool.folder.chmod(0o700)
                shutil.rmtree(spool.folder)
        for name in GOOD:
            _good(folder / name, f"sqlite:///{database}")

        def sync() -> None:
            obey_permissions()
            command(["sync"])

        said = [Child(sync, root).wait(timeout_s=300) for _ in range(2)]
        for spool in chosen:
            if spool.folder.is_dir():
                spool.folder.chmod(0o700)
        return _row(chosen, said, _steps(database))


def _good(folder: Path, uri: str) -> None:
    folder.mkdir()
    ops = [header(folder.name, uri), *ROWS, {"op": "finish", "status": "FINISHED", "t": ROWS[-1]["t"] + 1}]
    (folder / "journal.jsonl").write_text("".join(json.dumps(op, separators=(",", ":")) + "\n" for op in ops))


def _steps(database: Path) -> dict[str, list[int]]:
    """Read the steps at which each spool's run has the metric `a`."""
    found: dict[str, list[int]] = {}
    with contextlib.closing(sqlite3.connect(database)) as connection:
        query = (
            "SELECT tags.value, metrics.step FROM metrics JOIN tags USING (run_uuid) "
            "WHERE tags.key = 'rl8x.spool_id' AND metrics.key = 'a'"
        )
        for name, step in connection.execute(query):
            found.setdefault(name, []).append(step)
    return found


def _row(chosen: list[OddSpool], said: list[Ended], steps: dict[str, list[int]]) -> dict[str, Any]:
    lost = {spool.name: spool.lost(set(steps.get(spool.name, ()))) for spool in chosen}
    gone = {name: rows for name, rows in lost.items() if rows}
    stopped = [name for name in GOOD if sorted(steps.get(name, ())) != [0, 1, 2]]
    doubled = sum(
        steps.get(spool.name, []).count(step) - 1
        for spool in chosen
        for step in spool.steps
        if step in steps.get(spool.name, [])
    )
    figures = {
        "stopped_others": len(stopped),
        "rows_lost": sum(map(len, gone.values())),
        "rows_doubled": doubled,
        "tracebacks": sum(ended.tracebacks for ended in said),
        "wrong_exit": sum(ended.code not in (0, 1) for ended in said),
    }
    offenders = [ended.said[-600:] for ended in said if ended.tracebacks or ended.code not in (0, 1)]
    offenders += [f"{name}: rows {sorted(rows)} are nowhere, or not in the store" for name, rows in gone.items()]
    row = {"fault": TITLE, "tries": len(chosen), "ok": not any(figures.values())}
    return row | figures | {"offenders": offenders[:8]}

"""Faults of the tracking store: several processes on one, and a server that is killed and started again."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.fault_tools import begin, child, config, database_template, ended, rows, scratch, tracker, train
from benchmarks.servers import free_port, kill_server, start_server
from rl8x.envs import CartPole
from rl8x.tracking import MLflowTracker
from rl8x.tracking.shipper import sync
from rl8x.trainers import Trainer


def several(tries: int) -> dict[str, Any]:
    """Train in 8 processes on one database at once."""
    failed = lost = doubled = waiting = 0
    with database_template() as template, scratch(template) as root:
        assert ended(child(lambda: train(root, tracked=True))) == 0, "the run alone failed"
        expected = len(rows(root)[0])
        for _ in range(tries):
            with scratch(template) as other:
                pids = [
                    child(lambda n=n, other=other: begin(other / f"checkpoints-{n}", tracker(other))) for n in range(8)
                ]
                failed += sum(ended(pid) != 0 for pid in pids)
                waiting += _synced(other)
                with contextlib.closing(sqlite3.connect(other / "mlruns" / "mlflow.db")) as database:
                    query = "SELECT COUNT(*), COUNT(DISTINCT key || '@' || step) FROM metrics GROUP BY run_uuid"
                    found = database.execute(query).fetchall()
                lost += 8 * expected - sum(unique for _, unique in found)
                doubled += sum(total - unique for total, unique in found)
    ok = not failed and not lost and not doubled
    figures = {"failed": failed, "rows_lost": lost, "rows_doubled": doubled, "spools_synced": waiting}
    return {"fault": "8 processes on one sqlite store", "tries": tries, "ok": ok, **figures}


def server(tries: int) -> dict[str, Any]:
    """SIGKILL MLflow's server at random instants of one run and start it again."""
    random.seed(3)
    with database_template() as template, scratch(template) as root:
        port = free_port()
        process = _server_of(root, port)
        pid = child(lambda: _train_until_told(root, port))
        try:
            for _ in range(tries):
                time.sleep(random.uniform(0.5, 3.0))
                kill_server(process)
                time.sleep(random.uniform(0.0, 2.0))
                process = _server_of(root, port)
            (root / "enough").touch()
            code = ended(pid)
            waiting = _synced(root)
        finally:
            kill_server(process)
        seen = json.loads((root / "seen.json").read_text())
        actual, doubled = rows(root)
        lost = len({tuple(key) for key in seen["rows"]} - actual.keys())
        figures = {
            "rows": len(actual),
            "rows_lost": lost,
            "rows_doubled": doubled,
            "spools_synced": waiting,
            "max_delay_ms": seen["max_delay_ms"],
        }
    ok = code == 0 and not lost and not doubled and seen["max_delay_ms"] < 50
    return {"fault": "server killed and restarted at random", "tries": tries, "ok": ok, **figures}


def _synced(root: Path) -> int:
    """Send what has not arrived within the time that a run waits at its end; return of how many spools."""
    spools = [path for place in ("spool", "mlruns/spool") for path in (root / place).glob("*") if path.is_dir()]
    if spools:
        with contextlib.chdir(root):
            sync(spools[0].parent, allow=lambda _: True)
    return len(spools)


def _train_until_told(root: Path, port: int) -> None:
    made = MLflowTracker(
        tracking_uri=f"http://127.0.0.1:{port}", spool_dir=root / "spool", finish_timeout_s=120, outage_timeout_s=120
    )
    trainer = Trainer(config().build(CartPole), tracker=made, num_eval_envs=2, checkpoints=False)
    seen: list[tuple[str, int]] = []
    delays: list[float] = []

    def note(trainer: Any, stats: Any) -> None:
        seen.extend((name, int(stats["env/steps"])) for name in stats if name in stats.fresh)
        delays.append(stats["profiling/tracking_ms"])
        time.sleep(0.02)

    trainer.callbacks = (note,)
    trainer.run(stop_conditions=[lambda stats: (root / "enough").exists()], progress="none")
    (root / "seen.json").write_text(json.dumps({"rows": seen, "max_delay_ms": max(delays)}))


def _server_of(root: Path, port: int) -> subprocess.Popen[bytes]:
    return start_server(f"sqlite:///{root / 'mlruns' / 'mlflow.db'}", root / "server.log", port)

"""What logging a row takes, as the benchmark measures it."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import report, tracking_cost  # noqa: E402


def test_rows_are_tracked_and_timed(mlruns, monkeypatch):
    monkeypatch.chdir(mlruns)
    row = tracking_cost.measure("sqlite", steps=4, threads=1)
    assert row["steps"] == 4
    assert 0.0 < row["median_ms"] <= row["p99_ms"] <= row["max_ms"]
    with closing(sqlite3.connect(mlruns / "mlflow.db")) as database:
        query = "SELECT COUNT(*) FROM metrics WHERE key = 'profiling/tracking_ms'"
        assert database.execute(query).fetchone() == (6,)


def test_table_of_what_logging_takes():
    row = {"steps": 300, "metrics": 50, "first_ms": 2.0, "median_ms": 0.5, "p99_ms": 0.75, "max_ms": 1.25}
    lines = report.tracking_table([{"store": "http", **row}, {"store": "sqlite", "error": "x"}]).splitlines()
    assert lines[2:] == ["| http | 50 | 300 | 2.0 | 0.5 | 0.75 | 1.25 |"]

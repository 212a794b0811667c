"""Runs read from MLflow's sqlite tables, without MLflow: its import takes longer than a comparison of twenty runs."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rl8x.tracking.repeats import LEFT_TAG, LeftBehind, left_behind

_VALUE = "CASE WHEN is_nan THEN NULL ELSE value END"
_IDS = 500  # in one query: sqlite limits the values of a statement

Points = tuple[list[int], list[float]]
"""Steps and values of a metric, in the order in which they were logged."""


class RunRecord(NamedTuple):
    """A run as its store has it.

    Attributes:
        id: Its ID.
        name: Its name.
        status: Such as `FINISHED`.
        start_time: In milliseconds since 1970.
        params: Params by name.
        metrics: The last value of each metric.
        tags: Tags by name.
    """

    id: str
    name: str
    status: str
    start_time: int
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]


class DatabaseRuns:
    """The runs of a database that are not deleted. Every call raises `sqlite3.Error` where it cannot be read."""

    def __init__(self, database: Path) -> None:
        self._uri = f"{database.as_uri()}?mode=ro"

    def by_id(self, run_id: str) -> list[RunRecord]:
        """Find a run by its ID."""
        return self._runs("run_uuid = ?", run_id)

    def by_name(self, name: str) -> list[RunRecord]:
        """List the runs of a name."""
        return self._runs("name = ?", name)

    def by_tag(self, tag: str, value: str) -> list[RunRecord]:
        """List the runs that have a value of a tag."""
        return self._runs("run_uuid IN (SELECT run_uuid FROM tags WHERE key = ? AND value = ?)", tag, value)

    def of_experiment(self, experiment_id: str) -> list[RunRecord]:
        """List the runs of an experiment."""
        return self._runs("experiment_id = ?", int(experiment_id))

    def names(self) -> set[str]:
        """List the names of all runs."""
        with self._open() as connection:
            return {
                name for (name,) in connection.execute("SELECT name FROM runs WHERE lifecycle_stage = 'active'") if name
            }

    def experiments(self) -> dict[str, str]:
        """Return the names of the experiments by their IDs."""
        query = "SELECT experiment_id, name FROM experiments WHERE lifecycle_stage = 'active'"
        with self._open() as connection:
            return {str(experiment_id): name for experiment_id, name in connection.execute(query)}

    def histories(self, run_ids: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Points]]:
        """Read metrics of several runs at once, by metric and run; what a run does not have is left out."""
        by_name: dict[str, dict[str, Points]] = {name: {} for name in names}
        with self._open() as connection:
            for ids in _parts(run_ids):
                left = _left_behind(connection, ids)
                query = (
                    f"SELECT key, run_uuid, step, timestamp, {_VALUE} FROM metrics "
                    f"WHERE run_uuid IN ({_marks(ids)}) AND key IN ({_marks(names)}) ORDER BY timestamp, step"
                )
                for name, run_id, step, timestamp, value in connection.execute(query, (*ids, *names)):
                    if any(each.has(name, step, timestamp) for each in left.get(run_id, ())):
                        continue
                    steps, values = by_name[name].setdefault(run_id, ([], []))
                    steps.append(step)
                    values.append(_number(value))
        return by_name

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self._uri, uri=True, timeout=5)) as connection:
            yield connection

    def _runs(self, condition: str, *values: str | int) -> list[RunRecord]:
        """Read the runs that meet a condition, the oldest first, in a query for each of their tables."""
        query = f"SELECT run_uuid, name, status, start_time FROM runs WHERE lifecycle_stage = 'active' AND {condition}"
        with self._open() as connection:
            rows = connection.execute(f"{query} ORDER BY start_time, run_uuid", values).fetchall()
            ids = [row[0] for row in rows]
            params = _pairs(connection, "SELECT run_uuid, key, value FROM params", ids)
            tags = _pairs(connection, "SELECT run_uuid, key, value FROM tags", ids)
            metrics = _pairs(connection, f"SELECT run_uuid, key, {_VALUE} FROM latest_metrics", ids)
            for run_id in (run_id for run_id in ids if LEFT_TAG in tags[run_id]):
                metrics[run_id] = _latest(connection, run_id, left_behind(tags[run_id]))
        return [
            RunRecord(
                run_id,
                name or run_id,
                status,
                start_time or 0,
                params[run_id],
                {key: _number(value) for key, value in metrics[run_id].items()},
                tags[run_id],
            )
            for run_id, name, status, start_time in rows
        ]


def _left_behind(connection: sqlite3.Connection, run_ids: Sequence[str]) -> dict[str, list[LeftBehind]]:
    """Read what runs have left behind, of those that have."""
    query = f"SELECT run_uuid, value FROM tags WHERE key = ? AND run_uuid IN ({_marks(run_ids)})"
    return {run_id: left_behind({LEFT_TAG: value}) for run_id, value in connection.execute(query, (LEFT_TAG, *run_ids))}


def _latest(connection: sqlite3.Connection, run_id: str, left: Sequence[LeftBehind]) -> dict[str, str]:
    """Read the last value of each metric, without what a run has left behind."""
    query = f"SELECT key, step, timestamp, {_VALUE} FROM metrics WHERE run_uuid = ? ORDER BY step, timestamp, value"
    points = connection.execute(query, (run_id,))
    return {key: value for key, step, time, value in points if not any(each.has(key, step, time) for each in left)}


def _pairs(connection: sqlite3.Connection, query: str, run_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read names and values by run."""
    by_run: dict[str, dict[str, str]] = {run_id: {} for run_id in run_ids}
    for ids in _parts(run_ids):
        for run_id, key, value in connection.execute(f"{query} WHERE run_uuid IN ({_marks(ids)}) ORDER BY rowid", ids):
            by_run[run_id][key] = value
    return by_run


def _parts(items: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(items), _IDS):
        yield items[start : start + _IDS]


def _marks(items: Sequence[str]) -> str:
    return ", ".join("?" * len(items))


def _number(value: str | float | None) -> float:
    return float("nan") if value is None else float(value)

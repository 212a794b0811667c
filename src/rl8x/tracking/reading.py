"""What runs have in their store, read for reports and comparisons: params, metrics' histories in bulk, artifacts."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rl8x.tracking.location import locate
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.runs import find_run
from rl8x.tracking.store import SPOOL_TAG, MLflowStore, StoreDownError, StoreRefusedError

PARENT_TAG = "mlflow.parentRunId"
_REQUESTS = 8  # at once, to a server
_IDS = 500  # in one query

Points = tuple[list[int], list[float]]
"""Steps and values of a metric, in the order in which they were logged."""


class RunRecord(NamedTuple):
    """A run as its store has it.

    Attributes:
        id: Its ID.
        name: Its name.
        experiment_id: The experiment that it is in.
        status: Such as `FINISHED`.
        start_time: In milliseconds since 1970.
        params: Params by name.
        metrics: The last value of each metric.
        tags: Tags by name.
    """

    id: str
    name: str
    experiment_id: str
    status: str
    start_time: int
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]


class RunReader:
    """Reads runs of one store. Every call raises `TrackingError` where the store does not answer; imports mlflow.

    Args:
        tracking_uri: The store. None: as in training.
    """

    def __init__(self, tracking_uri: str | None = None) -> None:
        self._uri = tracking_uri
        self._location = locate(tracking_uri)
        self._made: MLflowStore | None = None

    @property
    def _store(self) -> MLflowStore:
        if self._made is None:
            database = self._location.database
            if database is not None and not database.exists():
                raise TrackingError(f"there are no runs: {database} does not exist")
            self._made = MLflowStore(self._location)
        return self._made

    def run(self, run: str) -> RunRecord:
        """Find a run by its ID or name."""
        return _record(find_run(run, self._uri))

    def run_of_spool(self, spool_id: str) -> RunRecord | None:
        """Find the run that was made for a spool; None where there is none."""
        with self._told():
            found = self._store.search_everywhere(f"tags.`{SPOOL_TAG}` = '{spool_id}'") if spool_id.isalnum() else []
        return _oldest_first(found)[0] if found else None

    def children(self, run_id: str) -> list[RunRecord]:
        """List the runs whose parent is a run, the oldest first."""
        with self._told():
            found = self._store.search_everywhere(f"tags.`{PARENT_TAG}` = '{run_id}'")
        return _oldest_first(found)

    def experiment(self, name: str) -> list[RunRecord]:
        """List the runs of an experiment, by its name or ID, the oldest first."""
        with self._told():
            experiments = self._store.experiments()
            ids = [each.experiment_id for each in experiments if name in (each.name, each.experiment_id)]
            if not ids:
                known = ", ".join(sorted(each.name for each in experiments))
                raise TrackingError(f"there is no experiment {name!r} in {self._location.shown}; there are {known}")
            return _oldest_first(self._store.search(ids, ""))

    def histories(self, run_ids: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Points]]:
        """Read metrics of several runs, by metric and run: one query of a local database, else a request for each.

        What a run does not have is left out.
        """
        if self._location.database is not None:
            try:
                return _from_database(self._location.database, run_ids, names)
            except sqlite3.Error as error:
                raise TrackingError(f"cannot read {self._location.shown}: {error}") from error
        pairs = [(name, run_id) for name in names for run_id in run_ids]
        with self._told(), ThreadPoolExecutor(_REQUESTS) as pool:
            histories = list(pool.map(lambda pair: self._store.history(pair[1], pair[0]), pairs))
        found: dict[str, dict[str, Points]] = {name: {} for name in names}
        for (name, run_id), history in zip(pairs, histories, strict=True):
            if history[0]:
                found[name][run_id] = history
        return found

    def artifact(self, run_id: str, name: str, folder: Path) -> Path | None:
        """Copy an artifact of a run into a folder; None where the run does not have it."""
        with self._told():
            return self._store.download(run_id, name, folder)

    def log_files(self, run_id: str, files: Sequence[Path], to: str) -> None:
        """Copy files to a folder of a run's artifacts."""
        with self._told():
            for file in files:
                self._store.log_artifact(run_id, file, to)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (StoreDownError, StoreRefusedError) as error:
            raise TrackingError(f"cannot read runs of {self._location.shown}: {error}") from error


def _record(run: Any) -> RunRecord:
    info, data = run.info, run.data
    return RunRecord(
        str(info.run_id),
        str(info.run_name or info.run_id),
        str(info.experiment_id),
        str(info.status),
        int(info.start_time or 0),
        dict(data.params),
        dict(data.metrics),
        dict(data.tags),
    )


def _oldest_first(runs: Sequence[Any]) -> list[RunRecord]:
    return sorted(map(_record, runs), key=lambda run: (run.start_time, run.id))


def _from_database(database: Path, run_ids: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Points]]:
    """Read metrics from MLflow's table of them: its own calls make an object of each point, which takes far longer."""
    found: dict[str, dict[str, Points]] = {name: {} for name in names}
    marks = ", ".join("?" * len(names))
    uri = f"{database.as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5)) as connection:
        for start in range(0, len(run_ids), _IDS):
            ids = run_ids[start : start + _IDS]
            query = (
                "SELECT key, run_uuid, step, CASE WHEN is_nan THEN NULL ELSE value END FROM metrics "
                f"WHERE run_uuid IN ({', '.join('?' * len(ids))}) AND key IN ({marks}) ORDER BY timestamp, step"
            )
            for name, run_id, step, value in connection.execute(query, (*ids, *names)):
                steps, values = found[name].setdefault(run_id, ([], []))
                steps.append(step)
                values.append(float("nan") if value is None else value)
    return found

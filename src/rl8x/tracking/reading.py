"""Runs read from their store for reports and comparisons: params, metrics' histories in bulk, artifacts."""

from __future__ import annotations

import contextlib
import difflib
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rl8x.tracking.database_runs import DatabaseRuns, Points, RunRecord
from rl8x.tracking.location import Location, locate
from rl8x.tracking.names import readable
from rl8x.tracking.protocol import PARENT_TAG, StoreDownError, StoreRefusedError, TrackingError
from rl8x.tracking.repeats import LEFT_TAG, LeftBehind, Point, left_behind
from rl8x.tracking.store import SPOOL_TAG, MLflowStore

_BARS = "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"
_REQUESTS = 4  # at once, to a server
_TIMEOUT_S = 30  # of a request: nothing waits for it but the reader
_WAITS_S = (0.5, 2.0)  # a busy server drops connections


class RunReader:
    """Reads runs of one store: a local database itself, others through MLflow.

    Every call raises `TrackingError` where the store does not answer.

    Args:
        tracking_uri: The store. None: as in training.
    """

    def __init__(self, tracking_uri: str | None = None) -> None:
        self._location = locate(tracking_uri)
        database = self._location.database
        if database is not None and not database.exists():
            raise TrackingError(f"there are no runs: {database} does not exist; train, or give another tracking_uri")
        with self._told():
            self._runs: _StoreRuns | DatabaseRuns = (
                _StoreRuns(self._location) if database is None else DatabaseRuns(database)
            )

    def run(self, run: str) -> RunRecord:
        """Find a run by its ID or name."""
        run = readable(run)
        with self._told():
            runs = self._runs.by_id(run) if run.isalnum() else []
            runs = runs or self._runs.by_name(run)
            if not runs:
                near = difflib.get_close_matches(run, sorted(self._runs.names()), n=3)
                hint = f"; did you mean {' or '.join(near)}" if near else "; `rl8x ui` shows what is there"
                raise TrackingError(f"there is no run {run!r} in {self._location.shown}{hint}")
        if len(runs) > 1:
            ids = ", ".join(other.id for other in runs[:5])
            raise TrackingError(f"{len(runs)} runs are called {run!r}; name one by its ID: {ids}")
        return runs[0]

    def entity(self, run: str) -> Any:
        """Find a run by its ID or name, as MLflow has it, an `mlflow.entities.Run`. Imports mlflow."""
        run_id = self.run(run).id
        with self._told():
            return MLflowStore(self._location, request_timeout_s=_TIMEOUT_S).run(run_id)

    def run_of_spool(self, spool_id: str) -> RunRecord | None:
        """Find the run that was made for a spool; None if there is none."""
        with self._told():
            runs = self._runs.by_tag(SPOOL_TAG, spool_id) if spool_id.isalnum() else []
        return runs[0] if runs else None

    def children(self, run_id: str) -> list[RunRecord]:
        """List the runs whose parent is a run, the oldest first."""
        with self._told():
            return self._runs.by_tag(PARENT_TAG, run_id)

    def experiment(self, name: str) -> list[RunRecord]:
        """List the runs of an experiment, by its name or ID, the oldest first."""
        with self._told():
            experiments = self._runs.experiments()
            ids = [key for key, known in experiments.items() if name == known] or [
                key for key in experiments if key == name
            ]
            if not ids:
                known = ", ".join(sorted(experiments.values()))
                raise TrackingError(f"there is no experiment {name!r} in {self._location.shown}; there are {known}")
            return self._runs.of_experiment(ids[0])

    def histories(self, run_ids: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Points]]:
        """Read metrics of several runs, by metric and run: one query of a local database, else a request for each.

        What a run does not have is left out.
        """
        with self._told():
            return self._runs.histories(run_ids, names)

    def artifact(self, run_id: str, name: str, folder: Path) -> Path | None:
        """Copy an artifact of a run into a folder; None where the run does not have it. Imports mlflow."""
        with self._told(), _without_bars():
            return MLflowStore(self._location, request_timeout_s=_TIMEOUT_S).download(run_id, name, folder)

    def log_files(self, run_id: str, files: Sequence[Path], to: str) -> None:
        """Copy files to a folder of a run's artifacts. Imports mlflow."""
        with self._told():
            store = MLflowStore(self._location, request_timeout_s=_TIMEOUT_S)
            for file in files:
                store.log_artifact(run_id, file, to)

    def log_model(self, run_id: str, path: Path, about: Mapping[str, Any]) -> str:
        """Log a policy's file as a model of a run by `logged_models.log_model`; return its ID. Imports mlflow."""
        with self._told(), _without_bars():
            return MLflowStore(self._location, request_timeout_s=_TIMEOUT_S).log_model(run_id, path, about)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (StoreDownError, StoreRefusedError, sqlite3.Error) as error:
            raise TrackingError(f"cannot read runs of {self._location.shown}: {error}") from error


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Keep MLflow from drawing a progress bar for each file, unless the user has asked for them."""
    mine = _BARS not in os.environ
    if mine:
        os.environ[_BARS] = "false"
    try:
        yield
    finally:
        if mine:
            os.environ.pop(_BARS, None)


class _StoreRuns:
    """Reads runs through MLflow, with the methods of `DatabaseRuns`."""

    def __init__(self, location: Location) -> None:
        self._store = MLflowStore(location, request_timeout_s=_TIMEOUT_S)

    def by_id(self, run_id: str) -> list[RunRecord]:
        return self._search(f"attributes.run_id = '{run_id}'")

    def by_name(self, name: str) -> list[RunRecord]:
        return self._oldest_first(self._store.search_by_name(name))

    def by_tag(self, tag: str, value: str) -> list[RunRecord]:
        return self._search(f"tags.`{tag}` = '{value}'")

    def of_experiment(self, experiment_id: str) -> list[RunRecord]:
        return self._oldest_first(self._store.search_all([experiment_id], ""))

    def names(self) -> set[str]:
        return {run.name for run in self._search("")}

    def experiments(self) -> dict[str, str]:
        return {str(experiment.experiment_id): str(experiment.name) for experiment in self._store.experiments()}

    def histories(self, run_ids: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Points]]:
        left = {run_id: left_behind(self._store.tags(run_id)) for run_id in run_ids}
        by_name: dict[str, dict[str, Points]] = {name: {} for name in names}
        for point, run_id in self._points([(run_id, name) for name in names for run_id in run_ids], left):
            steps, values = by_name[point.name].setdefault(run_id, ([], []))
            steps.append(point.step)
            values.append(point.value)
        return by_name

    def _points(
        self, pairs: Sequence[tuple[str, str]], left: Mapping[str, Sequence[LeftBehind]]
    ) -> Iterator[tuple[Point, str]]:
        """Yield the points of runs' metrics, with the run of each, but for what the runs have left behind."""
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for (run_id, name), points in zip(pairs, pool.map(lambda pair: self._patiently(*pair), pairs), strict=True):
                for point in points:
                    if not any(each.has(name, point.step, point.timestamp) for each in left[run_id]):
                        yield point, run_id

    def _patiently(self, run_id: str, name: str) -> list[Point]:
        for wait_s in _WAITS_S:
            try:
                return self._store.points(run_id, name)
            except StoreDownError:
                time.sleep(wait_s)
        return self._store.points(run_id, name)

    def _search(self, query: str) -> list[RunRecord]:
        return self._oldest_first(self._store.search_all(list(self.experiments()), query))

    def _oldest_first(self, runs: Sequence[Any]) -> list[RunRecord]:
        return sorted(map(self._record, runs), key=lambda run: (run.start_time, run.id))

    def _record(self, run: Any) -> RunRecord:
        info, params, metrics, tags = run.info, dict(run.data.params), dict(run.data.metrics), dict(run.data.tags)
        run_id, name, start = str(info.run_id), str(info.run_name or info.run_id), int(info.start_time or 0)
        if LEFT_TAG in tags:
            points = self._points([(run_id, name) for name in metrics], {run_id: left_behind(tags)})
            newest = sorted((point.step, point.timestamp, point.value, point.name) for point, _ in points)
            metrics = {name: value for *_, value, name in newest}
        return RunRecord(run_id, name, str(info.status), start, params, metrics, tags)


def find_record(run: str, tracking_uri: str | None = None) -> RunRecord:
    """Find a run by its ID or its name; see `find_run`. Of a local database without importing mlflow."""
    database, run = locate(tracking_uri).database, readable(run)
    if database is not None and not database.exists():
        raise TrackingError(f"there is no run {run!r}: {database} does not exist")
    return RunReader(tracking_uri).run(run)


def find_run(run: str, tracking_uri: str | None = None) -> Any:
    """Find a run, an `mlflow.entities.Run`, by its ID or its name. Imports mlflow.

    Args:
        run: The ID, or the name.
        tracking_uri: Where the runs are; None is where a tracker would keep them.

    Raises:
        TrackingError: If there is none, or if several have the name.
    """
    return RunReader(tracking_uri).entity(find_record(run, tracking_uri).id)

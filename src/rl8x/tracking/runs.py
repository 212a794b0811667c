"""Find runs (the user's active one, one to resume and its journal), describe their place, and read them for reports."""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rl8x.output import counted, in_line, shown
from rl8x.tracking.appending import Journal
from rl8x.tracking.journal import JOURNAL, REJECTED, REMOVED, Unsent, read_ack, read_header
from rl8x.tracking.location import Location, database_beside, is_default, locate, mlruns_dir, shell_tracking_uri
from rl8x.tracking.private import DatabaseRuns, RunRecord, stored_number
from rl8x.tracking.protocol import PARENT_TAG, StoreDownError, StoreRefusedError, TrackingError, readable
from rl8x.tracking.repeats import Point, left_behind
from rl8x.tracking.store import JOURNAL_TAG, MLflowStore

HANDLE_PREFIX = "journal-"


def user_run_id(tracking_uri: str | None) -> tuple[str, str] | None:
    """Return the ID and tracking URI of the user's active run, in this thread or by `MLFLOW_RUN_ID`, if any."""
    mlflow: Any = sys.modules.get("mlflow")  # without an import of mlflow no run is active
    if mlflow is not None and hasattr(mlflow, "active_run"):
        run = mlflow.active_run()
        uri = str(mlflow.get_tracking_uri())
        if run is not None and (tracking_uri is None or locate(tracking_uri).uri == locate(uri).uri):
            return str(run.info.run_id), uri
    run_id = os.environ.get("MLFLOW_RUN_ID")
    return (run_id, locate(tracking_uri).uri) if run_id else None


def find_journal(root: Path, handle: str) -> Path | None:
    """Return the journal of the run to resume; None if it does not exist any more."""
    if handle.startswith(HANDLE_PREFIX):
        journal_id = handle.removeprefix(HANDLE_PREFIX)
        if not journal_id.isalnum():
            raise TrackingError(f"not the handle of a run: {handle!r}")
        folder = root / journal_id
        return folder if folder.is_dir() else None
    for folder in journal_folders(root):
        with contextlib.suppress(TrackingError):
            if handle in (read_ack(folder).run_id, read_header(folder).get("run_id")):
                return folder
    return None


def journal_folders(root: Path) -> list[Path]:
    """Return the journals in a folder, the oldest first; the folder may be a journal itself."""
    if os.path.lexists(root / JOURNAL):
        return [root]
    times = {}
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            is_removed = folder.name.startswith(".") and folder.name.endswith(REMOVED)
            if not is_removed and (os.path.lexists(folder / JOURNAL) or unreadable(folder)):
                times[folder] = 0.0
                with contextlib.suppress(OSError):
                    times[folder] = (folder / JOURNAL).lstat().st_mtime
    return sorted(times, key=lambda folder: (times[folder], folder.name))


def unreadable(folder: Path) -> bool:
    """Return whether a folder exists that this user cannot read."""
    return folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK)


def has_run(location: Location, handle: str) -> bool:
    """Return whether an sqlite store has a run with this ID or journal ID; creates nothing, does not import mlflow."""
    if location.database is not None:
        with contextlib.suppress(sqlite3.Error):
            return DatabaseRuns(location.database).has(handle, JOURNAL_TAG, handle.removeprefix(HANDLE_PREFIX))
    return False


class Whereabouts:
    """The place of a run: its store, and the journal with the unsent part."""

    def __init__(self, location: Location, journal: Journal, reason: str) -> None:
        self.location = location
        self.ack, self.unsent, self.folder = journal.ack, journal.unsent(), journal.folder
        self.why = f" ({reason})" if reason else ""
        self._given_name = journal.header.get("run_name")
        self._database_beside = journal.header.get("database")

    @property
    def resume_word(self) -> str | None:
        """The run's argument for `rl8x resume` in this folder: a unique name, else the ID; None if it does not work."""
        if self.ack.run_id is None or not is_default(self.location) or self.unsent != Unsent():
            return None
        return self.ack.name_word(is_default=True) or self.ack.run_id

    def lines(self) -> list[str]:
        """Describe the place in words, one fact per line."""
        unsent, store = self.unsent, self.location.shown
        # A name that MLflow generates is known only after its answer.
        name = self.ack.run_name or self._given_name or self.ack.run_id or HANDLE_PREFIX + self.folder.name
        name = f"run {in_line(name)}"
        lines = []
        if unsent.lost_words:
            lines.append(f"{name} has lost {unsent.lost_words}: neither the disk nor {store} took them")
        if unsent.num_rows or unsent.num_others:
            missing = counted(unsent.num_rows, "row") if unsent.num_rows else "the last entry"
            lines.append(f"{missing} of {name} did not reach {store}{self.why}")
            lines.append(f"to send what waits in {shown_path(self.folder)}: {self.sync_command}")
        if unsent.num_rejected:
            entries = counted(unsent.num_rejected, "entry", "entries")
            where = shown_path(self.folder / REJECTED)
            again = f"to try again what is in {where}: {self.sync_command}"
            lines.append(f"{entries} of {name} could not be logged; {again}")
        if not (unsent.num_rows or unsent.num_others) and self.ack.run_id is not None:
            uri = "" if is_default(self.location) else f" --tracking-uri {shlex.quote(store)}"
            look = "" if self.location.remote else f"; to look at it: rl8x ui{uri}"
            lines.append(f"{name} is in {store}{look}")
        return lines

    @property
    def sync_command(self) -> str:
        """The command that sends the unsent part, started in this folder, without a prompt."""
        folder = shlex.quote(shown_path(self.folder))
        if not (self._is_beside(self.folder) or is_default(self.location)):
            return f"rl8x sync {folder} --to {self._typed_uri}"
        return "rl8x sync" if self.folder.parent == mlruns_dir() / "spool" else f"rl8x sync {folder}"

    def resume_option(self, folder: Path) -> str:
        """Return the option by which `rl8x resume`, started here with a folder of checkpoints, finds the store."""
        is_hidden = self.location.uri != self.location.shown
        if is_default(self.location):
            return ""
        if shell_tracking_uri() is not None:  # the run would continue in that store
            return f"--tracking-uri {self._typed_uri}"
        if self._is_beside(folder):
            return ""
        return f"--tracking-uri {self._typed_uri}" if is_hidden else "--trust"

    @property
    def _typed_uri(self) -> str:
        """The store's URI, quoted for a command; "URI" as a placeholder if it has a password."""
        return shlex.quote(self.location.uri) if self.location.uri == self.location.shown else "URI"

    def _is_beside(self, folder: Path) -> bool:
        """Return whether the database lies next to a folder of the run, even if both were moved."""
        if self._database_beside is not None and (folder.absolute() / str(self._database_beside)).exists():
            return True
        return database_beside(folder.absolute(), self.location.database) is not None


def shown_path(path: Path) -> str:
    """Return a path relative to the working directory if it lies inside, else unchanged."""
    with contextlib.suppress(ValueError, FileNotFoundError):  # it lies outside, or the directory was removed
        return str(path.relative_to(Path.cwd()))
    return str(path)


_REQUESTS = 4  # parallel requests to a server
_TIMEOUT_S = 30  # per request; long, as only the reader waits for it
_WAITS_S = (0.5, 2.0)  # before each retry, as a busy server drops connections

Points = tuple[list[int], list[float]]
"""Steps and values of a metric, in the order of steps, then of time."""


class RunReader:
    """Reads runs of one store: a local database directly, other stores through MLflow."""

    def __init__(self, tracking_uri: str | None = None) -> None:
        self._location = locate(tracking_uri)
        database = self._location.database
        if database is not None and not database.exists():
            raise TrackingError(f"there are no runs: {database} does not exist; train, or give another tracking_uri")
        with self._tracking_errors():
            self._runs: _StoreRuns | DatabaseRuns
            self._runs = _StoreRuns(self._location) if database is None else DatabaseRuns(database)

    def _find(self, by: str, *values: str) -> list[RunRecord]:
        """Return runs, the oldest first; their metrics exclude superseded points."""
        runs = sorted(self._runs.find(by, *values), key=lambda run: (run.start_time, run.id))
        for place, run in enumerate(runs):
            if left_behind(run.tags):
                kept = {point.name: point.value for _, point in self._points([run], list(run.metrics))}
                runs[place] = run._replace(metrics=kept)
        return runs

    def _points(self, runs: Sequence[RunRecord], names: Sequence[str]) -> Iterator[tuple[str, Point]]:
        """Yield (run ID, point) for metrics of runs, without superseded points."""
        left = {run.id: left_behind(run.tags) for run in runs}
        for run_id, point in self._runs.points(list(left), names):
            if not any(each.has(point.name, point.step, point.timestamp) for each in left[run_id]):
                yield run_id, point

    def run(self, run: str) -> RunRecord:
        """Find a run by its ID or name."""
        if not isinstance(run, str):
            raise TypeError(f"a run is named by its ID or its name, a text; got {shown(run)}.")
        run = readable(run)
        with self._tracking_errors():
            runs = self._find("id", run) if run.isalnum() else []
            runs = runs or self._find("name", run)
            if not runs:
                near = difflib.get_close_matches(run, sorted(self._runs.names()), n=3)
                hint = f"; did you mean {' or '.join(near)}" if near else "; `rl8x ui` shows what is there"
                raise TrackingError(f"there is no run {run!r} in {self._location.shown}{hint}")
        if len(runs) > 1:
            ids = ", ".join(other.id for other in runs[:5])
            raise TrackingError(f"{len(runs)} runs are called {run!r}; name one by its ID: {ids}")
        return runs[0]

    def run_of_journal(self, handle: str) -> RunRecord | None:
        """Find the run that was created for a journal, by its handle or ID; None if there is none."""
        journal_id = handle.removeprefix(HANDLE_PREFIX)
        with self._tracking_errors():
            return next(iter(self._find("tag", JOURNAL_TAG, journal_id) if journal_id.isalnum() else []), None)

    def children(self, run_id: str) -> list[RunRecord]:
        """Return the child runs of a run, the oldest first."""
        with self._tracking_errors():
            return self._find("tag", PARENT_TAG, run_id)

    def experiment(self, name: str) -> list[RunRecord]:
        """Return the runs of an experiment, given by its name or ID, the oldest first."""
        with self._tracking_errors():
            experiments = self._runs.experiments()
            ids = {known: key for key, known in experiments.items()}
            if name not in ids and name not in experiments:
                known = ", ".join(sorted(ids))
                raise TrackingError(f"there is no experiment {name!r} in {self._location.shown}; there are {known}")
            return self._find("experiment", ids.get(name, name))

    def histories(self, runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, dict[str, Points]]:
        """Return metrics of several runs, by metric name and run ID, without superseded points."""
        by_name: dict[str, dict[str, Points]] = {name: {} for name in names}
        with self._tracking_errors():
            for run_id, point in self._points(runs, names):
                steps, values = by_name[point.name].setdefault(run_id, ([], []))
                steps.append(point.step)
                values.append(point.value)
        return by_name

    @contextlib.contextmanager
    def store(self) -> Iterator[MLflowStore]:
        """Connect to the store through MLflow, which is imported; its errors become `TrackingError`s in the context."""
        with self._tracking_errors():
            yield MLflowStore(self._location, request_timeout_s=_TIMEOUT_S)

    @contextlib.contextmanager
    def _tracking_errors(self) -> Iterator[None]:
        try:
            yield
        except (StoreDownError, StoreRefusedError, sqlite3.Error) as error:
            raise TrackingError(f"cannot read runs of {self._location.shown}: {error}") from error


class _StoreRuns:
    """Reads runs through MLflow, with the methods of `DatabaseRuns`."""

    def __init__(self, location: Location) -> None:
        self._store = MLflowStore(location, request_timeout_s=_TIMEOUT_S)

    def names(self) -> set[str]:
        return {str(run.info.run_name) for run in self._store.search(None, "")}

    def experiments(self) -> dict[str, str]:
        return {str(experiment.experiment_id): str(experiment.name) for experiment in self._store.experiments()}

    def points(self, run_ids: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, Point]]:
        pairs = [(run_id, name) for name in names for run_id in run_ids]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            for (run_id, _), points in zip(pairs, pool.map(lambda pair: self._patiently(*pair), pairs), strict=True):
                yield from ((run_id, point) for point in points)

    def _patiently(self, run_id: str, name: str) -> list[Point]:
        for wait_s in _WAITS_S:
            try:
                return self._store.points(run_id, name)
            except StoreDownError:
                time.sleep(wait_s)
        return self._store.points(run_id, name)

    def find(self, by: str, *values: str) -> list[RunRecord]:
        match by, values:
            case "id", (run_id,):
                runs = self._store.search(None, f"attributes.run_id = '{run_id}'")
            case "name", (name,):
                runs = self._store.search_by_name(name)
            case "tag", (tag, value):
                runs = self._store.search(None, f"tags.`{tag}` = '{value}'")
            case _:
                runs = self._store.search(list(values), "")
        return [
            RunRecord(
                str(run.info.run_id),
                str(run.info.run_name or run.info.run_id),
                str(run.info.status),
                int(run.info.start_time or 0),
                dict(run.data.params),
                {name: stored_number(value) for name, value in run.data.metrics.items()},
                dict(run.data.tags),
            )
            for run in runs
        ]


def find_record(run: str) -> RunRecord:
    """Find a run of the user's store by its ID or name; does not import mlflow for a local database."""
    database, run = locate().database, readable(run)
    if database is not None and not database.exists():
        raise TrackingError(f"there is no run {run!r}: {database} does not exist")
    return RunReader().run(run)


def find_run(run: str, tracking_uri: str | None = None) -> Any:
    """Find a run, an `mlflow.entities.Run`, by its ID or its name. Imports mlflow.

    Args:
        run: The ID, or the name.
        tracking_uri: The store of the runs; None is the one that `MLflowTracker` would use.

    Raises:
        TrackingError: If no run has the ID or name, or several have the name.
    """
    reader = RunReader(tracking_uri)
    run_id = reader.run(run).id
    with reader.store() as store:
        return store.entity(run_id)

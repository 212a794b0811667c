"""Find runs: the user's active one, the one to resume and its journal; say where one is; read them for reports."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import shlex
import socket
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rl8x.output import counted
from rl8x.tracking.appending import Journal
from rl8x.tracking.journal import JOURNAL, REJECTED, REMOVED, Op, Unsent, boot_id, read_ack, read_header
from rl8x.tracking.location import (
    Location,
    beside,
    check_writable,
    is_default,
    is_users_own,
    locate,
    mlruns_dir,
    recorded_location,
    shell_tracking_uri,
    user_tracking_uri,
)
from rl8x.tracking.private import DatabaseRuns, Points, RunRecord
from rl8x.tracking.protocol import PARENT_TAG, StoreDownError, StoreRefusedError, TrackingError, readable, typed_name
from rl8x.tracking.repeats import LEFT_TAG, LeftBehind, Point, left_behind
from rl8x.tracking.store import DEFAULT_EXPERIMENT, SPOOL_TAG, MLflowStore

HANDLE_PREFIX = "spool-"
_BUSY_WAIT_S = 30.0  # how long a run that is gone on with waits for `rl8x sync` to be through with its spool


def user_run_id(tracking_uri: str | None) -> tuple[str, str] | None:
    """Return the ID and tracking URI of the user's active run, in this thread or by `MLFLOW_RUN_ID`, if any."""
    mlflow: Any = sys.modules.get("mlflow")  # where mlflow has not been imported no run is active
    if mlflow is not None and hasattr(mlflow, "active_run"):
        run = mlflow.active_run()
        uri = str(mlflow.get_tracking_uri())
        if run is not None and (tracking_uri is None or locate(tracking_uri).uri == locate(uri).uri):
            return str(run.info.run_id), uri
    run_id = os.environ.get("MLFLOW_RUN_ID")
    return (run_id, locate(tracking_uri).uri) if run_id else None


def find_journal(root: Path, handle: str) -> Path | None:
    """Return the spool of the run to resume, if it is still there."""
    if handle.startswith(HANDLE_PREFIX):
        spool_id = handle.removeprefix(HANDLE_PREFIX)
        if not spool_id.isalnum():
            raise TrackingError(f"not the handle of a run: {handle!r}")
        folder = root / spool_id
        return folder if folder.is_dir() else None
    for folder in journal_folders(root):
        with contextlib.suppress(TrackingError):
            if handle in (read_ack(folder).run_id, read_header(folder).get("run_id")):
                return folder
    return None


def reopened(roots: Sequence[Path], handle: str) -> Journal | None:
    """Open the spool of a run to resume, if there is one; wait where `rl8x sync` sends it just now."""
    folder = next((found for root in roots if (found := find_journal(root, handle)) is not None), None)
    if folder is None:
        return None
    try:
        return Journal.open(folder, _BUSY_WAIT_S)
    except TrackingError:
        if (folder / JOURNAL).exists():
            raise
        return None  # it was sent and removed meanwhile


def journal_folders(root: Path) -> list[Path]:
    """List the spools in a folder, the oldest first; the folder may be a spool itself."""
    if os.path.lexists(root / JOURNAL):
        return [root]
    folders = []
    with contextlib.suppress(OSError):
        there = [path for path in root.iterdir() if not (path.name.startswith(".") and path.name.endswith(REMOVED))]
        folders = [path for path in there if os.path.lexists(path / JOURNAL) or unreadable(path)]
    return sorted(folders, key=lambda folder: (last_change(folder), folder.name))


def unreadable(folder: Path) -> bool:
    """Return whether a folder is there that this user cannot read."""
    return folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK)


def last_change(folder: Path) -> float:
    """Return when a spool was last written, in seconds since 1970; 0 where that is not known."""
    with contextlib.suppress(OSError):
        return (folder / JOURNAL).lstat().st_mtime
    return 0.0


def check_run_exists(location: Location, run_id: str) -> None:
    """Raise `TrackingError` if an sqlite store does not have the run; quick, as mlflow is not imported."""
    if location.database is not None and not has_run(location, run_id):  # the writer checks stores of other kinds
        raise TrackingError(
            f"there is no run {run_id!r} in {location.shown} (any more): name the store that has it by tracking_uri or "
            "MLFLOW_TRACKING_URI, or go on untracked, by Trainer.resume(..., tracker=NullTracker())"
        )


def has_run(location: Location, handle: str) -> bool:
    """Return whether an sqlite store has a run, by its ID or its spool's; makes none, and does not import mlflow."""
    if location.database is None:
        return False
    query = "SELECT 1 FROM runs WHERE run_uuid = ? UNION SELECT 1 FROM tags WHERE key = ? AND value = ?"
    values = (handle, SPOOL_TAG, handle.removeprefix(HANDLE_PREFIX))
    uri = f"{location.database.as_uri()}?mode=ro"
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5)) as database:
        return database.execute(query, values).fetchone() is not None
    return False


class Whereabouts:
    """The place of a run: its store, and the spool with the part that has not arrived."""

    def __init__(self, location: Location, journal: Journal, reason: str) -> None:
        self.location = location
        self.ack, self.unsent, self.spool = journal.ack, journal.unsent(), journal.folder
        self.why = f" ({reason})" if reason else ""
        self._given_name = journal.header.get("run_name")
        self._database_beside = journal.header.get("database")

    @property
    def resume_word(self) -> str | None:
        """The argument with which `rl8x resume`, started in this folder, finds the run: its name if that is unique."""
        if self.ack.run_id is None or not is_default(self.location) or self.unsent != Unsent():
            return None
        return self.name_word or self.ack.run_id

    @property
    def name_word(self) -> str | None:
        """The run's name as a command started in this folder takes it, once all of the run has arrived."""
        is_unique = self.ack.run_id is not None and self.ack.name_is_free and is_default(self.location)
        return typed_name(self.ack.run_name, is_unique)

    def lines(self) -> list[str]:
        """Write it in words, a fact a line."""
        unsent, store = self.unsent, self.location.shown
        # What MLflow makes up where none was given is known once it has answered.
        name = f"run {self.ack.run_name or self._given_name or self.ack.run_id or HANDLE_PREFIX + self.spool.name}"
        lines = []
        if unsent.lost:
            lines.append(f"{name} has lost {unsent.lost}: neither the disk nor {store} took them")
        if unsent.num_rows or unsent.num_others:
            missing = counted(unsent.num_rows, "row", "rows") if unsent.num_rows else "the last entry"
            lines.append(f"{missing} of {name} did not reach {store}{self.why}")
            lines.append(f"to send what waits in {shown_path(self.spool)}: {self.sync_command}")
        if unsent.num_rejected:
            entries = counted(unsent.num_rejected, "entry", "entries")
            where = shown_path(self.spool / REJECTED)
            lines.append(
                f"{entries} of {name} could not be logged; to try again what is in {where}: {self.sync_command}"
            )
        if not (unsent.num_rows or unsent.num_others) and self.ack.run_id is not None:
            uri = "" if is_default(self.location) else f" --tracking-uri {shlex.quote(store)}"
            look = "" if self.location.remote else f"; to look at it: rl8x ui{uri}"
            lines.append(f"{name} is in {store}{look}")
        return lines

    @property
    def sync_command(self) -> str:
        """Write the command that sends what waits, started in this folder, without asking anything."""
        folder = shlex.quote(shown_path(self.spool))
        if not (self._is_beside(self.spool) or is_default(self.location)):
            return f"rl8x sync {folder} --to {self._typed_uri}"
        return "rl8x sync" if self.spool.parent == mlruns_dir() / "spool" else f"rl8x sync {folder}"

    def resume_option(self, folder: Path) -> str:
        """Return the option with which `rl8x resume`, started here on a folder of checkpoints, finds the store."""
        is_hidden = self.location.uri != self.location.shown
        if is_default(self.location):
            return ""
        if shell_tracking_uri() is not None:  # that is where the run would go on
            return f"--tracking-uri {self._typed_uri}"
        if self._is_beside(folder):
            return ""
        return f"--tracking-uri {self._typed_uri}" if is_hidden else "--trust"

    @property
    def _typed_uri(self) -> str:
        """The address of the store for a command; one with a password is left to be filled in."""
        return shlex.quote(self.location.uri) if self.location.uri == self.location.shown else "URI"

    def _is_beside(self, folder: Path) -> bool:
        """Return whether the database is beside a folder of the run, where both may have been moved."""
        moved = folder.absolute() / str(self._database_beside)
        is_there = self._database_beside is not None and moved.exists()
        return is_there or beside(folder.absolute(), self.location.database) is not None


def shown_path(path: Path) -> str:
    """Write a path as short as it can be in the working directory."""
    with contextlib.suppress(ValueError, FileNotFoundError):  # it lies elsewhere, or the directory was removed
        return str(path.relative_to(Path.cwd()))
    return str(path)


def check_installed() -> None:
    """Raise `TrackingError` where MLflow is not installed."""
    if importlib.util.find_spec("mlflow") is None:
        raise TrackingError("MLflowTracker needs mlflow, which is not installed: pip install 'mlflow>=3.13,<4'")


# Beginning and resuming.

# The journal of the run that a tracker had before, and its store.
Opened = tuple[Journal, Location]


def check_folders(location: Location, spool_root: Path) -> None:
    """Refuse a local store, or spools beside it, in a folder that cannot be written; touches nothing."""
    for folder in () if location.database is None else (location.database.parent, spool_root):
        try:
            check_writable(folder)
        except OSError as error:
            raise TrackingError(
                f"runs cannot be kept in {folder} ({error.strerror}): change to a folder that can be written, or "
                "choose another store by tracking_uri or MLFLOW_TRACKING_URI"
            ) from None


def new_header(time_ms: int, experiment_name: str | None, run_name: str | None, tracking_uri: str | None) -> Op:
    """Return the header of a spool that is made now, with the experiment that MLflow's variables name by default."""
    name = experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    chosen_store = tracking_uri or user_tracking_uri()
    experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID") if name is None and chosen_store else None
    return {
        "op": "open",
        "version": 1,
        "spool_id": uuid.uuid4().hex,
        "writer": uuid.uuid4().hex,
        "t": time_ms,
        "experiment": name or DEFAULT_EXPERIMENT,
        "experiment_id": experiment_id or None,
        "run_name": run_name,
        "owns": True,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "boot": boot_id(),
    }


def open_new(root: Path, header: Op, tracking_uri: str | None) -> Opened:
    """Make the spool of a run that begins: the user's active run if there is one, else a new one."""
    active = user_run_id(tracking_uri)
    if active is None:
        return _create(root, header, locate(tracking_uri))
    run_id, uri = active
    return _create(root, {**header, "run_id": run_id, "owns": False}, locate(uri))


def open_resumed(
    root: Path,
    header: Op,
    tracking_uri: str | None,
    handle: str,
    *,
    resumed_spool: Path | None,
    before: Opened | None,
    run_key: str | None,
) -> Opened:
    """Open the spool of a run to resume, or make another for it where it was sent and removed."""
    roots = [root] if resumed_spool is None else [resumed_spool.parent, root]
    old = reopened(roots, handle)
    if old is not None:
        return old, _location_of(old, tracking_uri)
    header = dict(header)
    if before is None:
        location = locate(tracking_uri)
    else:
        header["owns"], location = before[0].header["owns"], before[1]
    if handle.startswith(HANDLE_PREFIX):
        header["spool_id"] = handle.removeprefix(HANDLE_PREFIX)
    else:
        check_run_exists(location, handle)
        header["run_id"] = handle
        if run_key is not None and not (root / run_key).exists():
            header["spool_id"] = run_key  # what a killed process leaves is then found by the key too
    return _create(root, header, location)


def _create(root: Path, header: Op, location: Location) -> Opened:
    database = beside(root / str(header["spool_id"]), location.database)
    return Journal.create(root, {**header, "uri": location.shown, "database": database}), location


def _location_of(opened: Journal, tracking_uri: str | None) -> Location:
    """Find the store for a spool that is there: the one that the user chose, else the one that it was made for."""
    chosen = tracking_uri or user_tracking_uri()
    if chosen is not None:
        return locate(chosen)
    try:
        location = recorded_location(opened.folder, str(opened.header["uri"]), opened.header)
        if not is_users_own(location, opened.folder):
            shown = location.shown
            raise TrackingError(f"the run was kept in {shown}: to go on with it there, name it by tracking_uri")
    except TrackingError:
        opened.close()
        raise
    return location


_BARS = "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"
_REQUESTS = 4  # at once, to a server
_TIMEOUT_S = 30  # of a request: nothing waits for it but the reader
_WAITS_S = (0.5, 2.0)  # a busy server drops connections


class RunReader:
    """Reads runs of one store: a local database itself, others through MLflow."""

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
        """Read metrics of several runs, by metric and run: one query of a local database, else a request for each."""
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
        """Log a policy's file as a model of a run by `artifacts.log_model`; return its ID. Imports mlflow."""
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

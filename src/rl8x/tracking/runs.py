"""Find runs: the one that the user has active, the one to resume, and its spool; and say where one is."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import socket
import sqlite3
import sys
import uuid
from collections.abc import Sequence
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
from rl8x.tracking.names import typed_name
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.store import DEFAULT_EXPERIMENT, SPOOL_TAG

HANDLE_PREFIX = "spool-"
_BUSY_WAIT_S = 30.0  # how long a run that is gone on with waits for `rl8x sync` to be through with its spool


def user_run_id(tracking_uri: str | None) -> tuple[str, str] | None:
    """Return the ID and tracking URI of the user's active run, in this thread or by `MLFLOW_RUN_ID`; None without one.

    A run in another store than an explicit `tracking_uri` is not meant.
    """
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
    """The place of a run: its store, and the spool with the part that has not arrived.

    Attributes:
        location: The store.
        ack: What the store has of it.
        unsent: What the store does not have of it.
        spool: The folder that has the rest.
        why: A space and the `reason` in parentheses for which the store does not take it, if that is known.
    """

    def __init__(self, location: Location, journal: Journal, reason: str) -> None:
        self.location = location
        self.ack, self.unsent, self.spool = journal.ack, journal.unsent(), journal.folder
        self.why = f" ({reason})" if reason else ""
        self._given_name = journal.header.get("run_name")
        self._database_beside = journal.header.get("database")

    @property
    def resume_word(self) -> str | None:
        """The argument with which `rl8x resume`, started in this folder, finds the run: its name if that is unique.

        Otherwise its ID; None where neither would do: the store is not the default one, or lacks a part of the run.
        """
        if self.ack.run_id is None or not is_default(self.location) or self.unsent != Unsent():
            return None
        return self.name_word or self.ack.run_id

    @property
    def name_word(self) -> str | None:
        """The run's name as a command started in this folder takes it, once all of the run has arrived.

        None where it is not unique, is not known yet, would be taken for something else, or the store is not the
        default one.
        """
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
        """Return the option with which `rl8x resume`, started here on a folder of checkpoints, finds the store.

        Empty where none is needed.
        """
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
    """Refuse a local store, or spools beside it, in a folder that cannot be written; touches nothing.

    Raises:
        TrackingError: If it is so.
    """
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
    """Make the spool of a run that begins: the user's active run if there is one, else a new one.

    Args:
        root: The folder for spools.
        header: Header of the spool, made by `new_header`.
        tracking_uri: The store that the tracker was given.
    """
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
    """Open the spool of a run to resume, or make another for it where it was sent and removed.

    Args:
        root: The folder for spools.
        header: Header of a spool that has to be made, by `new_header`.
        tracking_uri: The store that the tracker was given.
        handle: The run's ID, or that of its spool.
        resumed_spool: Where the run's spool was last, if not in `root`.
        before: What this tracker has had open of the same run.
        run_key: The key that the tracker finds the run by.

    Raises:
        TrackingError: There is no such run, it is still being written, or it was kept in a store that is not named.
    """
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

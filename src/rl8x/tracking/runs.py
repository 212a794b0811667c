"""Find runs: the one that the user has active, the one to resume, and its spool."""

from __future__ import annotations

import contextlib
import difflib
import os
import sqlite3
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl8x.tracking.location import Location, locate
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.spool_files import OPS, read_ack, read_header
from rl8x.tracking.store import SPOOL_TAG, MLflowStore, StoreDownError, StoreRefusedError

HANDLE_PREFIX = "spool-"


@dataclass(frozen=True)
class FoundRun:
    """A run in a store."""

    run_id: str
    name: str
    experiment: str
    status: str
    tracking_uri: str = field(repr=False)
    artifact_uri: str
    tags: Mapping[str, str] = field(default_factory=dict)


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


def find_spool(root: Path, handle: str) -> Path | None:
    """Return the spool of the run to resume, if it is still there."""
    if handle.startswith(HANDLE_PREFIX):
        spool_id = handle.removeprefix(HANDLE_PREFIX)
        if not spool_id.isalnum():
            raise TrackingError(f"not the handle of a run: {handle!r}")
        folder = root / spool_id
        return folder if folder.is_dir() else None
    for folder in spool_folders(root):
        with contextlib.suppress(TrackingError):
            if handle in (read_ack(folder).run_id, read_header(folder).get("run_id")):
                return folder
    return None


def spool_folders(root: Path) -> list[Path]:
    """List the spools in a folder, the oldest first; the folder may be a spool itself."""
    if os.path.lexists(root / OPS):
        return [root]
    folders = []
    with contextlib.suppress(OSError):
        folders = [path for path in root.iterdir() if os.path.lexists(path / OPS) or unreadable(path)]
    return sorted(folders, key=lambda folder: (last_change(folder), folder.name))


def unreadable(folder: Path) -> bool:
    """Return whether a folder is there that this user cannot read."""
    return folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK)


def last_change(folder: Path) -> float:
    """Return when a spool was last written, in seconds since 1970; 0 where that is not known."""
    with contextlib.suppress(OSError):
        return (folder / OPS).lstat().st_mtime
    return 0.0


def check_run_exists(location: Location, run_id: str) -> None:
    """Check a run to resume where that is quick: in an sqlite store, without importing mlflow.

    Raises:
        TrackingError: The store has no such run.
    """
    if location.database is not None and not has_run(location, run_id):  # the writer checks stores of other kinds
        raise TrackingError(f"there is no run {run_id!r} in {location.shown}; find its ID by `rl8x ui`")


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


def find_run(run: str, tracking_uri: str | None = None, *, experiment_name: str | None = None) -> FoundRun:
    """Find a run by its ID or its name. Imports mlflow.

    Raises:
        TrackingError: There is none, or several have this name, or the store does not answer.
    """
    location = locate(tracking_uri)
    if location.database is not None and not location.database.exists():
        raise TrackingError(f"there is no run {run!r}: {location.database} does not exist")
    try:
        return _find_run(location, run, experiment_name)
    except (StoreDownError, StoreRefusedError) as error:
        raise TrackingError(f"cannot look for run {run!r} in {location.shown}: {error}") from error


def _find_run(location: Location, run: str, experiment_name: str | None) -> FoundRun:
    store = MLflowStore(location)
    experiments = {
        experiment.experiment_id: experiment.name
        for experiment in store.experiments()
        if experiment_name is None or experiment.name == experiment_name
    }
    found = store.search(list(experiments), f"attributes.run_id = '{run}'") if run.isalnum() else []
    if not found and "'" not in run:
        found = store.search(list(experiments), f"attributes.run_name = '{run}'")
    if not found:
        names = sorted({other.info.run_name for other in store.search(list(experiments), "") if other.info.run_name})
        near = difflib.get_close_matches(run, names, n=3)
        hint = f"; did you mean {' or '.join(near)}" if near else "; `rl8x ui` shows what is there"
        raise TrackingError(f"there is no run {run!r} in {location.shown}{hint}")
    if len(found) > 1:
        ids = ", ".join(other.info.run_id for other in found[:5])
        raise TrackingError(f"{len(found)} runs are called {run!r}; name one by its ID: {ids}")
    info = found[0].info
    return FoundRun(
        run_id=info.run_id,
        name=info.run_name or "",
        experiment=experiments[info.experiment_id],
        status=info.status,
        tracking_uri=location.uri,
        artifact_uri=info.artifact_uri,
        tags=dict(found[0].data.tags),
    )

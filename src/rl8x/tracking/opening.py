"""Make the spool of a new run, or find that of a resumed one, and the store that it belongs to."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from rl8x.tracking import journal
from rl8x.tracking.appending import Journal
from rl8x.tracking.journal import Op
from rl8x.tracking.location import (
    Location,
    beside,
    check_writable,
    is_users_own,
    locate,
    recorded_location,
    user_tracking_uri,
)
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.runs import HANDLE_PREFIX, check_run_exists, reopened, user_run_id
from rl8x.tracking.store import DEFAULT_EXPERIMENT

# The spool of the run that a tracker had before, and its store.
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
        "boot": journal.boot_id(),
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

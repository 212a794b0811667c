"""Send what killed or cut-off runs left in their spools: the work of `rl8x sync`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rl8x.tracking.address import is_users_own, recorded_location
from rl8x.tracking.database import has_tables
from rl8x.tracking.location import Location, locate, mlruns_dir, user_tracking_uri
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.runs import spool_folders
from rl8x.tracking.sender import Sender
from rl8x.tracking.spool import OPS, REJECTED, Spool, SpoolInUseError
from rl8x.tracking.store import MLflowStore, RunMissingError, Store, StoreDownError, StoreRefusedError, quiet_thread


@dataclass(frozen=True)
class SpoolReport:
    """What became of one spool.

    Attributes:
        folder: The spool.
        outcome: "sent": all is in the store and the spool is gone (or has only what the store refused); "busy": its
            process is alive, or another one syncs it; "failed": it stays, `message` says why.
        run_id: The run in the store, where there is one.
        num_rows: Rows that were sent now.
        message: Why it failed, or what was noticed; else empty.
    """

    folder: Path
    outcome: Literal["sent", "busy", "failed"]
    run_id: str | None = None
    num_rows: int = 0
    message: str = ""

    def __str__(self) -> str:
        run = f"run {self.run_id}" if self.run_id else "no run yet"
        note = f": {self.message}" if self.message else ""
        return f"{self.outcome} {self.folder.name} ({run}, {self.num_rows} rows){note}"


@dataclass(frozen=True)
class SyncReport:
    """What became of all spools."""

    spools: list[SpoolReport] = field(default_factory=list)

    @property
    def num_sent(self) -> int:
        """Count the spools that are in the store now."""
        return sum(report.outcome == "sent" for report in self.spools)

    @property
    def num_failed(self) -> int:
        """Count the spools that could not be sent."""
        return sum(report.outcome == "failed" for report in self.spools)

    @property
    def num_busy(self) -> int:
        """Count the spools that a live process sends itself."""
        return sum(report.outcome == "busy" for report in self.spools)

    def __str__(self) -> str:
        if not self.spools:
            return "nothing to send"
        head = f"{self.num_sent} sent, {self.num_failed} failed, {self.num_busy} busy"
        return "\n".join([*map(str, self.spools), head])


def sync(
    spool_dir: str | os.PathLike[str] | None = None,
    to: str | None = None,
    *,
    allow: Callable[[Location], bool] = lambda location: False,
    connect: Callable[[Location], Store] = MLflowStore,
) -> SyncReport:
    """Send everything that waits in spools whose process is gone.

    A run whose process ended without a word gets the status KILLED. Sending again what had arrived adds nothing. No
    database is made. A run that the store does not have, of which the spool has all, is sent from its first row.

    Args:
        spool_dir: A spool, or a folder of spools; default `mlruns/spool` in the working directory.
        to: Tracking URI of the store to send to; default the one that each run was meant for: the database in the
            spools' own folder, wherever that is now, else the address that the spool names.
        allow: Whether to send to an address that only a spool names: none that lies beside it, that training would use
            here, or that `MLFLOW_TRACKING_URI` or `mlflow.set_tracking_uri` say.
        connect: Makes the store of a location.

    Raises:
        TrackingError: `spool_dir` was given and does not exist, or `to` is of no known kind.
    """
    root = Path(spool_dir) if spool_dir is not None else mlruns_dir() / "spool"
    if spool_dir is not None and not root.is_dir():
        raise TrackingError(f"there is no folder {root} with spools to send")
    named = None if to is None else locate(to)
    where = lambda spool: named or _own_location(spool, allow)  # noqa: E731
    with quiet_thread():
        return SyncReport([_sync_one(folder, where, connect) for folder in spool_folders(root.absolute())])


def _own_location(spool: Spool, allow: Callable[[Location], bool]) -> Location:
    """Find the store that a run was meant for.

    Raises:
        TrackingError: It is one that the user has not named.
    """
    location = recorded_location(spool.folder, str(spool.header["uri"]), spool.header)
    if user_tracking_uri() is None and is_users_own(location, spool.folder):
        return replace(location, guarded=location.database is not None)
    if not is_users_own(location, spool.folder) and not allow(location):
        raise TrackingError(
            f"it names the store {location.shown}, which you have not: if its rows shall go there, `rl8x sync --yes`, "
            "else `rl8x sync --to URI`"
        )
    return location


def _check_database(location: Location) -> None:
    if location.database is not None and not has_tables(location.database):
        raise TrackingError(
            f"there is no database {location.database}: `rl8x sync --to URI` sends to another store, and `rl8x ui` "
            "makes a new one in its folder"
        )


def _begin_anew_where_gone(sender: Sender) -> None:
    """Send a run from its first row to a store that does not have it, such as a database in place of a deleted one."""
    spool = sender.spool
    if spool.ack.run_id is None:
        return
    try:
        sender.store.check_run(spool.ack.run_id)
    except StoreRefusedError as error:
        raise StoreDownError(str(error)) from error
    except RunMissingError:
        if spool.ack.generation or spool.header.get("run_id"):  # the store alone had what came before
            raise
        spool.acknowledge(
            0, run_id=None, run_name=None, name_is_free=False, attempted=False, resumed=False, finished=False
        )


def _sync_one(folder: Path, where: Callable[[Spool], Location], connect: Callable[[Location], Store]) -> SpoolReport:
    try:
        last_change = int((folder / OPS).lstat().st_mtime * 1000)
        spool = Spool.open(folder)
    except SpoolInUseError as error:
        return SpoolReport(folder, "busy", message=str(error))
    except (TrackingError, OSError) as error:
        if not os.path.lexists(folder / OPS):
            return SpoolReport(folder, "busy", message="another process has just sent it")
        return SpoolReport(folder, "failed", message=str(error))
    sender = None
    finished = False
    try:
        location = where(spool)
        _check_database(location)
        sender = Sender(spool, lambda: connect(location))
        _begin_anew_where_gone(sender)
        sender.send_some()
        while spool.pending:
            sender.send_some()
        if not spool.ack.finished:
            sender.finish("KILLED", last_change)
            spool.acknowledge(finished=True)
        finished = True
    except (StoreDownError, TrackingError) as error:
        num_rows = sender.num_rows if sender is not None else 0
        return SpoolReport(folder, "failed", spool.ack.run_id, num_rows, str(error))
    finally:
        spool.close(remove=finished)
    refused = (folder / REJECTED).exists()
    note = f"what the store refused is in {folder / REJECTED}" if refused else ""
    return SpoolReport(folder, "sent", spool.ack.run_id, sender.num_rows, note)

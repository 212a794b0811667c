"""Send what killed or cut-off runs left in their spools: the work of `rl8x sync`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rl8x.tracking.location import Location, locate, mlruns_dir
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.runs import spool_folders
from rl8x.tracking.secrets import hide
from rl8x.tracking.sender import Sender
from rl8x.tracking.spool import OPS, REJECTED, Spool, SpoolInUseError
from rl8x.tracking.store import MLflowStore, Store, StoreDownError, quiet_thread


@dataclass(frozen=True)
class SpoolReport:
    """What became of one spool.

    Attributes:
        folder: The spool.
        outcome: "sent": all is in the store and the spool is gone (or has only what the store refused); "busy": its
            process is alive, or that of the spool that it is a copy of, or another one syncs it; "failed": it stays,
            `message` says why.
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
        return hide(f"{self.outcome} {self.folder.name} ({run}, {self.num_rows} rows){note}")


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
    tracking_uri: str | None = None,
    *,
    connect: Callable[[Location], Store] = MLflowStore,
) -> SyncReport:
    """Send everything that waits in spools whose process is gone.

    A run whose process ended without a word gets the status KILLED, unless the store has it as ended by now. Sending
    again what had arrived adds nothing.

    Args:
        spool_dir: A spool, or a folder of spools; default `mlruns/spool` in the working directory.
        tracking_uri: Store to send to; default the one that each run was meant for.
        connect: Makes the store of a location.

    Raises:
        TrackingError: `spool_dir` was given and does not exist.
    """
    root = Path(spool_dir) if spool_dir is not None else mlruns_dir() / "spool"
    if spool_dir is not None and not root.is_dir():
        raise TrackingError(f"there is no folder {root} with spools to send")
    with quiet_thread():
        return SyncReport([_sync_one(folder, tracking_uri, connect) for folder in spool_folders(root.absolute())])


def _sync_one(folder: Path, tracking_uri: str | None, connect: Callable[[Location], Store]) -> SpoolReport:
    try:
        spool = Spool.open(folder)
    except SpoolInUseError as error:
        return SpoolReport(folder, "busy", message=str(error))
    except (TrackingError, OSError) as error:
        if not (folder / OPS).exists():
            return SpoolReport(folder, "busy", message="another process has just sent it")
        return SpoolReport(folder, "failed", message=str(error))
    sender = None
    finished = False
    try:
        location = locate(tracking_uri or str(spool.header["uri"]))
        sender = Sender(spool, lambda: connect(location), late=True)
        sender.send_some()
        while spool.pending:
            sender.send_some()
        if not spool.ack.finished:
            sender.finish_killed()
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

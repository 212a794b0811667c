"""Send what killed or cut-off runs left in their spools: the work of `rl8x sync`."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from rl8x.output import counted
from rl8x.tracking.database import has_tables
from rl8x.tracking.journal import (
    ACK,
    FILES,
    JOURNAL,
    REJECTED,
    REMOVED,
    AckFile,
    JournalInUseError,
    SendingJournal,
    check_is_no_copy,
    check_plain,
    conclude,
    is_sent,
    read_header,
    remove,
)
from rl8x.tracking.location import Location, is_users_own, locate, mlruns_dir, recorded_location, user_tracking_uri
from rl8x.tracking.locks import FolderLock
from rl8x.tracking.protocol import TrackingError, in_words
from rl8x.tracking.runs import journal_folders, unreadable
from rl8x.tracking.secrets import hide
from rl8x.tracking.sender import Sender
from rl8x.tracking.store import MLflowStore, quiet_thread

# That of a process that is gone ends as soon as it has sent the rest, at its low priority, or finds the store down.
_SHIPPER_WAIT_S: Final = 120.0

Outcome = Literal["sent", "busy", "failed"]


@dataclass(frozen=True)
class SpoolReport:
    """The outcome of sending one spool.

    Attributes:
        folder: The spool.
        outcome: "sent": all is in the store and the spool is gone; "busy": its process is alive, or that of the spool
            that it is a copy of, or another one syncs it; "failed": it stays, `message` says why.
        run_id: The run in the store, where there is one.
        num_rows: Rows that were sent now.
        message: Why it failed, or what was noticed; else empty.
        num_rejected: Entries that could not be logged, and that the spool still has.
    """

    folder: Path
    outcome: Outcome
    run_id: str | None = None
    num_rows: int = 0
    message: str = ""
    num_rejected: int = 0

    def __str__(self) -> str:
        run = f"run {self.run_id}" if self.run_id else "no run yet"
        note = f": {self.message}" if self.message else ""
        return hide(f"{self.outcome} {self.folder.name} ({run}, {self.num_rows} rows){note}")


@dataclass(frozen=True)
class SyncReport:
    """The outcome of sending all spools.

    Attributes:
        spools: A report for each.
    """

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
    def num_rejected(self) -> int:
        """Count the entries that could not be logged."""
        return sum(report.num_rejected for report in self.spools)

    @property
    def num_busy(self) -> int:
        """Count the spools that a live process sends itself."""
        return sum(report.outcome == "busy" for report in self.spools)

    def __str__(self) -> str:
        if not self.spools:
            return "nothing to send"
        head = f"{self.num_sent} sent, {self.num_failed} failed, {self.num_busy} busy"
        if self.num_rejected:
            head += f", {counted(self.num_rejected, 'entry', 'entries')} set aside"
        return "\n".join([*map(str, self.spools), head])


def sync(
    spool_dir: str | os.PathLike[str] | None = None,
    to: str | None = None,
    *,
    allow: Callable[[Location], bool] = lambda location: False,
    connect: Callable[[Location], MLflowStore] = MLflowStore,
) -> SyncReport:
    """Send everything that waits in spools whose process is gone.

    A run whose process was killed gets the status KILLED, unless the store has it as ended by now. Sending again what
    had arrived adds nothing. No database is made. A run that the store does not have, of which the spool has
    all, is sent from its first row.

    Args:
        spool_dir: A spool, or a folder of spools; default `mlruns/spool` in the working directory.
        to: Tracking URI of the store to send to; default the one that each run was meant for: the database in the
            spools' own folder, wherever that is now, else the address that the spool names.
        allow: Whether to send to a store that only a spool names: one that is neither beside the spool nor the one
            that training would use here.
        connect: Makes the store of a location.

    Raises:
        TrackingError: `spool_dir` was given and does not exist, or `to` is of no known kind.
    """
    root = Path(spool_dir) if spool_dir is not None else mlruns_dir() / "spool"
    if spool_dir is not None and not root.is_dir():
        raise TrackingError(f"there is no folder {root} with spools to send")
    named = None if to is None else locate(to)
    for folder in root.glob(f".*{REMOVED}"):
        shutil.rmtree(folder, ignore_errors=True)  # all of it had arrived
    with quiet_thread():
        reports = [_sync_one(folder, named, allow, connect) for folder in journal_folders(root.absolute())]
        return SyncReport([report for report in reports if report is not None])


def _own_location(journal: SendingJournal, allow: Callable[[Location], bool]) -> Location:
    """Find the store that a run was meant for, unless it is one that the user has not named."""
    if "uri" not in journal.header:
        raise TrackingError(f"the spool {journal.folder} does not say where its run belongs: `rl8x sync --to URI`")
    location = recorded_location(journal.folder, str(journal.header["uri"]), journal.header)
    own = is_users_own(location, journal.folder)
    if own and user_tracking_uri() is None:
        return replace(location, guarded=location.database is not None)
    if not own and not allow(location):
        raise TrackingError(
            f"it names the store {location.shown}, which you have not: if its rows shall go there, `rl8x sync --yes`, "
            "else `rl8x sync --to URI`"
        )
    return location


def _sync_one(
    folder: Path, named: Location | None, allow: Callable[[Location], bool], connect: Callable[[Location], MLflowStore]
) -> SpoolReport | None:
    """Send a journal; None where all of it had arrived."""
    journal, lock = None, FolderLock(folder)
    try:
        if _removed_empty(folder):
            return SpoolReport(folder, "sent", message="nothing was logged")
        journal = _opened(folder, lock)
        if journal is None:
            return None
    except JournalInUseError as error:
        lock.release()
        return SpoolReport(folder, "busy", message=str(error))
    except Exception as error:  # whatever a folder has in it, the others are sent
        lock.release()
        if not os.path.lexists(folder / JOURNAL) and not unreadable(folder):
            return SpoolReport(folder, "busy", message="another process has just sent it")
        return SpoolReport(folder, "failed", message=in_words(error))
    sender = None
    message = ""
    try:
        location = named or _own_location(journal, allow)
        if location.database is not None and not has_tables(location.database):
            raise TrackingError(
                f"there is no database {location.database}: `rl8x sync --to URI` sends to another store, and `rl8x ui` "
                "makes a new one in its folder"
            )
        sender = Sender(journal, connect(location), late=True)
        sender.run.begin_anew_where_gone()
        sender.send_all()
        sender.end_killed()
    except Exception as error:
        message = in_words(error)
    finally:
        journal.close()
        rejected, ack = journal.rejected, journal.ack
        if not message and not rejected:
            conclude(folder)
        lock.release()
    outcome: Outcome = "failed" if message or rejected else "sent"
    if not message and rejected:
        entries = counted(len(rejected), "entry", "entries")
        message = f"{entries} could not be logged, see {folder / REJECTED}: {rejected.reason}"
    elif not message and folder.exists() and not is_sent(folder):
        message = "it cannot be removed"
    return SpoolReport(folder, outcome, ack.run_id, sender.num_rows if sender else 0, message, len(rejected))


def _opened(folder: Path, lock: FolderLock) -> SendingJournal | None:
    """Open a journal of which no process is alive, with both locks; None where all of it has arrived."""
    check_plain(folder)
    if not lock.acquire():
        raise JournalInUseError(f"the journal {folder} is in use by {lock.owner()}; try again when that has ended")
    header = read_header(folder)
    check_is_no_copy(folder, header)
    if is_sent(folder):
        conclude(folder)  # its checkpoints may have gone since
        lock.release()
        return None
    ack_file = AckFile.open(folder / ACK, _SHIPPER_WAIT_S)
    if ack_file is None:
        raise JournalInUseError(f"the journal {folder} is being sent by another process; try again when that has ended")
    if is_sent(folder):
        ack_file.close()
        conclude(folder)
        lock.release()
        return None
    return SendingJournal(folder, ack_file, header)


def _removed_empty(folder: Path) -> bool:
    """Remove a spool to which nothing was written before its process was killed; returns whether it was one."""
    ops, lock = folder / JOURNAL, FolderLock(folder)
    if not stat.S_ISREG(ops.lstat().st_mode) or ops.lstat().st_size or os.path.lexists(folder / FILES):
        return False
    check_plain(folder)
    if not lock.acquire():
        return False
    try:
        if not ops.lstat().st_size:
            remove(folder)
        return not folder.exists()
    finally:
        lock.release()

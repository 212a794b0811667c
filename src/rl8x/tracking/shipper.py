"""Send journals: the shipper, a process that tails the journals of one training process, and `rl8x sync`.

The shipper reads messages about journals from its standard input, one JSON object per line, and runs one thread per
journal. It ends when the input has ended and everything is sent; if the training process is gone, also on an outage.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from rl8x.importing import importing_much
from rl8x.output import counted
from rl8x.processes import OWN
from rl8x.tracking.journal import (
    FILES,
    JOURNAL,
    REJECTED,
    REMOVED,
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
from rl8x.tracking.pages import SystemSampler
from rl8x.tracking.private import empty_tables, has_tables, merge_log
from rl8x.tracking.protocol import StoreDownError, TrackingError, in_words
from rl8x.tracking.runs import journal_folders, unreadable
from rl8x.tracking.secrets import hide
from rl8x.tracking.sender import Sender
from rl8x.tracking.store import MLflowStore, source_tags

FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0
_LOCK_WAIT_S: Final = 2.0
# If training uses all processors, the shipper gets a tenth of one, and training the rest.
_NICENESS: Final = 10

_importing = threading.Lock()  # a second thread would see circular imports half finished


class Shipper:
    """Manages the threads that send journals."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._tails: dict[int, Tail] = {}  # by the number of the open run: one that goes on is a further one
        self._environment: Mapping[str, str] = dict(os.environ)
        self._guard = threading.Lock()

    def handle(self, message: Mapping[str, Any]) -> None:
        """Handle a message of the training process."""
        number = int(message["number"])
        if message["do"] == "send":
            self._adopt(message["env"])
            sys.argv = list(message["argv"])  # MLflow takes the run's source from it
            with self._guard:
                self._tails = {other: tail for other, tail in self._tails.items() if tail.is_alive()}
                self._tails[number] = Tail(message)
                self._tails[number].start()
            return
        with self._guard:
            tail = self._tails.get(number)
        if tail is not None and message["do"] == "lines":
            tail.add_lines(message["lines"])
        elif tail is not None:
            tail.closed = tail.closed or message["do"] == "close"
            tail.wake.set()

    def _adopt(self, wanted: Mapping[str, str]) -> None:
        """Apply the changes that the training process made to its environment since its last message of this kind."""
        for name in self._environment.keys() - wanted.keys() - {*OWN}:
            os.environ.pop(name, None)
        new = {name: value for name, value in wanted.items() if self._environment.get(name) != value}
        os.environ.update({name: value for name, value in new.items() if name not in OWN})
        self._environment = wanted

    def beat(self) -> None:
        """Send a heartbeat each second, and exit when the training process is gone and all is sent."""
        while True:
            orphaned = os.getppid() != self._parent
            # With a message or the end of the input to come, `main` ends the process once it is read.
            if not self.beat_once(orphaned=orphaned) and orphaned and not select.select([0], [], [], 0)[0]:
                os._exit(0)  # at once, without waiting for MLflow's own threads
            time.sleep(0.05 if orphaned else 1.0)

    def beat_once(self, *, orphaned: bool) -> bool:
        """Write a heartbeat to each journal; return whether any journal is still being sent."""
        with self._guard:
            tails = list(self._tails.values())
        for tail in tails:
            tail.beat()
            if orphaned and not tail.orphaned:
                tail.orphaned = tail.closed = True
                tail.wake.set()
        return any(tail.is_alive() for tail in tails)

    def join(self) -> None:
        """Wait until all journals are sent."""
        for tail in list(self._tails.values()):
            tail.join()


class Tail(threading.Thread):
    """Sends one journal as it grows."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        super().__init__(daemon=True)
        self.wake = threading.Event()
        self.orphaned = self.closed = False
        self._guard = threading.Lock()
        self._message, self._folder = message, Path(message["folder"])
        self._lines: deque[tuple[int, bytes]] = deque()
        self._last_number = 0
        self._journal: SendingJournal | None = None
        self._sender: Sender | None = None
        self._store: MLflowStore | None = None
        self._failures = 0
        self._sampler: SystemSampler | None = None
        if message["sample"] is not None:
            with contextlib.suppress(Exception):  # the process may be gone
                self._sampler = SystemSampler(message["pid"], message["sample"])

    def add_lines(self, lines: list[tuple[int, str]]) -> None:
        """Take lines that the disk refused; if they end the run, record that, as only memory has it."""
        with self._guard:
            for number, line in lines:
                if number > self._last_number:
                    self._last_number = number
                    self._lines.append((number, line.encode()))
            if self._journal is not None:
                self._journal.note_ending()
        self.wake.set()

    def beat(self) -> None:
        """Write a heartbeat, and sample the machine if a sample is due."""
        with self._guard:
            if self._journal is None:
                return
            self._journal.acknowledge(beat=self._journal.ack.beat + 1)
            sampler, sender = self._sampler, self._sender
        if sampler is not None and sender is not None and not self.closed:
            try:
                measured = sampler.sample()
            except Exception:  # the system does not report everything, or the process is gone
                self._sampler = None
                return
            if measured:
                sender.samples.append((time.time_ns() // 1_000_000, measured))

    def run(self) -> None:
        """Send until the run has ended and everything is sent, or nobody waits for it any more."""
        wait_s = 0.0
        while wait_s >= 0:
            self.wake.wait(wait_s)
            self.wake.clear()
            wait_s = self._try()
        self._release()
        database = self._location.database
        if database is not None and self._store is not None:
            merge_log(database)  # as this process exits without closing the database

    def _try(self) -> float:
        """Send pending lines; return the seconds to wait before the next try, negative if there is none."""
        journal = self._opened()
        if journal is None:  # another process is still sending it, or it is gone
            is_there = self._folder.exists() or not self.closed
            return 0.2 if is_there and not self.orphaned and not is_sent(self._folder) else -1.0
        if self.closed and journal.is_moved(self._folder):
            return -1.0  # whoever moved it may go on with the run there; no database is made where it was
        try:
            self._send(journal)
        except Exception as error:  # even a bug in rl8x must not stop training
            self._failures += 1
            journal.acknowledge(outage=hide(in_words(error)), tried=True)
            journal.note_ending()
            if self.orphaned:
                return -1.0
            if self.closed:
                self._release()
            longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._failures - 1, 10))
            return longest * random.uniform(0.5, 1.0)
        if self._failures or not journal.ack.tried or journal.ack.outage:
            self._failures = 0
            journal.acknowledge(outage="", tried=True)
        closed = self.closed  # read once, before what is pending: lines may come with the message that closes
        if journal.is_behind or (closed and journal.pending):
            return 0.0
        if closed:
            self._conclude(journal)
            return -1.0
        return max(0.02, float(self._message["interval_s"]))

    def _send(self, journal: SendingJournal) -> None:
        if self._store is None:
            location = self._location
            if self.orphaned and location.database is not None and not has_tables(location.database):
                raise StoreDownError(f"there is no database {location.database}")
            with _importing, contextlib.suppress(Exception):  # an error is raised again at the next import
                import mlflow.entities  # noqa: F401
            self._store = MLflowStore(location, request_timeout_s=self._message["timeout_s"])
        if self._sender is None:
            fresh = self._message["fresh"] and journal.ack.run_id is None and not journal.ack.attempted
            options = {"fresh": fresh, "is_default": self._message["is_default"]}
            self._sender = Sender(journal, self._store, new_tags=_source_tags, **options)
        self._sender.send_some()

    @property
    def _location(self) -> Location:
        uri, database, root, guarded = self._message["location"]
        return Location(uri, database and Path(database), root and Path(root), guarded)

    def _opened(self) -> SendingJournal | None:
        if self._journal is None:
            with self._guard, contextlib.suppress(Exception):  # such as a journal edited in the meantime
                self._journal = SendingJournal.open(self._folder)
                if self._journal is not None:
                    self._journal.lines = self._lines
        return self._journal

    def _release(self) -> None:
        """Release the sender's lock, so that `rl8x sync` may send the journal."""
        with self._guard:
            journal, self._journal, self._sender = self._journal, None, None
        if journal is not None:
            journal.close()

    def _conclude(self, journal: SendingJournal) -> None:
        """End the run of a killed process, and remove or compact a journal that has been sent, as `rl8x sync` does."""
        if not (journal.ack.finished or self.orphaned):  # another process continues the run
            return
        self._release()  # first, as the training process may be waiting for the lock
        if not journal.ack.finished or is_sent(journal.folder):
            store = self._store
            assert store is not None
            _sync_one(journal.folder, lambda _: store, _LOCK_WAIT_S)


def _source_tags() -> Mapping[str, str]:
    with _importing:
        return source_tags()


def _prepare(database: Path | None) -> None:
    """Import MLflow, and create a new database's tables in memory, before the first journal needs them."""
    with _importing, contextlib.suppress(Exception), importing_much():  # raised again when needed
        import mlflow.entities
        import mlflow.store.tracking.sqlalchemy_store
        import mlflow.tracking.context.registry  # noqa: F401

        if database is not None and not has_tables(database):
            empty_tables()


def main(parent: int, database: str | None) -> None:
    """Run the shipper of the process `parent`, which writes messages to the standard input."""
    os.nice(_NICENESS)
    shipper = Shipper(parent)
    threading.Thread(target=shipper.beat, daemon=True).start()
    threading.Thread(target=_prepare, args=(database and Path(database),), daemon=True).start()
    for line in sys.stdin.buffer:
        if line.endswith(b"\n"):  # otherwise the training process was killed while writing
            shipper.handle(json.loads(line))
    shipper.join()
    os._exit(0)


# After its training process is gone, a shipper ends once it has sent the rest, at low priority, or the store is down.
_SHIPPER_WAIT_S: Final = 120.0

Outcome = Literal["sent", "busy", "failed"]


@dataclass(frozen=True)
class JournalReport:
    """The outcome of sending one journal.

    Attributes:
        folder: The journal.
        outcome: "sent": the store has everything, and the journal is removed or compacted; "busy": another process
            writes or sends the journal, or writes the original of this copy; "failed": it stays, see `message`.
        run_id: The run in the store, if there is one.
        num_rows: Number of rows sent by this call.
        message: Why sending failed, or a note; else empty.
        num_rejected: Number of entries that could not be logged and remain in the journal.
    """

    folder: Path
    outcome: Outcome
    run_id: str | None = None
    num_rows: int = 0
    message: str = ""
    num_rejected: int = 0

    def __str__(self) -> str:
        run = f"run {self.run_id}" if self.run_id else "no run yet"
        about = "" if self.outcome == "busy" else f" ({run}, {self.num_rows} rows)"  # only the other process knows
        note = f": {self.message}" if self.message else ""
        return hide(f"{self.outcome} {self.folder.name}{about}{note}")


@dataclass(frozen=True)
class SyncReport:
    """The outcome of sending all journals.

    Attributes:
        journals: A report for each.
    """

    journals: list[JournalReport] = field(default_factory=list)

    @property
    def num_sent(self) -> int:
        """Count the journals that are in the store now."""
        return sum(report.outcome == "sent" for report in self.journals)

    @property
    def num_failed(self) -> int:
        """Count the journals that could not be sent."""
        return sum(report.outcome == "failed" for report in self.journals)

    @property
    def num_rejected(self) -> int:
        """Count the entries that could not be logged."""
        return sum(report.num_rejected for report in self.journals)

    @property
    def num_busy(self) -> int:
        """Count the journals that a live process sends itself."""
        return sum(report.outcome == "busy" for report in self.journals)

    def __str__(self) -> str:
        if not self.journals:
            return "nothing to send"
        head = f"{self.num_sent} sent, {self.num_failed} failed, {self.num_busy} busy"
        if self.num_rejected:
            head += f", {counted(self.num_rejected, 'entry', 'entries')} set aside"
        return "\n".join([*map(str, self.journals), head])


def sync(
    spool_dir: str | os.PathLike[str] | None = None,
    to: str | None = None,
    *,
    allow: Callable[[Location], bool] = lambda location: False,
    connect: Callable[[Location], MLflowStore] = MLflowStore,
) -> SyncReport:
    """Send everything that waits in journals whose process is gone.

    A run whose process was killed gets the status KILLED, unless it has ended in the store by now. Sending arrived
    entries again adds nothing. No database is created. If the store lacks a run of which the journal has all rows, the
    run is sent from its first row.

    Args:
        spool_dir: A journal, or a folder of journals; default `mlruns/spool` in the working directory.
        to: Tracking URI of the store to send to. The default is each run's own store: the database next to the folder
            of journals, even if both were moved, else the address that the journal names.
        allow: Whether to send to a store that only a journal names: one that is neither next to the journals nor the
            one that training would use here.
        connect: Creates the store of a location.

    Raises:
        TrackingError: `spool_dir` was given and does not exist, or `to` is of an unknown kind.
    """
    root = Path(spool_dir) if spool_dir is not None else mlruns_dir() / "spool"
    if spool_dir is not None and not root.is_dir():
        raise TrackingError(f"there is no folder {root} with journals to send")
    named = None if to is None else locate(to)

    def store_of(journal: SendingJournal) -> MLflowStore:
        location = named or _own_location(journal, allow)
        if location.database is not None and not has_tables(location.database):
            raise TrackingError(
                f"there is no database {location.database}: `rl8x sync --to URI` sends to another store, and `rl8x ui` "
                "makes a new one in its folder"
            )
        return connect(location)

    for folder in root.glob(f".*{REMOVED}"):
        shutil.rmtree(folder, ignore_errors=True)  # all of it had arrived
    reports = [_sync_one(folder, store_of) for folder in journal_folders(root.absolute())]
    return SyncReport([report for report in reports if report is not None])


def _own_location(journal: SendingJournal, allow: Callable[[Location], bool]) -> Location:
    """Return the store of a run; raise `TrackingError` if only the journal names it and `allow` refuses it."""
    if "uri" not in journal.header:
        raise TrackingError(f"the journal {journal.folder} does not say where its run belongs: `rl8x sync --to URI`")
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


_StoreOf = Callable[[SendingJournal], MLflowStore]


def _sync_one(folder: Path, store_of: _StoreOf, wait_s: float = 0.0) -> JournalReport | None:
    """Send a journal and report; None if it had arrived already."""
    lock = FolderLock(folder)
    try:
        check_plain(folder)
        if not lock.acquire(wait_s):
            raise JournalInUseError(f"the journal {folder} is in use by {lock.owner()}; try again when that has ended")
        if not (folder / JOURNAL).lstat().st_size and not os.path.lexists(folder / FILES):
            remove(folder)  # its process was killed before it wrote anything
            return JournalReport(folder, "sent", message="nothing was logged")
        check_is_no_copy(folder, read_header(folder))
        journal = None if is_sent(folder) else SendingJournal.open(folder, _SHIPPER_WAIT_S)
        if is_sent(folder):
            if journal is not None:
                journal.close()
            conclude(folder)  # its checkpoints may have been deleted since
            return None
        if journal is None:
            rest = "is being sent by another process; try again when that has ended"
            raise JournalInUseError(f"the journal {folder} {rest}")
        return _sent(journal, store_of)
    except JournalInUseError as error:
        return JournalReport(folder, "busy", message=str(error))
    except Exception as error:  # whatever is in this folder, the others are sent
        if not os.path.lexists(folder / JOURNAL) and not unreadable(folder):
            return JournalReport(folder, "busy", message="another process has just sent it")
        return JournalReport(folder, "failed", message=in_words(error))
    finally:
        lock.release()


def _sent(journal: SendingJournal, store_of: _StoreOf) -> JournalReport:
    """Send a journal whose process is gone, with the entries that were set aside."""
    sender, message = None, ""
    try:
        sender = Sender(journal, store_of(journal), late=True)
        sender.restart_if_gone()
        sender.send_all()
        sender.end_killed()
    except Exception as error:
        message = in_words(error)
    finally:
        journal.close()
    folder, rejected = journal.folder, journal.rejected
    outcome: Outcome = "failed" if message or rejected else "sent"
    if outcome == "sent":
        conclude(folder)
        message = "it cannot be removed" if folder.exists() and not is_sent(folder) else ""
    elif not message:
        entries = counted(len(rejected), "entry", "entries")
        message = f"{entries} could not be logged, see {folder / REJECTED}: {rejected.reason}"
    num_rows = sender.num_rows if sender else 0
    return JournalReport(folder, outcome, journal.ack.run_id, num_rows, message, len(rejected))

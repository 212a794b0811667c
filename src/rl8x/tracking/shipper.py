"""The shipper: the process that tails the journals of one training process and sends them to MLflow.

It is told of journals through its standard input, a line of JSON each (`rl8x.tracking.shipping` writes them). Each
journal has a thread, so that a slow server holds up no other run, and notes in `ack.json` what has arrived, and that
this process is well. It ends when its input has ended and all is sent; where the training process is gone, as soon as
the rest is sent or the store is down.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rl8x.importing import importing_much
from rl8x.processes import OWN
from rl8x.tracking.database import has_tables, merge_log, prepare_tables
from rl8x.tracking.journal import ROW, AckFile, SendingJournal, conclude, decode, is_sent
from rl8x.tracking.location import Location
from rl8x.tracking.locks import FolderLock
from rl8x.tracking.names import typed_name
from rl8x.tracking.protocol import StoreDownError, in_words
from rl8x.tracking.secrets import hide
from rl8x.tracking.sender import Sender
from rl8x.tracking.store import MLflowStore, quiet_thread, source_tags
from rl8x.tracking.system_metrics import SystemSampler

FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 30.0
_LOCK_WAIT_S: Final = 2.0
# Where there are no more processors than training uses, it gets a tenth of one and the training the rest.
_NICENESS: Final = 10

_importing = threading.Lock()  # modules that import each other are seen half made by a second thread


class Shipper:
    """Has the threads that send journals.

    Args:
        parent: Process ID of the training process.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._tails: dict[str, Tail] = {}
        self._environment: Mapping[str, str] = dict(os.environ)
        self._guard = threading.Lock()
        self._has_all = False

    def take(self, told: Mapping[str, Any]) -> None:
        """Do what the training process says."""
        key = str(told["journal"])
        with self._guard:
            tail = self._tails.get(key)
        if told["do"] == "send":
            self._adopt(told["env"])
            sys.argv = list(told["argv"])  # MLflow takes the run's source from it
            if tail is None or not tail.tell(told):
                with self._guard:
                    self._tails = {name: other for name, other in self._tails.items() if other.is_alive()}
                    self._tails[key] = tail = Tail(told)
                tail.start()
        elif tail is not None and told["do"] == "lines":
            tail.add_lines(told["lines"])
        elif tail is not None:
            tail.closed = tail.closed or told["do"] == "close"
            tail.wake.set()

    def _adopt(self, wanted: Mapping[str, str]) -> None:
        """Change the environment as the training process has changed its own since it told of another journal."""
        for name in self._environment.keys() - wanted.keys() - {*OWN}:
            os.environ.pop(name, None)
        new = {name: value for name, value in wanted.items() if self._environment.get(name) != value}
        os.environ.update({name: value for name, value in new.items() if name not in OWN})
        self._environment = wanted

    def beat(self) -> None:
        """Tell each second that this process is well, until all is sent and nothing more can come."""
        while True:
            orphaned = os.getppid() != self._parent
            if not self.beat_once(orphaned=orphaned) and (orphaned or self._has_all):
                os._exit(0)  # at once: MLflow's own threads are not waited for
            time.sleep(0.05 if orphaned else 1.0)

    def beat_once(self, *, orphaned: bool) -> bool:
        """Note for each journal that this process is well; returns whether there is one."""
        with self._guard:
            tails = list(self._tails.values())
        for tail in tails:
            tail.beat()
            if orphaned and not tail.orphaned:
                tail.orphaned = tail.closed = True
                tail.wake.set()
        return any(tail.is_alive() for tail in tails)

    def end(self) -> None:
        """Note that nothing more is told, and wait until all is sent."""
        for tail in list(self._tails.values()):
            tail.join()
        self._has_all = True


class Tail(threading.Thread):
    """Sends one journal as it grows.

    Args:
        told: What the training process says of it.

    Attributes:
        wake: Set where something cannot wait.
        closed: Whether nothing more is appended: its lock is given back while the store is away.
        orphaned: Whether the training process is gone.
    """

    def __init__(self, told: Mapping[str, Any]) -> None:
        super().__init__(daemon=True)
        self.wake = threading.Event()
        self.closed = self.orphaned = False
        self._told = told
        self._news: Mapping[str, Any] | None = None
        self._guard = threading.Lock()
        self._is_over = False
        self._lines: deque[tuple[int, bytes]] = deque()
        self._last_number = 0
        self._journal: SendingJournal | None = None
        self._sender: Sender | None = None
        self._store: MLflowStore | None = None
        self._failures = 0
        self._sampler: SystemSampler | None = None
        self._set_sampler()

    def _set_sampler(self) -> None:
        wanted = self._told["sample"]
        with contextlib.suppress(Exception):  # the process may be gone
            self._sampler = SystemSampler(self._told["pid"], wanted) if wanted is not None else None

    @property
    def _folder(self) -> Path:
        return Path(self._told["folder"])

    def tell(self, told: Mapping[str, Any]) -> bool:
        """Take what is told anew of the journal; returns False where this has come to its end."""
        with self._guard:
            if self._is_over:
                return False
            self._news, self.closed = told, False
        self.wake.set()
        return True

    def add_lines(self, lines: list[tuple[int, str]]) -> None:
        """Take lines that no disk took, and note how the run ended if they say it: memory alone has it."""
        with self._guard:
            for number, line in lines:
                if number > self._last_number:
                    self._last_number = number
                    self._lines.append((number, line.encode()))
        self._note_ending()
        self.wake.set()

    def _note_ending(self) -> None:
        with self._guard:
            lines, journal = list(self._lines), self._journal
            op = decode(lines[-1][1]) if lines else {}
            if op.get("op") == "finish" and journal is not None and journal.ack.outage:
                lost = sum(line.startswith(ROW) for _, line in lines)
                journal.acknowledge(ending={**op, "lost_rows": lost})

    def beat(self) -> None:
        """Note that this process is well, and what the machine does."""
        with self._guard:
            if self._journal is None:
                return
            self._journal.beat()
            sender = self._sender
        if self._sampler is not None and sender is not None and not self.closed:
            try:
                measured = self._sampler.sample()
            except Exception:  # a system that does not say all, or the process is gone
                self._sampler = None
                return
            if measured:
                sender.samples.append((time.time_ns() // 1_000_000, measured))

    def run(self) -> None:
        """Send until the run has ended and all is sent, or nobody waits for it any more."""
        with quiet_thread():
            wait_s = 0.0
            while True:
                self.wake.wait(wait_s)
                self.wake.clear()
                self._take_news()
                wait_s = self._try()
                with self._guard:
                    if wait_s < 0 and self._news is None:
                        self._is_over = True
                        break
                    wait_s = max(0.0, wait_s)
            self._let_go()
            database = self._told["location"][1]
            if database is not None and self._store is not None:
                merge_log(Path(database))  # which the end of this process, being sudden, would not do

    def _take_news(self) -> None:
        with self._guard:
            news, self._news = self._news, None
        if news is None:
            return
        moved = news["ack"] != self._told["ack"]
        self._told = {**news, "fresh": False}
        self._set_sampler()
        if self._journal is not None and moved:
            ack_file = AckFile.open(Path(news["ack"]))
            if ack_file is not None:
                self._journal.reopen(self._folder, ack_file)

    def _try(self) -> float:
        """Send what there is; returns the seconds to wait before the next try, less than 0 where there is none."""
        journal = self._opened()
        if journal is None:  # another process is about to be through with it, or it is gone
            is_there = self._folder.exists() or not self.closed
            return 0.2 if is_there and not self.orphaned and not is_sent(self._folder) else -1.0
        try:
            self._send(journal)
        except Exception as error:  # also a mistake of rl8x: training goes on all the same
            self._failures += 1
            journal.acknowledge(outage=hide(in_words(error)), tried=True)
            self._note_ending()
            if self.orphaned:
                return -1.0
            if self.closed:
                self._let_go()
            longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._failures - 1, 10))
            return longest * random.uniform(0.5, 1.0)
        if self._failures or not journal.ack.tried or journal.ack.outage:
            self._failures = 0
            journal.acknowledge(outage="", tried=True)
        if journal.pending:
            return 0.0
        if self.closed:
            return -1.0 if self._conclude(journal) else 0.0
        return max(0.02, float(self._told["interval_s"]))

    def _send(self, journal: SendingJournal) -> None:
        location = Location(*map(_as_location, self._told["location"], (str, Path, Path, bool)))
        if self._store is None:
            if self.orphaned and location.database is not None and not has_tables(location.database):
                raise StoreDownError(f"there is no database {location.database}")
            with _importing, contextlib.suppress(Exception):  # it is raised again where it is needed
                import mlflow.entities  # noqa: F401
            self._store = MLflowStore(location, request_timeout_s=self._told["timeout_s"])
        if self._sender is None:
            tags = _source_tags if self._told["adds_source"] else dict
            fresh = bool(self._told["fresh"]) and journal.ack.run_id is None and not journal.ack.attempted
            sender = Sender(journal, self._store, new_tags=tags, fresh=fresh)
            sender.name_word = lambda: typed_name(journal.ack.run_name, journal.ack.name_is_free and self._is_default)
            self._sender = sender
        while True:
            self._sender.send_some()
            if not journal.pending or self._news is not None:
                return

    @property
    def _is_default(self) -> bool:
        return bool(self._told["is_default"])

    def _opened(self) -> SendingJournal | None:
        if self._journal is None:
            try:
                ack_file = AckFile.open(Path(self._told["ack"])) if self._told["ack"] is not None else None
                if ack_file is None:
                    return None
                journal = SendingJournal(self._folder, ack_file, self._told["header"])
            except Exception:  # an odd header of a journal that somebody has edited meanwhile
                return None
            with self._guard:
                journal.lines = self._lines
                self._journal = journal
        return self._journal

    def _let_go(self) -> None:
        """Give the lock on sending back, so that `rl8x sync` may send it."""
        with self._guard:
            journal, self._journal, self._sender = self._journal, None, None
        if journal is not None:
            journal.close()

    def _conclude(self, journal: SendingJournal) -> bool:
        """End a run that has ended, or whose process was killed; returns False where there is more to send."""
        assert self._sender is not None
        folder, lock = journal.folder, FolderLock(journal.folder)
        try:
            if journal.ack.finished:
                self._let_go()  # first: the training process may be waiting for it
            elif not self.orphaned:  # another process of it goes on with the run
                return True
            if folder.exists() and not lock.acquire(_LOCK_WAIT_S):
                return True
            if not journal.ack.finished:
                if journal.pending:
                    return False
                self._sender.end_killed()
                self._let_go()
            if is_sent(folder):
                conclude(folder)
        except Exception as error:  # it may have been removed meanwhile
            journal.acknowledge(outage=hide(in_words(error)), tried=True)
        finally:
            lock.release()
        return True


def _as_location(value: Any, kind: type) -> Any:
    return None if value is None else kind(value)


def _source_tags() -> Mapping[str, str]:
    with _importing:
        return source_tags()


def _prepare(database: Path | None) -> None:
    """Import MLflow, and make a new database's tables in memory, before the first journal needs them."""
    with _importing, quiet_thread(), contextlib.suppress(Exception), importing_much():  # raised again where needed
        import mlflow.entities
        import mlflow.tracking.context.registry  # noqa: F401

        if database is not None:
            prepare_tables(database)


def main(parent: int, database: str | None) -> None:
    """Ship for the process `parent`, which tells of journals on the standard input; what MLflow prints goes nowhere.

    Args:
        parent: Its process ID.
        database: What the first run will most likely be kept in; None where that is not known, or a server.
    """
    os.nice(_NICENESS)
    shipper = Shipper(parent)
    threading.Thread(target=shipper.beat, daemon=True).start()
    threading.Thread(target=_prepare, args=(database and Path(database),), daemon=True).start()
    for line in sys.stdin.buffer:
        if line.endswith(b"\n"):  # else it is cut, as the training process was killed
            shipper.take(json.loads(line))
    shipper.end()
    while True:
        time.sleep(60)  # the beating thread ends the process

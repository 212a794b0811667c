"""The side of a journal that appends: every row of a run goes to its file before anything else.

A line that a killed process left half written is cut off. Writing costs one `write()` without fsync: what is in the
journal outlives the process, not a power cut; `sync_to_disk()` is for that, and is called before each checkpoint.
Where the disk refuses a line it waits in memory until the disk takes it, or the process that sends.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rl8x.disk import sync_folder
from rl8x.tracking import artifacts, journal
from rl8x.tracking.journal import (
    ACK,
    JOURNAL,
    LOST_ROWS_TAG,
    REJECTED,
    ROW,
    Ack,
    JournalInUseError,
    Op,
    Unsent,
    check_is_no_copy,
    check_plain,
    conclude,
    count_lines,
    decode,
    empty_ack,
    encode,
    last_time,
    open_regular,
    parse_ack,
    read_header,
    read_lines,
    whole_lines,
    without_secrets,
)
from rl8x.tracking.location import make_mlruns
from rl8x.tracking.locks import FolderLock
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.repeats import JournalRepeats, LoggedRow, read_rows
from rl8x.tracking.secrets import hide_in_data, logger

_log = logger(__name__)

MAX_MEMORY_LINES: Final = 20_000
_RETRY_S: Final = 1.0


class Journal:
    """One run's journal, opened for appending by its one owner; any thread may call it."""

    def __init__(self, folder: Path, header: Op, lock: FolderLock | None) -> None:
        self.folder = folder
        self.header = header
        self.is_new = lock is None
        self.lacks_rows = False
        self._lock = lock
        self._guard = threading.RLock()
        self._fd = self._ack_fd = -1
        self._end = 0
        self._memory: deque[tuple[int, bytes]] = deque()
        self._last_number = 0
        self._num_dropped = 0
        self._failed_at = 0.0
        self._is_lost = False
        self._last_copy = 0
        self._on_disk = False
        self._unsent: Unsent | None = None  # once it is closed
        self._ack: Ack | None = None
        if lock is None:
            self._spill()
        else:
            self._open()
            ack = parse_ack(os.pread(self._ack_fd, len(empty_ack()), 0))[0]
            self._last_number = ack.memory
            is_cut = ack.offset > self._end or whole_lines(self._fd, ack.offset) != ack.offset
            is_cut = is_cut and ack.generation == header.get("generation", 0)
            # What a power cut took of the file may have arrived, and what has arrived may be noted no more.
            may_be_cut = not ack.finished and journal.last_boot(self._fd, self._end) not in ("", journal.boot_id())
            self.lacks_rows = ack.memory > 0 or is_cut or may_be_cut

    @classmethod
    def create(cls, root: Path, header: Op) -> Journal:
        """Make a journal in `root/<spool_id>`; where the disk refuses, it lives in memory until the disk does not."""
        folder = (root / str(header["spool_id"])).absolute()
        return cls(folder, decode(encode({**hide_in_data(header), "folder": str(folder)})), None)

    @classmethod
    def open(cls, folder: Path, timeout_s: float = 0.0) -> Journal:
        """Open a journal that is there: take its lock, cut off a torn last line."""
        check_plain(folder)
        lock = FolderLock(folder)
        try:
            if not lock.acquire(timeout_s):
                owner = lock.owner()
                raise JournalInUseError(f"the journal {folder} is in use by {owner}; try again when that has ended")
            header = read_header(folder)
            check_is_no_copy(folder, header)
            return cls(folder, header, lock)
        except OSError as error:
            lock.release()
            raise TrackingError(f"cannot open the journal {folder}: {error}") from error
        except TrackingError:
            lock.release()
            raise

    def _open(self) -> None:
        """Open the files of a folder whose lock is held, making those that are not there; cut off a torn line."""
        with contextlib.ExitStack() as unless_open:
            ack_fd = open_regular(self.folder / ACK, os.O_RDWR | os.O_CREAT)
            unless_open.callback(os.close, ack_fd)
            if os.fstat(ack_fd).st_size < len(empty_ack()):
                if os.pwrite(ack_fd, empty_ack(), 0) != len(empty_ack()):
                    raise OSError(28, "No space left on device")
                os.fsync(ack_fd)  # else the disk may refuse it later
            fd = open_regular(self.folder / JOURNAL, os.O_RDWR | os.O_CREAT)
            unless_open.callback(os.close, fd)
            end = whole_lines(fd, os.fstat(fd).st_size)
            os.ftruncate(fd, end)
            unless_open.pop_all()
        if self._ack_fd >= 0:
            os.close(self._ack_fd)  # of memory
        self._fd, self._ack_fd, self._end = fd, ack_fd, end

    @property
    def ack_path(self) -> Path | None:
        """Where the process that sends notes what has arrived; in memory while the disk takes no folder."""
        # Also once it is closed: as a journal in memory it would be sent anew, to another run.
        if self._fd >= 0 or self._unsent is not None:
            return self.folder / ACK
        if self._ack_fd < 0 and hasattr(os, "memfd_create"):
            self._ack_fd = os.memfd_create(ACK)
            os.write(self._ack_fd, empty_ack())
        return Path(f"/proc/{os.getpid()}/fd/{self._ack_fd}") if self._ack_fd >= 0 else None

    @property
    def ack(self) -> Ack:
        """What has arrived."""
        if self._ack is not None or self._ack_fd < 0:
            return self._ack or Ack()
        ack = parse_ack(os.pread(self._ack_fd, len(empty_ack()), 0))[0]
        # Of a file that was longer, before it was made compact or a power cut took its end: all of it is sent again.
        if self._fd >= 0 and (ack.offset > self._end or ack.generation != self.header.get("generation", 0)):
            return replace(ack, offset=0, finished=False)
        return ack

    # Appending.

    def append(self, op: Mapping[str, object]) -> None:
        """Add an op. A full or read-only disk never raises: lines wait in memory, bounded, until it takes them."""
        line = encode(without_secrets(op))
        with self._guard:
            if self._memory or self._fd < 0 or self._is_lost:
                self._keep_in_memory(line)
                if time.monotonic() - self._failed_at > _RETRY_S:
                    self._spill()
            elif not self._write(line):
                self._keep_in_memory(line)

    def _keep_in_memory(self, line: bytes) -> None:
        if len(self._memory) >= MAX_MEMORY_LINES:
            if not self._num_dropped:
                _log.warning("tracking: %d rows wait in memory; the oldest are dropped now", MAX_MEMORY_LINES)
            rows = (place for place, (_, waiting) in enumerate(self._memory) if waiting.startswith(ROW))
            del self._memory[next(rows, 0)]
            self._num_dropped += 1
        self._last_number += 1
        self._memory.append((self._last_number, line))

    def _write(self, line: bytes) -> bool:
        """Append a line to the file, whole or not at all; returns whether the disk took it."""
        try:
            if os.pwrite(self._fd, line, self._end) != len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            self._fail(error)
            return False
        self._end += len(line)
        return True

    def _fail(self, error: OSError) -> None:
        if not self._failed_at:
            _log.warning("tracking: cannot write to the spool %s (%s); rows wait in memory", self.folder, error)
        self._failed_at = time.monotonic()

    def look(self) -> None:
        """Bring to the disk what it takes, and drop what has arrived past it; tell where the file was deleted."""
        with self._guard:
            if self._memory:
                arrived = self.ack.memory
                while self._memory and self._memory[0][0] <= arrived:
                    self._memory.popleft()
                self.lacks_rows = self.lacks_rows or arrived > 0
                self._spill()
            # One that was moved goes on where it is, through the open files.
            if self._fd >= 0 and not self._is_lost and os.fstat(self._fd).st_nlink == 0:
                self._is_lost = True
                rest = "rows wait in memory, and what has not arrived is written anew at the end"
                _log.warning("tracking: the spool %s was deleted; %s", self.folder, rest)

    def _spill(self) -> None:
        """Move the lines that are in memory to the disk, if it takes them again."""
        if self._unsent is not None or self._is_lost:
            return
        try:
            if self._fd < 0:
                self._make()
        except OSError as error:
            self._fail(error)
            return
        while self._memory and self._write(self._memory[0][1]):
            self._memory.popleft()
        if not self._memory and self._failed_at:
            self._failed_at = 0.0
            _log.info("tracking: the spool %s can be written again", self.folder)

    def _make(self) -> None:
        """Make the folder and its files, with the header."""
        if self.folder.parents[1].name == "mlruns":
            make_mlruns(self.folder.parents[1])
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self._lock is None:
            lock = FolderLock(self.folder)
            if not lock.acquire():
                raise OSError(11, f"the spool is in use by {lock.owner()}")
            self._lock = lock
        self._open()
        if not self._end and not self._write(encode(self.header)):
            os.close(self._fd)
            self._fd = -1
            raise OSError(28, "No space left on device")

    def waiting(self, after: int) -> list[tuple[int, bytes]]:
        """Return the lines that wait in memory, with their numbers, beyond a number."""
        with self._guard:
            return [line for line in self._memory if line[0] > after]

    @property
    def is_half_full(self) -> bool:
        """Whether so much waits in memory that it should go past the disk."""
        return len(self._memory) > MAX_MEMORY_LINES // 2

    @property
    def num_waiting(self) -> int:
        """How many lines wait in memory."""
        return len(self._memory)

    def end(self, op: Op) -> None:
        """Add the last op, and bring what is in memory to the disk."""
        with self._guard:
            if self._num_dropped:
                self.append({"op": "tags", "tags": {LOST_ROWS_TAG: str(self._num_dropped)}})
            self.append(op)
        self.look()
        self.sync_to_disk()

    def keep_file(self, source: Path, besides: Collection[Path] = ()) -> str:
        """Copy a file or folder into the journal, as `artifacts.keep` does; returns its path there."""
        with self._guard:
            self._last_copy = number = max(self._last_copy, artifacts.highest_number(self.folder)) + 1
        return artifacts.keep(self.folder, number, source, besides)

    def repeats(self, since: int) -> JournalRepeats:
        """Return what knows the rows that the journal has now, for a run that is resumed."""

        def rows() -> Iterable[LoggedRow]:
            # Opened anew: a tracker that goes on with its own run has closed this one.
            with contextlib.suppress(OSError), os.fdopen(open_regular(self.folder / JOURNAL), "rb") as file:
                kept = (decode(line) for line in file if line.startswith((ROW, b'{"op":"left"')))
                return [row for row in read_rows(kept) if row[1] < since]
            return []

        return JournalRepeats(since, rows)

    def last_time(self) -> int:
        """Return when something was last appended, in milliseconds since 1970."""
        return last_time(self._fd, self._end, self.header)

    # What has arrived.

    @property
    def has_arrived(self) -> bool:
        """Whether the store has all of it."""
        with self._guard:
            if self._unsent is not None:
                return self._unsent == Unsent(num_rejected=self._unsent.num_rejected)
            ack = self.ack
            waits = bool(self._memory) and self._memory[-1][0] > ack.memory
            return not waits and (self._fd < 0 or ack.offset >= self._end) and (self._fd >= 0 or ack.memory > 0)

    def mark(self) -> Callable[[], bool]:
        """Return a function that returns whether all that was appended until now has arrived."""
        with self._guard:
            end, number = self._end, self._last_number if self._memory or self._fd < 0 else 0

        def arrived() -> bool:
            ack = self.ack
            return self.has_arrived or (ack.offset >= end and ack.memory >= number)

        return arrived

    def unsent(self) -> Unsent:
        """Count what has not arrived; reads the rest of the file. Of a closed journal, what was left then."""
        with self._guard:
            if self._unsent is not None:
                return self._unsent
            ack = self.ack
            num_rows, num_others = (0, 0) if self._fd < 0 else count_lines(self._fd, ack.offset, self._end)
            waiting = [line for number, line in self._memory if number > ack.memory]
            num_waiting = sum(line.startswith(ROW) for line in waiting)
            ending = 0 if ack.ending is None else 1
            others = len(waiting) - num_waiting - ending + ack.lost[1]
            lost = num_waiting + self._num_dropped + ack.lost[0]
            return Unsent(num_rows, num_others + ending, lost, max(0, others), ack.rejected)

    @property
    def rejected_path(self) -> Path:
        """The file of what was set aside."""
        return self.folder / REJECTED

    def sync_to_disk(self) -> None:
        """Make what was appended survive a power cut; may be called by any thread, and appending does not wait."""
        with self._guard:
            if self._memory:
                self._spill()
            if self._fd < 0:
                return
            fd = os.dup(self._fd)
        with contextlib.suppress(OSError):
            os.fsync(fd)
        os.close(fd)
        if not self._on_disk:
            for folder in (self.folder, *self.folder.parents[:2]):
                sync_folder(folder)
            self._on_disk = True

    def close(self) -> None:
        """Close the files and give the lock back; one that was sent is removed, or kept for a resume."""
        with self._guard:
            if self._unsent is not None:
                return
            self.look()
            if self._is_lost and not self.has_arrived:
                self._write_anew()
            self._unsent, self._ack = self.unsent(), self.ack
            fds = [fd for fd in (self._fd, self._ack_fd) if fd >= 0]
            self._fd = self._ack_fd = -1
            for fd in fds:
                os.close(fd)
        if self._lock is not None:
            if self._ack.finished and self._unsent == Unsent():
                conclude(self.folder)
            self._lock.release()

    def _write_anew(self) -> None:
        """Write a journal that was deleted anew, as its file, which is still open, has it."""
        lost, end, self._fd, self._end = self._fd, self._end, -1, 0
        arrived = os.pread(self._ack_fd, len(empty_ack()), 0)
        try:
            if self._lock is not None:
                self._lock.release()
                self._lock = None
            self._make()
            os.pwrite(self._ack_fd, arrived, 0)
            for line, _ in list(read_lines(lost, 0, end))[1:]:
                if not self._write(line):
                    return
            self._is_lost = False
            self._spill()
        except OSError as error:
            self._fail(error)
        finally:
            os.close(lost)

    def release_in_child(self) -> None:
        """Forget the journal in a forked child: it is the parent's."""
        self._guard, self._unsent, self._ack = threading.RLock(), Unsent(), self.ack
        for fd in (self._fd, self._ack_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._ack_fd = -1


def rejected_ops(path: Path) -> list[dict[str, Any]]:
    """Read the entries that were set aside, each with its reason."""
    with contextlib.suppress(OSError), os.fdopen(open_regular(path), "rb") as file:
        return [decode(line) for line in file.read().splitlines()]
    return []

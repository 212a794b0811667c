"""Append to a journal. A line costs one `write()`, which survives the end of the process, but not a power cut."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from rl8x.disk import sync_folder
from rl8x.tracking.journal import (
    ACK,
    EMPTY_ACK,
    JOURNAL,
    READ_BYTES,
    ROW,
    Ack,
    JournalInUseError,
    Op,
    Unsent,
    boot_id,
    check_is_no_copy,
    check_plain,
    conclude,
    decode,
    encode,
    last_time,
    open_regular,
    parse_ack,
    read_header,
    read_lines,
    remove,
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


class Journal:
    """One run's journal, opened for appending by its only owner; any thread may call it."""

    def __init__(self, folder: Path, lock: FolderLock, header: Op | None = None) -> None:
        """Open the files of a folder that the caller has locked, or create them with a header; cut off a torn line."""
        self.folder = folder
        self.is_new = header is not None
        self._lock = lock
        self._guard = threading.RLock()
        self._memory: deque[tuple[int, bytes]] = deque()
        self._num_dropped = 0
        self._is_full = False
        self._is_deleted = False
        self._on_disk = False
        self._unsent: Unsent | None = None  # set when the journal is closed
        with contextlib.ExitStack() as unless_open:
            self._ack_fd = open_regular(folder / ACK, os.O_RDWR | os.O_CREAT)
            unless_open.callback(os.close, self._ack_fd)
            if os.fstat(self._ack_fd).st_size < len(EMPTY_ACK):
                _write_all(self._ack_fd, EMPTY_ACK, 0)
                os.fsync(self._ack_fd)  # otherwise the disk may refuse it later
            self._fd = open_regular(folder / JOURNAL, os.O_RDWR | (os.O_CREAT if self.is_new else 0))
            unless_open.callback(os.close, self._fd)
            self._end = whole_lines(self._fd, os.fstat(self._fd).st_size)
            os.ftruncate(self._fd, self._end)
            if header is not None and not self._end:
                _write_all(self._fd, line := encode(header), 0)
                self._end = len(line)
            unless_open.pop_all()
        self.header = read_header(folder)
        self._ack = ack = self._read_ack()
        self._last_number = ack.memory
        is_cut = ack.offset > self._end or whole_lines(self._fd, ack.offset) != ack.offset
        is_cut = is_cut and ack.generation == self.header.get("generation", 0)
        # A power cut may have removed lines that the store has, and the record of what has arrived.
        may_be_cut = not self.is_new and not ack.finished and ack.boot != boot_id()
        self.lacks_rows = ack.memory > 0 or is_cut or may_be_cut

    @classmethod
    def create(cls, root: Path, header: Op) -> Journal:
        """Create a journal in `root/<journal_id>`; if that disk refuses, in `/dev/shm` or the temporary folder."""
        first: OSError | None = None
        for place in (lambda: root, lambda: tempfile.mkdtemp(dir="/dev/shm"), tempfile.mkdtemp):
            try:
                journal = cls._create((Path(place()) / str(header["journal_id"])).absolute(), header)
            except OSError as error:
                first = first or error
                continue
            if first is not None:
                _log.warning("tracking: cannot write to the journal %s (%s); it is %s", root, first, journal.folder)
            return journal
        raise TrackingError(f"no disk takes the journal of a run: {root} ({first})")

    @classmethod
    def _create(cls, folder: Path, header: Op) -> Journal:
        was_there = folder.is_dir()
        _make_folder(folder)
        try:
            return cls._locked(folder, 0.0, decode(encode({**hide_in_data(header), "folder": str(folder)})))
        except OSError:
            if not was_there:
                remove(folder)
            raise

    @classmethod
    def open(cls, folder: Path, timeout_s: float = 0.0) -> Journal:
        """Open an existing journal: take its lock and cut off a torn last line."""
        check_plain(folder)
        try:
            return cls._locked(folder, timeout_s)
        except OSError as error:
            raise TrackingError(f"cannot open the journal {folder}: {error}") from error

    @classmethod
    def _locked(cls, folder: Path, timeout_s: float, header: Op | None = None) -> Journal:
        lock = FolderLock(folder)
        if not lock.acquire(timeout_s):
            owner = lock.owner()
            raise JournalInUseError(f"the journal {folder} is in use by {owner}; try again when that has ended")
        try:
            if header is None:
                check_is_no_copy(folder, read_header(folder))
            return cls(folder, lock, header)
        except (OSError, TrackingError):
            lock.release()
            raise

    def _read_ack(self) -> Ack:
        return parse_ack(os.pread(self._ack_fd, len(EMPTY_ACK), 0))[0]

    @property
    def ack(self) -> Ack:
        """The part of the journal that has arrived in the store."""
        with self._guard:  # another thread may close the file
            if self._unsent is None:
                self._ack = self._read_ack()
                # The offset counts in an older, longer file, before compacting or a power cut: all is sent again.
                if self._ack.offset > self._end or self._ack.generation != self.header.get("generation", 0):
                    self._ack = replace(self._ack, offset=0, finished=False)
            return self._ack

    def append(self, op: Mapping[str, object]) -> None:
        """Append an op. A full or read-only disk never raises: lines wait in memory, up to a limit, until it works."""
        line = encode(without_secrets(op))
        with self._guard:
            if self._memory or not self._write(line):
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
        """Append a line to the file atomically; return whether the disk took it."""
        try:
            _write_all(self._fd, line, self._end)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            if not self._is_full:
                _log.warning("tracking: cannot write to the journal %s (%s); rows wait in memory", self.folder, error)
            self._is_full = True
            return False
        self._end += len(line)
        return True

    def drain(self) -> None:
        """Write waiting lines to the disk, drop those that arrived from memory, and warn if the file was deleted."""
        with self._guard:
            if self._unsent is not None:
                return
            if self._memory:
                arrived = self.ack.memory
                while self._memory and self._memory[0][0] <= arrived:
                    self._memory.popleft()
                self.lacks_rows = self.lacks_rows or arrived > 0
                self._spill()
            # The reader keeps using its open files, as this object does, even if the folder was moved.
            if not self._is_deleted and os.fstat(self._fd).st_nlink == 0:
                self._is_deleted = True
                rest = "what has not arrived at the end is written there once more"
                _log.warning("tracking: the journal %s was deleted; %s", self.folder, rest)

    def _spill(self) -> None:
        """Move lines from memory to the disk, as far as it takes them again."""
        while self._memory and self._write(self._memory[0][1]):
            self._memory.popleft()
        if not self._memory and self._is_full:
            self._is_full = False
            _log.info("tracking: the journal %s can be written again", self.folder)

    def waiting(self, after: int) -> list[tuple[int, bytes]]:
        """Return the lines that wait in memory and have a number greater than `after`, as (number, line) pairs."""
        with self._guard:
            return [line for line in self._memory if line[0] > after]

    @property
    def num_waiting(self) -> int:
        """The number of lines that wait in memory."""
        return len(self._memory)

    def end(self, op: Op) -> None:
        """Append the last op and move the lines in memory to the disk."""
        with self._guard:
            self.append({**op, "lost_rows": self._num_dropped})
        self.drain()
        self.sync_to_disk()

    def repeats(self, since: int) -> JournalRepeats:
        """Return a `JournalRepeats` of the rows that the journal has now, for a resumed run."""

        def rows() -> Iterable[LoggedRow]:
            # Opened again, since a tracker that continues its own run has closed this file.
            with contextlib.suppress(OSError), os.fdopen(open_regular(self.folder / JOURNAL), "rb") as file:
                kept = (decode(line) for line in file if line.startswith((ROW, b'{"op":"left"')))
                return [row for row in read_rows(kept) if row[1] < since]
            return []

        return JournalRepeats(since, rows)

    def last_time(self) -> int:
        """Return the time of the last append, in milliseconds since 1970."""
        return last_time(self._fd, self._end, self.header)

    @property
    def has_arrived(self) -> bool:
        """Whether the store has the whole journal."""
        with self._guard:
            if self._unsent is not None:
                return self._unsent == Unsent(num_rejected=self._unsent.num_rejected)
            ack = self.ack
            waits = bool(self._memory) and self._memory[-1][0] > ack.memory
            return not waits and ack.offset >= self._end

    def mark(self) -> Callable[[], bool]:
        """Return a function that checks whether everything appended before this call has arrived."""
        with self._guard:
            end, number = self._end, self._last_number if self._memory else 0

        def arrived() -> bool:
            ack = self.ack
            return self.has_arrived or (ack.offset >= end and ack.memory >= number)

        return arrived

    def unsent(self) -> Unsent:
        """Count the entries that have not arrived, by reading the rest of the file; if closed, the count at closing."""
        with self._guard:
            if self._unsent is not None:
                return self._unsent
            ack = self.ack
            num_rows, num_others = _count(line for line, _ in read_lines(self._fd, ack.offset, self._end))
            num_waiting, others = _count(line for number, line in self._memory if number > ack.memory)
            ending = 0 if ack.ending is None else 1
            lost = num_waiting + self._num_dropped + ack.rejected_lost[0]
            return Unsent(
                num_rows, num_others + ending, lost, max(0, others - ending + ack.rejected_lost[1]), ack.rejected
            )

    def sync_to_disk(self) -> None:
        """Make appended lines survive a power cut; any thread may call this, and appending does not wait for it."""
        with self._guard:
            if self._memory:
                self._spill()
            if self._unsent is not None:
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
        """Close the files and release the lock; a journal that has been sent is removed, or compacted for a resume."""
        with self._guard:
            if self._unsent is not None:
                return
            self.drain()
            if self._is_deleted and not self.has_arrived:
                self._write_once_more()
            self._unsent = self.unsent()
            os.close(self._fd)
            os.close(self._ack_fd)
        if self._ack.finished and self._unsent == Unsent():
            conclude(self.folder)
        self._lock.release()

    def _write_once_more(self) -> None:
        """Write a deleted journal to its old folder again, from its files, which are still open."""
        with contextlib.suppress(OSError):
            _make_folder(self.folder)
            for name, source, size in ((ACK, self._ack_fd, len(EMPTY_ACK)), (JOURNAL, self._fd, self._end)):
                with os.fdopen(open_regular(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                    for start in range(0, size, READ_BYTES):
                        file.write(os.pread(source, min(READ_BYTES, size - start), start))

    def close_in_child(self) -> None:
        """Close the files in a forked child, as the journal belongs to the parent."""
        self._guard = threading.RLock()
        if self._unsent is None:
            self._unsent = Unsent()
            os.close(self._fd)
            os.close(self._ack_fd)


def _make_folder(folder: Path) -> None:
    if folder.parents[1].name == "mlruns":
        make_mlruns(folder.parents[1])
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _count(lines: Iterable[bytes]) -> tuple[int, int]:
    """Return the number of rows and the number of other lines."""
    counts = Counter(line.startswith(ROW) for line in lines)
    return counts[True], counts[False]


def _write_all(fd: int, data: bytes, offset: int) -> None:
    """Write data, or raise `OSError` if the disk takes only a part of it."""
    if os.pwrite(fd, data, offset) != len(data):
        raise OSError(28, "No space left on device")

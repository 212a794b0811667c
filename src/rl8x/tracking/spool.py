"""The append-only file that every row of a run goes to before anything else, with the offset up to which it was sent.

A line that a killed process left half written is cut off. Writing costs one `write()` without fsync: what is in the
spool outlives the process, not a power cut; `sync_to_disk()` is for that, and is called before each checkpoint. A cut
may leave an acknowledgement older than the spool: what it misses is sent again. After one that is newer, of lines that
are gone, all are.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rl8x.disk import replace_synced, sync_folder
from rl8x.tracking import kept_files, spool_files
from rl8x.tracking.location import make_mlruns
from rl8x.tracking.locks import FolderLock
from rl8x.tracking.ops_file import OpsFile, WaitingLines
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.rejected import Rejected
from rl8x.tracking.secrets import hide_in_data, logger
from rl8x.tracking.spool_files import ACK, END, Op, SpoolInUseError, Unsent, decode, encode

_log = logger(__name__)

COMPACT_BYTES = 16 << 20
LOST_ROWS_TAG = "rl8x.lost_rows"
_RETRY_S = 1.0


class Spool:
    """One run's spool, opened for appending, reading and acknowledging by its one owner.

    `append` may be called by any thread; the rest belongs to the thread that sends. Without the lock of a spool that is
    there it makes one, in memory for as long as the disk refuses.
    """

    def __init__(self, folder: Path, header: Op, lock: FolderLock | None) -> None:
        self.folder = folder
        self.header = header
        self.ack = spool_files.read_ack(folder)
        self.rejected = Rejected(folder)
        self._lock = lock
        self._guard = threading.Lock()
        self._file: OpsFile | None = None
        self._memory = WaitingLines()
        self._left: Unsent | None = None  # once it is closed
        self._lost_before = 0
        self._ending: Op | None = None
        self._end_is_noted = False
        self._failed_at = 0.0
        self._last_number = 0  # of the copies of artifacts
        self._on_disk = False
        if lock is None:
            with self._guard:
                self._spill()
        else:
            self._file = self._check_ack(OpsFile(folder))
            self._take_over_end()

    @classmethod
    def create(cls, root: Path, header: Op) -> Spool:
        """Make a new spool in `root/<spool_id>`; where the disk refuses, it lives in memory until the disk does not."""
        folder = (root / str(header["spool_id"])).absolute()
        return cls(folder, decode(encode({**hide_in_data(header), "folder": str(folder)})), None)

    @classmethod
    def open(cls, folder: Path, timeout_s: float = 0.0) -> Spool:
        """Open a spool that is there: take its lock, cut off a torn last line.

        Raises `SpoolInUseError` where another process has it, or the one that it is a copy of; else `TrackingError`.
        """
        spool_files.check_plain(folder)
        lock = FolderLock(folder)
        try:
            if not lock.acquire(timeout_s):
                raise SpoolInUseError(f"the spool {folder} is in use by {lock.owner()}; try again when that has ended")
            header = spool_files.read_header(folder)
            spool_files.check_is_no_copy(folder, header)
            return cls(folder, header, lock)
        except OSError as error:
            lock.release()
            raise TrackingError(f"cannot open the spool {folder}: {error}") from error
        except TrackingError:
            lock.release()
            raise

    def _check_ack(self, file: OpsFile) -> OpsFile:
        """Bring an acknowledgement to what is there, which a power cut may have left older or newer."""
        generation = self.header.get("generation", 0)
        # Another generation: cut or killed between the two renames of compact(). Sending all again adds nothing.
        if self.ack.generation != generation or not file.has_line_end(self.ack.offset):
            self.ack = replace(self.ack, generation=generation, offset=0)
            # On the disk before anything is appended: the old one would cover the new lines too.
            self._write_ack(synced=True)
        return file

    def _take_over_end(self) -> None:
        """Add the end that the previous process noted in `end.json`, the disk being full: its status and lost rows."""
        ending = spool_files.read_end(self.folder)
        if ending is None:
            return
        self._lost_before = ending.pop("lost_rows")
        self._ending, self._end_is_noted = ending, True
        self._append_end()
        if not self._end_is_noted:  # it is among the ops now
            self._ending, self._lost_before = None, 0

    # Appending: any thread.

    def append(self, op: Mapping[str, object]) -> None:
        """Add an op. A full or read-only disk never raises: lines wait in memory, bounded, until it takes them."""
        line = encode(spool_files.without_secrets(op))
        with self._guard:
            if self._memory or self._file is None:
                self._memory.add(line)
                if time.monotonic() - self._failed_at > _RETRY_S:
                    self._spill()
            elif not self._write(line):
                self._memory.add(line)

    def end(self, op: Op) -> None:
        """Add the last op, and bring what is in memory to the disk.

        Where the disk is full, the op and the number of rows that are lost with this process go to where room was
        reserved for them, so that a later `rl8x sync` knows how the run ended.
        """
        self._ending = op
        self._append_end()
        self.sync_to_disk()

    def _append_end(self) -> None:
        lost = self._num_rows_lost + self._lost_before
        if lost:
            self.append({"op": "tags", "tags": {LOST_ROWS_TAG: str(lost)}})
        if self._ending is not None:
            self.append(self._ending)
        self.note_end()

    def note_end(self) -> None:
        """Write down how the run ended, and how many rows are lost if this process ends now."""
        with self._guard:
            if self._memory:
                self._spill()
            if self._file is None or self._ending is None or not (self._memory or self._end_is_noted):
                return
            lost = self._num_rows_lost + self._lost_before + self._memory.num_rows
            with contextlib.suppress(OSError):
                spool_files.write_end(self.folder, {**self._ending, "lost_rows": lost} if self._memory else None)
                self._end_is_noted = bool(self._memory)

    def _write(self, line: bytes) -> int:
        """Write a line to the file; returns the offset after it, or 0 where the disk does not take it."""
        assert self._file is not None
        try:
            self._file.write(line)
        except OSError as error:
            self._fail(error)
            return 0
        return self._file.end

    def _fail(self, error: OSError) -> None:
        if not self._failed_at:
            _log.warning("tracking: cannot write to the spool %s (%s); rows wait in memory", self.folder, error)
        self._failed_at = time.monotonic()

    def _spill(self) -> None:
        """Move the lines that are in memory to the disk, if it takes them again."""
        if self._left is not None:
            return
        try:
            self._file = self._file or self._make_file()
        except OSError as error:
            self._fail(error)
            return
        self._memory.move(self._write)
        if not self._memory and self._failed_at:
            self._failed_at = 0.0
            _log.info("tracking: the spool %s can be written again", self.folder)

    def _make_file(self, lost: OpsFile | None = None) -> OpsFile:
        """Make the spool's folder and files, with its header or all that is in a file which was lost."""
        if self.folder.parents[1].name == "mlruns":
            make_mlruns(self.folder.parents[1])
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self._lock is None:
            lock = FolderLock(self.folder)
            if not lock.acquire():
                raise OSError(11, f"the spool is in use by {lock.owner()}")
            self._lock = lock
        file = OpsFile(self.folder)
        try:
            if not (self.folder / END).exists():  # room for how the run ends, where the disk is full by then
                spool_files.write_end(self.folder, None)
            if lost is not None:
                file.copy_from(lost)
            elif not file.end:
                file.write(encode(self.header))
        except OSError:
            file.close()
            raise
        return file

    def look_after(self) -> None:
        """Write the file anew where somebody deleted it, and follow it where somebody moved it.

        The descriptor that is open still has all of it.
        """
        self.follow()
        with self._guard:
            if self._file is None or not self._file.is_deleted:
                return
            try:
                if self._lock is not None:  # it may have gone with the folder
                    self._lock.release()
                    self._lock = None
                file = self._make_file(self._file)
            except OSError as error:
                self._fail(error)
                return
            self._file.close()
            self._file = file
        self._write_ack()
        _log.warning("tracking: the spool %s was deleted, and has been written anew", self.folder)

    def follow(self) -> None:
        """Follow the file where somebody moved it; may be called by any thread."""
        with self._guard:
            if self._lock is not None:
                self._lock.follow()
            moved_to = None if self._file is None else self._file.moved_to
            if moved_to is not None and self._file is not None:
                self._file.path = moved_to
                self.folder = moved_to.parent
                self.rejected.path = self.folder / spool_files.REJECTED
                _log.warning("tracking: the spool was moved to %s; rows go on to wait there", self.folder)

    def keep_file(self, source: Path, besides: Collection[Path] = ()) -> str:
        """Copy a file or folder into the spool, as `kept_files.keep` does; returns its path there."""
        with self._guard:
            self._last_number = number = max(self._last_number, kept_files.highest_number(self.folder)) + 1
        return kept_files.keep(self.folder, number, source, besides)

    # Reading and acknowledging: the sending thread.

    @property
    def pending(self) -> bool:
        """Whether anything has not been acknowledged."""
        with self._guard:
            if self._left is not None:
                return bool(self._memory or self._left.num_rows or self._left.num_others)
            return bool(self._memory or (self._file is not None and self.ack.offset < self._file.end))

    def unsent(self) -> Unsent:
        """Count what has not been acknowledged; reads the rest of the file. Of a closed spool, what was left then."""
        with self._guard:
            return self._count_unsent() if self._left is None else self._left

    def _count_unsent(self) -> Unsent:
        num_rows, num_others = (0, 0) if self._file is None else self._file.count(self.ack.offset)
        waiting = self._memory.num_rows
        others = len(self._memory) - waiting - self._end_is_noted + self.rejected.num_others_lost
        lost = waiting + self._num_rows_lost
        return Unsent(num_rows, num_others + self._end_is_noted, lost, others, len(self.rejected))

    @property
    def _num_rows_lost(self) -> int:
        return self.rejected.num_rows_lost + self._memory.num_dropped

    def last_time(self) -> int:
        """Return when its process last wrote something, in milliseconds since 1970."""
        assert self._file is not None
        times = [op["t"] for op, _ in self._file.read_last() if isinstance(op.get("t"), int)]
        return max(times, default=int(self.header["t"]))

    def mark(self) -> Callable[[], bool]:
        """Return a function that returns whether all that was appended until now has been acknowledged."""
        with self._guard:
            mark = None if self._memory or self._file is None else (self.ack.generation, self._file.end)
        return lambda: not self.pending or (mark is not None and (self.ack.generation, self.ack.offset) >= mark)

    def read(self) -> Sequence[tuple[Op, int | None]]:
        """Read about a megabyte of ops that are not acknowledged, each with the offset after it; None if in memory."""
        start = self.ack.offset
        with self._guard:
            file, end = self._file, 0 if self._file is None else self._file.end
            if file is None or start >= end:
                return [(decode(line), None) for line in self._memory.lend()]
        return file.read(start, end)

    def give_back(self) -> None:
        """Note that ops read from memory will not be acknowledged now."""
        with self._guard:
            self._memory.give_back()

    def acknowledge(self, offset: int | None = None, *, lines: int = 0, **changes: Any) -> None:
        """Note how far the store has the spool: to `offset`, or `lines` more of those in memory."""
        with self._guard:
            if lines:
                offset = self._memory.acknowledge(lines)
            ack = replace(self.ack, offset=self.ack.offset if offset is None else offset, **changes)
            changed, self.ack = ack != self.ack, ack
        if changed:
            self._write_ack()

    def _write_ack(self, *, synced: bool = False) -> None:
        # If it cannot be written, rows are sent twice, which changes nothing in the store.
        with contextlib.suppress(OSError):
            data = json.dumps(asdict(self.ack)).encode()
            if synced:
                replace_synced(self.folder / ACK, data, mode=0o600)
            else:
                spool_files.replace_file(self.folder / ACK, data)

    def compact(self) -> None:
        """Begin the file anew where all of it has been acknowledged and it has grown large."""
        with self._guard:
            file = self._file
            if self._memory or file is None or self.ack.offset < file.end or file.end < COMPACT_BYTES:
                return
            header = {**self.header, "generation": self.ack.generation + 1}
            try:
                file.begin_anew(encode(header))
            except OSError:
                return
            self.header = header
            self.ack = replace(self.ack, generation=self.ack.generation + 1, offset=file.end)
        self._write_ack()

    def sync_to_disk(self) -> None:
        """Make what was appended survive a power cut; may be called by any thread, and appending does not wait."""
        generation = -1
        while generation != self.ack.generation:  # compact() may change the file meanwhile
            with self._guard:
                if self._memory:
                    self._spill()
                if self._file is None:
                    return
                fd, generation = self._file.duplicate(), self.ack.generation
            with contextlib.suppress(OSError):
                os.fsync(fd)
            os.close(fd)
        if not self._on_disk:
            for folder in (self.folder, *self.folder.parents[:2]):
                sync_folder(folder)
            self._on_disk = True

    def close(self, *, remove: bool = False) -> None:
        """Close the files and give the lock back; `remove` deletes the spool, unless entries were set aside."""
        self.note_end()
        with self._guard:
            self._left = self._count_unsent()
            if self._file is not None:
                self._file.close()
                self._file = None
        if remove and not self.rejected:
            spool_files.remove(self.folder)
        if self._lock is not None:
            self._lock.release()

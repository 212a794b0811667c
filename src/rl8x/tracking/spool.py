"""The append-only file that every row of a run goes to before anything else, with the offset up to which it was sent.

A spool is a folder:

    ops.jsonl   one JSON object a line, in order: the header, then params, tags, metrics, artifacts, the final status
    ack.json    how far the store has it, and the run's ID there; written beside and renamed
    end.json    room for the final status and how many rows were lost, where the disk is full by then
    files/      copies of artifacts that are still to be sent
    lock        held by the process that writes or sends
    rejected.jsonl   entries that the store does not take

A line that a killed process left half written is cut off. Writing costs one `write()` without fsync: what is in the
spool outlives the process, not a power cut; `sync_to_disk()` is for that, and is called before each checkpoint. A cut
may leave an acknowledgement older than the spool: what it misses is sent again. After one that is newer, of lines that
are gone, all are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl8x.disk import replace_synced, sync_folder
from rl8x.output import counted
from rl8x.tracking.locks import FileLock, is_locked
from rl8x.tracking.names import artifact_name, readable
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.rejected import Rejected
from rl8x.tracking.secrets import hide, hide_in_data, logger
from rl8x.tracking.spool_files import (
    ACK,
    FILES,
    OPS,
    REJECTED,
    Op,
    check_plain,
    decode,
    encode,
    open_regular,
    read_ack,
    read_end,
    read_header,
    replace_file,
    reserve_end,
    whole_lines,
    write_end,
)

_log = logger(__name__)

MAX_MEMORY_LINES = 20_000
READ_BYTES = 1 << 20
COMPACT_BYTES = 16 << 20
LOST_ROWS_TAG = "rl8x.lost_rows"
_RETRY_S = 1.0
_ROW = b'{"op":"m"'


class SpoolInUseError(TrackingError):
    """Another process writes or sends the spool."""


@dataclass(frozen=True)
class Unsent:
    """What of a spool has not arrived.

    Attributes:
        num_rows: Rows on the disk, which `rl8x sync` can send.
        num_others: Params, tags, artifacts and the status, on the disk too.
        num_lost: Rows that only the memory of this process has, or that were dropped from it.
        num_others_lost: Params, tags and artifacts that only the memory has.
        num_rejected: Entries that the store does not take, which were set aside.
    """

    num_rows: int = 0
    num_others: int = 0
    num_lost: int = 0
    num_others_lost: int = 0
    num_rejected: int = 0

    @property
    def lost(self) -> str:
        """Write what is lost in words; empty where nothing is."""
        rows = counted(self.num_lost, "row", "rows") if self.num_lost else ""
        others = counted(self.num_others_lost, "other entry", "other entries") if self.num_others_lost else ""
        return " and ".join(filter(None, (rows, others)))


@dataclass(frozen=True)
class Chunk:
    """Ops read from a spool, each with the offset after it; `None` offsets mean lines that are in memory only."""

    ops: list[tuple[Op, int | None]]


class Spool:
    """One run's spool, opened for appending, reading and acknowledging by its one owner.

    `append` may be called by any thread; the rest belongs to the thread that sends.
    """

    def __init__(self, folder: Path, header: Op, lock: FileLock | None) -> None:
        self.folder = folder
        self.header = header
        self.ack = read_ack(folder)
        self._lock = lock
        self._guard = threading.Lock()
        self._fd: int | None = None
        self._end = 0
        self._memory: deque[bytes] = deque()
        self.rejected = Rejected(folder)
        self._lent = 0  # lines at the front of the memory that are being sent
        self._spilled: deque[int] = deque()  # ends of those lines that are being sent and have gone to the disk since
        self._dropped = 0
        self._others_dropped = 0
        self._left: Unsent | None = None  # once it is closed
        self._lost_before = 0
        self._ending: Op | None = None
        self._end_is_noted = False
        self._failed_at = 0.0
        self._file_count = 0
        self._on_disk = False

    @classmethod
    def create(cls, root: Path, header: Op) -> Spool:
        """Make a new spool in `root/<spool_id>`; where the disk refuses, it lives in memory until the disk does not."""
        folder = (root / str(header["spool_id"])).absolute()
        spool = cls(folder, decode(encode({**hide_in_data(header), "folder": str(folder)})), None)
        with spool._guard:
            spool._spill()
        return spool

    @classmethod
    def open(cls, folder: Path, timeout_s: float = 0.0) -> Spool:
        """Open a spool that is there: take its lock, cut off a torn last line.

        Raises:
            SpoolInUseError: Another process has it, or the one that it is a copy of.
            TrackingError: It is no spool, or has links in it.
        """
        check_plain(folder)
        lock = FileLock(folder / "lock")
        try:
            if not lock.acquire(timeout_s):
                raise SpoolInUseError(f"the spool {folder} is in use by {lock.owner()}; try again when that has ended")
            header = read_header(folder)
            _check_is_no_copy(folder, header)
            spool = cls(folder, header, lock)
            spool._open_file()
            spool._check_ack()
        except OSError as error:
            lock.release()
            raise TrackingError(f"cannot open the spool {folder}: {error}") from error
        except TrackingError:
            lock.release()
            raise
        spool._take_over_end()
        return spool

    def _open_file(self) -> None:
        fd = open_regular(self.folder / OPS, os.O_RDWR | os.O_CREAT)
        self._end = whole_lines(fd)
        os.ftruncate(fd, self._end)
        self._fd = fd
        names = [path.name for path in (self.folder / FILES).glob("*")]
        self._file_count = max((int(name) for name in names if re.fullmatch("[0-9]{1,9}", name)), default=0)

    def _take_over_end(self) -> None:
        """Add what the process before wrote where it had no room for more: how it ended, and what it lost."""
        ending = read_end(self.folder)
        if ending is None:
            return
        self._lost_before = ending.pop("lost_rows")
        self._ending, self._end_is_noted = ending, True
        self._append_end()
        if not self._end_is_noted:  # it is among the ops now
            self._ending, self._lost_before = None, 0

    def _check_ack(self) -> None:
        """Bring an acknowledgement to what is there, which a power cut may have left older or newer."""
        assert self._fd is not None
        generation = self.header.get("generation", 0)
        # Another generation: cut or killed between the two renames of compact(). Sending all again adds nothing.
        is_of_file = self.ack.generation == generation and self.ack.offset <= self._end
        if not is_of_file or whole_lines(self._fd, self.ack.offset) != self.ack.offset:
            self.ack = replace(self.ack, generation=generation, offset=0)
            # On the disk before anything is appended: the old one would say that the new lines have arrived.
            self._write_ack(synced=True)

    # Appending: any thread.

    def append(self, op: Mapping[str, object]) -> None:
        """Add an op. A full or read-only disk never raises: lines wait in memory, bounded, until it takes them."""
        line = encode(_without_secrets(op))
        with self._guard:
            if self._memory or self._fd is None:
                self._remember(line)
                if time.monotonic() - self._failed_at > _RETRY_S:
                    self._spill()
            elif not self._write(line):
                self._remember(line)

    def end(self, op: Op) -> None:
        """Add the last op, and bring what is in memory to the disk.

        Where the disk is full, the op and the number of rows that are lost with this process go to where room was
        reserved for them, so that a later `rl8x sync` knows how the run ended.
        """
        self._ending = op
        self._append_end()
        self.sync_to_disk()

    def _append_end(self) -> None:
        lost = self._dropped + self._lost_before
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
            if self._fd is None or self._ending is None or not (self._memory or self._end_is_noted):
                return
            lost = self._dropped + self._lost_before + sum(line.startswith(_ROW) for line in self._memory)
            with contextlib.suppress(OSError):
                write_end(self.folder, {**self._ending, "lost_rows": lost} if self._memory else None)
                self._end_is_noted = bool(self._memory)

    def _remember(self, line: bytes) -> None:
        if len(self._memory) - self._lent >= MAX_MEMORY_LINES:
            if not self._dropped:
                _log.warning("tracking: %d rows wait in memory; the oldest are dropped now", MAX_MEMORY_LINES)
            metrics = (i for i in range(self._lent, len(self._memory)) if self._memory[i].startswith(_ROW))
            del self._memory[next(metrics, self._lent)]
            self._dropped += 1
        self._memory.append(line)

    def _write(self, line: bytes) -> bool:
        assert self._fd is not None
        try:
            written = os.pwrite(self._fd, line, self._end)
            if written != len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            self._fail(error)
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            return False
        self._end += len(line)
        return True

    def _fail(self, error: OSError) -> None:
        if not self._failed_at:
            _log.warning("tracking: cannot write to the spool %s (%s); rows wait in memory", self.folder, error)
        self._failed_at = time.monotonic()

    def _spill(self) -> None:
        """Move the lines that are in memory to the disk, if it takes them again."""
        if self._left is not None:
            return
        try:
            if self._fd is None:
                self._make_folder()
        except OSError as error:
            self._fail(error)
            return
        while self._memory and self._write(self._memory[0]):
            self._memory.popleft()
            if self._lent:
                self._lent -= 1
                self._spilled.append(self._end)
        if not self._memory and self._failed_at:
            self._failed_at = 0.0
            _log.info("tracking: the spool %s can be written again", self.folder)

    def _make_folder(self) -> None:
        from rl8x.tracking.location import make_mlruns

        if self.folder.parents[1].name == "mlruns":
            make_mlruns(self.folder.parents[1])
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if self._lock is None:
            lock = FileLock(self.folder / "lock")
            if not lock.acquire():
                raise OSError(11, f"the spool is in use by {lock.owner()}")
            self._lock = lock
        self._open_file()
        try:
            reserve_end(self.folder)
            if not self._end and not self._write(encode(self.header)):
                raise OSError(28, "No space left on device")
        except OSError:
            assert self._fd is not None
            os.close(self._fd)
            self._fd = None
            raise

    def look_after(self) -> None:
        """Write the file anew where somebody deleted it, and follow it where somebody moved it.

        The descriptor that is open still has all of it.
        """
        with self._guard:
            if self._fd is None:
                return
            if os.fstat(self._fd).st_nlink:
                self._follow()
                return
            old, end, count = self._fd, self._end, self._file_count
            try:
                if self._lock is not None:  # its file has gone with the folder
                    self._lock.release()
                    self._lock = None
                self._make_folder()
                assert self._fd is not None
                _copy(old, self._fd, end)
            except OSError as error:
                if self._fd not in (None, old):
                    os.close(self._fd)
                self._fd, self._end = old, end
                self._fail(error)
                return
            os.close(old)
            self._end, self._file_count = end, count
        self._write_ack()
        _log.warning("tracking: the spool %s was deleted, and has been written anew", self.folder)

    def _follow(self) -> None:
        here, now = self.folder / OPS, f"/proc/self/fd/{self._fd}"  # Linux alone tells where a file is
        with contextlib.suppress(OSError):
            if not (here.exists() and os.path.samefile(here, now)) and os.path.samefile(os.readlink(now), now):
                self.folder = Path(os.readlink(now)).parent
                self.rejected.path = self.folder / REJECTED
                _log.warning("tracking: the spool was moved to %s; rows go on to wait there", self.folder)

    def keep_file(self, source: Path, besides: Collection[Path] = ()) -> str:
        """Copy a file or folder into the spool; returns its path there, in which all names are UTF-8.

        Args:
            source: What to copy.
            besides: Folders in `source` that are left out, as all spools are.

        Raises:
            OSError: It cannot be read, or there is no room.
        """
        with self._guard:
            self._file_count += 1
            number = self._file_count
        name = artifact_name(source.name)
        target = self.folder / FILES / str(number) / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                root = self.folder.parent
                spools = [path.parent for path in root.glob(f"*/{OPS}")]
                left_out = {os.path.realpath(folder) for folder in (*besides, root, *spools)}
                shutil.copytree(source, target, ignore=lambda folder, names: _left_out(folder, names, left_out))
                _rename_odd(target)
            else:
                shutil.copyfile(source, target)
        except OSError:
            shutil.rmtree(target.parent, ignore_errors=True)  # half a copy would only take room that rows need
            raise
        return f"{FILES}/{number}/{name}"

    # Reading and acknowledging: the sending thread.

    @property
    def pending(self) -> bool:
        """Say whether anything has not been acknowledged."""
        with self._guard:
            return bool(self._memory) or self.ack.offset < self._end

    def unsent(self) -> Unsent:
        """Count what has not been acknowledged; reads the rest of the file. Of a closed spool, what was left then."""
        with self._guard:
            return self._count_unsent() if self._left is None else self._left

    def _count_unsent(self) -> Unsent:
        num_rows = num_others = 0
        if self._fd is not None:
            with contextlib.suppress(OSError), os.fdopen(os.dup(self._fd), "rb") as file:
                file.seek(self.ack.offset)
                for line in file:
                    is_row = line.startswith(_ROW)
                    num_rows, num_others = num_rows + is_row, num_others + (not is_row)
        lost = sum(line.startswith(_ROW) for line in self._memory)
        others = len(self._memory) - lost - self._end_is_noted + self._others_dropped
        return Unsent(num_rows, num_others + self._end_is_noted, lost + self._dropped, others, len(self.rejected))

    def last_time(self) -> int:
        """Return when its process last wrote something, in milliseconds since 1970."""
        times = [op["t"] for op, _ in self.read(self._last_lines()).ops if isinstance(op.get("t"), int)]
        return max(times, default=int(self.header["t"]))

    def _last_lines(self) -> int:
        assert self._fd is not None
        return whole_lines(self._fd, max(0, self._end - READ_BYTES // 2))

    def mark(self) -> tuple[int, int]:
        """Return a mark of all that was appended so far, for `passed`."""
        with self._guard:
            return self.ack.generation, self._end if not self._memory else -1

    def passed(self, mark: tuple[int, int]) -> bool:
        """Say whether all up to a mark has been acknowledged."""
        generation, offset = mark
        if not self.pending:
            return True
        return offset >= 0 and (self.ack.generation > generation or self.ack.offset >= offset)

    def read(self, offset: int | None = None) -> Chunk:
        """Read whole lines from `offset` (default: the first that is not acknowledged), about a megabyte of them."""
        start = self.ack.offset if offset is None else offset
        with self._guard:
            fd, end = self._fd, self._end
            if fd is None or start >= end:
                self._lent = min(len(self._memory), 1000)
                self._spilled.clear()
                return Chunk([(decode(line), None) for line in list(self._memory)[: self._lent]])
        data = os.pread(fd, READ_BYTES, start)
        size = READ_BYTES
        while b"\n" not in data and start + len(data) < end:
            size *= 2
            data = os.pread(fd, size, start)
        ops: list[tuple[Op, int | None]] = []
        for line in data[: end - start].split(b"\n")[:-1]:
            start += len(line) + 1
            ops.append((decode(line), start))
        return Chunk(ops)

    def give_back(self) -> None:
        """Say that lines read from memory will not be acknowledged now."""
        with self._guard:
            self._lent = 0
            self._spilled.clear()

    def acknowledge(self, offset: int | None = None, *, lines: int = 0, **changes: Any) -> None:
        """Note how far the store has the spool: to `offset`, or `lines` more of those in memory."""
        with self._guard:
            for _ in range(lines):
                if self._spilled:  # it has gone to the disk while it was sent
                    offset = self._spilled.popleft()
                else:
                    self._memory.popleft()
                    self._lent = max(0, self._lent - 1)
            ack = replace(self.ack, offset=self.ack.offset if offset is None else offset, **changes)
            changed, self.ack = ack != self.ack, ack
        if changed:
            self._write_ack()

    def _write_ack(self, *, synced: bool = False) -> None:
        # Not written, it only means that something is sent twice, which the store does not mind.
        with contextlib.suppress(OSError):
            data = json.dumps(asdict(self.ack)).encode()
            if synced:
                replace_synced(self.folder / ACK, data, mode=0o600)
            else:
                replace_file(self.folder / ACK, data)

    def compact(self) -> None:
        """Begin the file anew where all of it has been acknowledged and it has grown large."""
        with self._guard:
            if self._memory or self._fd is None or self.ack.offset < self._end or self._end < COMPACT_BYTES:
                return
            header = {**self.header, "generation": self.ack.generation + 1}
            line = encode(header)
            try:
                replace_synced(self.folder / OPS, line, mode=0o600)
                fd = os.open(self.folder / OPS, os.O_RDWR)
            except OSError:
                return
            os.close(self._fd)
            self._fd, self._end, self.header = fd, len(line), header
            self.ack = replace(self.ack, generation=self.ack.generation + 1, offset=len(line))
        self._write_ack()

    def reject(self, op: Op, reason: str) -> None:
        """Set aside an op that the store does not take, so that it is in nobody's way."""
        if not self.rejected.add(_without_secrets(op), hide(reason)):
            self._dropped += op["op"] == "m"
            self._others_dropped += op["op"] != "m"

    def sync_to_disk(self) -> None:
        """Make what was appended survive a power cut; may be called by any thread, and appending does not wait."""
        generation = -1
        while generation != self.ack.generation:  # compact() may change the file meanwhile
            with self._guard:
                if self._memory:
                    self._spill()
                if self._fd is None:
                    return
                fd, generation = os.dup(self._fd), self.ack.generation
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
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
        if remove and not self.rejected:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()


def _left_out(folder: str, names: list[str], paths: set[str]) -> list[str]:
    """List those names in a folder that lead to one of some paths, or back to where the folder is."""
    here = Path(os.path.realpath(folder))
    back = paths | {str(path) for path in (here, *here.parents)}
    return [name for name in names if os.path.realpath(here / name) in back]


def _check_is_no_copy(folder: Path, header: Op) -> None:
    """Refuse the copy of a spool that a process still writes: what it sends would be sent twice, and end the run.

    Raises:
        SpoolInUseError: It is one.
    """
    lock = FileLock(Path(str(header.get("folder", folder))) / "lock")
    with contextlib.suppress(OSError):
        if not os.path.samefile(lock.path, folder / "lock") and is_locked(lock.path):
            raise SpoolInUseError(
                f"the spool {folder} is a copy of {lock.path.parent}, which is in use by {lock.owner()}; "
                "try again when that has ended"
            )


def _without_secrets(op: Mapping[str, Any]) -> Op:
    """Return an op without secrets. Rows are names and numbers, which are not looked at; files keep their names."""
    kind = op["op"]
    if kind in ("m", "artifact"):
        return dict(op)
    if kind in ("describe", "text") and isinstance(op.get("text"), str):
        return {**op, "text": hide(op["text"])}
    return dict(hide_in_data(op))


def _rename_odd(folder: Path) -> None:
    """Rename what has a name in a folder that is not UTF-8, which no store takes."""
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in (*folders, *files):
            if readable(name) != name:
                os.rename(os.path.join(parent, name), os.path.join(parent, artifact_name(name)))


def _copy(source: int, target: int, length: int) -> None:
    """Make a file the first bytes of another one."""
    position = 0
    while position < length:
        data = os.pread(source, min(READ_BYTES, length - position), position)
        if not data:
            raise OSError(5, "the deleted file cannot be read")
        position += os.pwrite(target, data, position)
    os.ftruncate(target, length)

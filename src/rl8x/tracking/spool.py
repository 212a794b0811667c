"""The append-only file that every row of a run goes to before anything else, with the offset up to which it was sent.

A spool is a folder:

    ops.jsonl   one JSON object a line, in order: the header, then params, tags, metrics, artifacts, the final status
    ack.json    how far the store has it, and the run's ID there; written beside and renamed
    files/      copies of artifacts that are still to be sent
    lock        held by the process that writes or sends

A line that a killed process left half written is cut off. Writing costs one `write()` without fsync: what is in the
spool outlives the process, not a power cut; `sync_to_disk()` is for that, and is called before each checkpoint. A cut
may leave an acknowledgement older than the spool: what it misses is sent again. One that is newer, of lines that are
gone, is cut to those that are there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl8x.disk import replace_synced, sync_folder
from rl8x.tracking.locks import FileLock, is_locked
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.secrets import hide, hide_in_data, logger

_log = logger(__name__)

OPS = "ops.jsonl"
ACK = "ack.json"
FILES = "files"
REJECTED = "rejected.jsonl"
MAX_MEMORY_LINES = 20_000
READ_BYTES = 1 << 20
COMPACT_BYTES = 16 << 20
_RETRY_S = 1.0
_ROW = b'{"op":"m"'

Op = dict[str, Any]


class SpoolInUseError(TrackingError):
    """Another process writes or sends the spool."""


@dataclass(frozen=True)
class Ack:
    """What has been done with a spool.

    Attributes:
        offset: Bytes of `ops.jsonl` that the store has.
        generation: The generation of `ops.jsonl` that `offset` counts in.
        run_id: The run in the store.
        run_name: Its name there.
        name_is_free: No other run of the store had this name.
        attempted: A run was asked for; it may be there although no answer came.
        resumed: Rows from here on may repeat what the run already has.
        finished: The run's status is what it is to be.
    """

    offset: int = 0
    generation: int = 0
    run_id: str | None = None
    run_name: str | None = None
    name_is_free: bool = False
    attempted: bool = False
    resumed: bool = False
    finished: bool = False


@dataclass(frozen=True)
class Unsent:
    """What of a spool has not arrived.

    Attributes:
        num_rows: Rows on the disk, which `rl8x sync` can send.
        num_others: Params, tags, artifacts and the status, on the disk too.
        num_lost: Lines that only the memory of this process has, or that were dropped from it.
    """

    num_rows: int = 0
    num_others: int = 0
    num_lost: int = 0


@dataclass(frozen=True)
class Chunk:
    """Ops read from a spool, each with the offset after it; `None` offsets mean lines that are in memory only."""

    ops: list[tuple[Op, int | None]]


def encode(op: Mapping[str, object]) -> bytes:
    """Write an op as one line."""
    return json.dumps(op, separators=(",", ":")).encode() + b"\n"


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
        self._lent = 0
        self._dropped = 0
        self._failed_at = 0.0
        self._file_count = 0
        self._on_disk = False

    @classmethod
    def create(cls, root: Path, header: Op) -> Spool:
        """Make a new spool in `root/<spool_id>`; where the disk refuses, it lives in memory until the disk does not."""
        folder = (root / str(header["spool_id"])).absolute()
        spool = cls(folder, {**hide_in_data(header), "folder": str(folder)}, None)
        with spool._guard:
            spool._spill()
        return spool

    @classmethod
    def open(cls, folder: Path, timeout_s: float = 0.0) -> Spool:
        """Open a spool that is there: take its lock, cut off a torn last line.

        Raises:
            SpoolInUseError: Another process has it, or the one that it is a copy of.
            TrackingError: It is no spool.
        """
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
        return spool

    def _open_file(self) -> None:
        fd = os.open(self.folder / OPS, os.O_RDWR | os.O_CREAT, 0o600)
        self._end = _whole_lines(fd)
        os.ftruncate(fd, self._end)
        self._fd = fd
        numbers = [int(path.name) for path in (self.folder / FILES).glob("*") if path.name.isdigit()]
        self._file_count = max(numbers, default=0)

    def _check_ack(self) -> None:
        """Bring an acknowledgement to what is there, which a power cut may have left older or newer."""
        assert self._fd is not None
        generation = self.header.get("generation", 0)
        if self.ack.generation != generation:  # cut or killed between the two renames of compact()
            self.ack = replace(self.ack, generation=generation, offset=0)
        offset = _whole_lines(self._fd, min(self.ack.offset, self._end))
        if offset != self.ack.offset:
            self.ack = replace(self.ack, offset=offset)
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
        if self._lent:
            return
        try:
            if self._fd is None:
                self._make_folder()
        except OSError as error:
            self._fail(error)
            return
        while self._memory and self._write(self._memory[0]):
            self._memory.popleft()
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
        if not self._end and not self._write(encode(self.header)):
            os.close(self._fd or 0)
            self._fd = None
            raise OSError(28, "No space left on device")

    def keep_file(self, source: Path, besides: Collection[Path] = ()) -> str:
        """Copy a file or folder into the spool; returns its path there.

        Args:
            source: What to copy.
            besides: Folders in `source` that are left out, as all spools are.

        Raises:
            OSError: It cannot be read, or there is no room.
        """
        with self._guard:
            self._file_count += 1
            number = self._file_count
        target = self.folder / FILES / str(number) / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            root = self.folder.parent
            spools = [path.parent for path in root.glob(f"*/{OPS}")]
            left_out = {os.path.realpath(folder) for folder in (*besides, root, *spools)}
            shutil.copytree(source, target, ignore=lambda folder, names: _left_out(folder, names, left_out))
        else:
            shutil.copyfile(source, target)
        return f"{FILES}/{number}/{source.name}"

    # Reading and acknowledging: the sending thread.

    @property
    def pending(self) -> bool:
        """Say whether anything has not been acknowledged."""
        with self._guard:
            return bool(self._memory) or self.ack.offset < self._end

    def unsent(self) -> Unsent:
        """Count what has not been acknowledged; reads the rest of the file."""
        num_rows = num_others = 0
        with self._guard, contextlib.suppress(OSError), open(self.folder / OPS, "rb") as file:
            file.seek(self.ack.offset)
            for line in file:
                is_row = line.startswith(_ROW)
                num_rows, num_others = num_rows + is_row, num_others + (not is_row)
        return Unsent(num_rows, num_others, len(self._memory) + self._dropped)

    def last_time(self) -> int:
        """Return when its process last wrote something, in milliseconds since 1970."""
        times = [op["t"] for op, _ in self.read(self._last_lines()).ops if isinstance(op.get("t"), int)]
        return max(times, default=int(self.header["t"]))

    def _last_lines(self) -> int:
        assert self._fd is not None
        return _whole_lines(self._fd, max(0, self._end - READ_BYTES // 2))

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
                return Chunk([(_decode(line), None) for line in list(self._memory)[: self._lent]])
        data = os.pread(fd, READ_BYTES, start)
        while b"\n" not in data and start + len(data) < end:
            data += os.pread(fd, READ_BYTES, start + len(data))
        data = data[: end - start]
        ops: list[tuple[Op, int | None]] = []
        for line in data.splitlines(keepends=True):
            if line.endswith(b"\n"):
                start += len(line)
                ops.append((_decode(line), start))
        return Chunk(ops)

    def give_back(self) -> None:
        """Say that lines read from memory will not be acknowledged now."""
        with self._guard:
            self._lent = 0

    def acknowledge(self, offset: int | None = None, *, lines: int = 0, **changes: Any) -> None:
        """Note how far the store has the spool: to `offset`, or `lines` more of those in memory."""
        with self._guard:
            for _ in range(lines):
                self._memory.popleft()
            self._lent = max(0, self._lent - lines)
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
                _replace_file(self.folder / ACK, data)

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
        """Keep an op that the store will never take in a file of its own, so that it is in nobody's way."""
        with contextlib.suppress(OSError), open(self.folder / REJECTED, "ab", opener=_private) as file:
            file.write(encode({"reason": hide(reason), "rejected": _without_secrets(op)}))

    @property
    def num_dropped(self) -> int:
        """Count the lines that were dropped because neither disk nor store took them in time."""
        return self._dropped

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
        """Close the files and give the lock back; `remove` deletes the spool, except what the store refused."""
        with self._guard:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
        if remove and not (self.folder / REJECTED).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.release()


def read_header(folder: Path) -> Op:
    """Read the first line of a spool.

    Raises:
        TrackingError: It is no spool that this version can read.
    """
    try:
        with open(folder / OPS, "rb") as file:
            header = json.loads(file.readline())
        if header["op"] == "open" and header["version"] == 1:
            return dict(header)
        raise TrackingError(f"the spool {folder} has version {header.get('version')!r}; this rl8x reads version 1")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, TrackingError):
            raise
        raise TrackingError(f"{folder} is not a spool: it has no readable {OPS}") from error


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


def _without_secrets(op: Mapping[str, object]) -> Mapping[str, object]:
    """Return an op without secrets. Rows are names and numbers, which are not looked at; files keep their names."""
    kind = op["op"]
    if kind in ("m", "artifact"):
        return op
    if kind in ("describe", "text"):
        return {**op, "text": hide(str(op["text"]))}
    return hide_in_data(op)  # type: ignore[no-any-return]


def _decode(line: bytes) -> Op:
    try:
        op = json.loads(line)
    except ValueError:
        op = None
    return op if isinstance(op, dict) and "op" in op else {"op": "unreadable", "line": repr(line)[:500]}


def read_ack(folder: Path) -> Ack:
    """Read how far a spool has been sent; an unreadable file means not at all, as sending twice does no harm."""
    try:
        ack = Ack(**json.loads((folder / ACK).read_bytes()))
        return replace(ack, offset=int(ack.offset), generation=int(ack.generation))
    except (OSError, ValueError, TypeError):
        return Ack()


def _whole_lines(fd: int, end: int | None = None) -> int:
    """Return the length of a file, or of its first `end` bytes, up to the last newline."""
    position = os.fstat(fd).st_size if end is None else end
    while position > 0:
        start = max(0, position - 65536)
        found = os.pread(fd, position - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        position = start
    return 0


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner can read, since a spool says where its store is."""
    return os.open(path, flags, 0o600)


def _replace_file(path: Path, data: bytes) -> None:
    beside = path.with_name(path.name + ".new")
    with open(beside, "wb", opener=_private) as file:
        file.write(data)
    os.replace(beside, path)

"""The lines of a spool: in its open file `ops.jsonl`, and in memory while the disk does not take them."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rl8x.disk import moved_to, replace_synced
from rl8x.tracking.secrets import logger
from rl8x.tracking.spool_files import OPS, Op, decode, open_regular

_log = logger(__name__)

READ_BYTES = 1 << 20
MAX_MEMORY_LINES = 20_000
_LENT_LINES = 1000
ROW = b'{"op":"m"'  # how the line of a row of metrics begins


def whole_lines(fd: int, end: int) -> int:
    """Return the length of the first `end` bytes of a file up to the last newline."""
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


class OpsFile:
    """The file, opened by the spool's one owner. A line that a killed process left half written is cut off.

    Attributes:
        path: Its path.
        end: Its length in bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / OPS
        self._fd = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        self.end = whole_lines(self._fd, os.fstat(self._fd).st_size)
        os.ftruncate(self._fd, self.end)

    def write(self, line: bytes) -> None:
        """Append a line, whole or not at all: then it raises `OSError`."""
        try:
            if os.pwrite(self._fd, line, self.end) != len(line):
                raise OSError(28, "No space left on device")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.end)
            raise
        self.end += len(line)

    def read(self, start: int, end: int) -> list[tuple[Op, int]]:
        """Read whole lines between two offsets, about a megabyte of them, each with the offset after it."""
        size = READ_BYTES
        data = os.pread(self._fd, size, start)
        while b"\n" not in data and start + len(data) < end:
            size *= 2
            data = os.pread(self._fd, size, start)
        ops = []
        for line in data[: end - start].split(b"\n")[:-1]:
            start += len(line) + 1
            ops.append((decode(line), start))
        return ops

    def read_last(self) -> list[tuple[Op, int]]:
        """Read the last lines, about half a megabyte of them."""
        return self.read(whole_lines(self._fd, max(0, self.end - READ_BYTES // 2)), self.end)

    def has_line_end(self, offset: int) -> bool:
        """Return whether a line ends at an offset."""
        return offset <= self.end and whole_lines(self._fd, offset) == offset

    def read_bytes(self, start: int) -> bytes:
        """Read about a megabyte from an offset, of what was written whole."""
        return os.pread(self._fd, min(READ_BYTES, self.end - start), start)

    def count(self, start: int) -> tuple[int, int]:
        """Count the rows and the other lines from an offset to the end."""
        num_rows = num_others = 0
        with contextlib.suppress(OSError), os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(start)
            for line in file:
                is_row = line.startswith(ROW)
                num_rows, num_others = num_rows + is_row, num_others + (not is_row)
        return num_rows, num_others

    @property
    def is_deleted(self) -> bool:
        """Whether no folder has the file any more, which can still be read."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def moved_to(self) -> Path | None:
        """The path of the file where it was moved; None where it is in its place, or the system does not know."""
        return moved_to(self._fd, self.path)

    def copy_from(self, other: OpsFile) -> None:
        """Make this file the same as another one; raises `OSError` where one of the two cannot be used."""
        os.ftruncate(self._fd, 0)
        self.end = 0
        while self.end < other.end:
            data = other.read_bytes(self.end)
            if not data:
                raise OSError(5, "the deleted file cannot be read")
            self.write(data)

    def begin_anew(self, line: bytes) -> None:
        """Replace the file by one with a single line, or raise `OSError`; after a power cut one of the two is there."""
        replace_synced(self.path, line, mode=0o600)
        fd = os.open(self.path, os.O_RDWR)
        os.close(self._fd)
        self._fd, self.end = fd, len(line)

    def duplicate(self) -> int:
        """Return another descriptor of the file, to sync it while lines are appended."""
        return os.dup(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class WaitingLines:
    """Lines in the order in which they were added; beyond a limit the oldest rows are dropped.

    Some at the front may be lent to the thread that sends, and may go to the disk meanwhile. The caller holds a lock.

    Attributes:
        num_dropped: Rows that were dropped.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._lines: deque[bytes] = deque()
        self._num_lent = 0
        self._written: deque[int] = deque()  # offsets after lent lines that were written to the disk meanwhile

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def num_rows(self) -> int:
        """Count the rows of metrics."""
        return sum(line.startswith(ROW) for line in self._lines)

    def add(self, line: bytes) -> None:
        """Add a line."""
        if len(self._lines) - self._num_lent >= MAX_MEMORY_LINES:
            if not self.num_dropped:
                _log.warning("tracking: %d rows wait in memory; the oldest are dropped now", MAX_MEMORY_LINES)
            rows = (i for i in range(self._num_lent, len(self._lines)) if self._lines[i].startswith(ROW))
            del self._lines[next(rows, self._num_lent)]
            self.num_dropped += 1
        self._lines.append(line)

    def move(self, write: Callable[[bytes], int]) -> None:
        """Move lines to the disk by `write`, which returns the offset after a line, or 0 where the disk refuses it."""
        while self._lines:
            offset = write(self._lines[0])
            if not offset:
                return
            self._lines.popleft()
            if self._num_lent:
                self._num_lent -= 1
                self._written.append(offset)

    def lend(self) -> list[bytes]:
        """Return lines at the front, to be sent."""
        self.give_back()
        self._num_lent = min(len(self._lines), _LENT_LINES)
        return list(self._lines)[: self._num_lent]

    def give_back(self) -> None:
        """Note that lent lines will not be acknowledged now."""
        self._num_lent = 0
        self._written.clear()

    def acknowledge(self, num: int) -> int | None:
        """Remove lent lines that have arrived; returns the offset after the last that is on the disk, if any is."""
        offset = None
        for _ in range(num):
            if self._written:
                offset = self._written.popleft()
            else:
                self._lines.popleft()
                self._num_lent = max(0, self._num_lent - 1)
        return offset

"""Lines of a spool that wait in memory while the disk does not take them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rl8x.tracking.ops_file import ROW
from rl8x.tracking.secrets import logger

_log = logger(__name__)

MAX_MEMORY_LINES = 20_000
_LENT_LINES = 1000


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
        self._written: deque[int] = deque()  # offsets after those lent lines that have gone to the disk since

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
        """Move lines to the disk.

        Args:
            write: Writes one line; returns the offset after it, or 0 where the disk does not take it.
        """
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

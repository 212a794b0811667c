"""A lock on a file that one process holds and that goes with it, however it ends."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no lock between processes
    fcntl = None  # type: ignore[assignment]

_held: set[str] = set()
_held_guard = threading.Lock()


class FileLock:
    """An exclusive lock between processes, and between the threads of one.

    POSIX record locks are used because, other than `flock`, a forked child does not keep them alive after its parent
    is gone; as they know no threads, a set of the held paths stands beside them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._key = os.path.realpath(path)
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """Say whether this object holds the lock."""
        return self._fd is not None

    def acquire(self, timeout_s: float = 0.0) -> bool:
        """Take the lock, waiting at most `timeout_s`; False where another one keeps it.

        Raises:
            OSError: The file cannot be made.
        """
        deadline = time.monotonic() + timeout_s
        while not self._try():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def _try(self) -> bool:
        with _held_guard:
            if self._key in _held:
                return False
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if fcntl is not None:
                    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                return False
            self._fd = fd
            _held.add(self._key)
            with contextlib.suppress(OSError):  # only there to be read by a person or an error message
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
            return True

    def owner(self) -> str:
        """Name the process that last took the lock."""
        with _held_guard:
            if self._key in _held:  # reading the file and closing it would drop this process's own lock
                return "this process"
        try:
            return f"process {self.path.read_text().strip() or '?'}"
        except OSError:
            return "another process"

    def release(self) -> None:
        """Give the lock back; without effect where it is not held."""
        with _held_guard:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
                _held.discard(self._key)

    def __enter__(self) -> FileLock:
        """Take the lock, however long it takes."""
        self.acquire(timeout_s=float("inf"))
        return self

    def __exit__(self, *exception: object) -> None:
        """Give the lock back."""
        self.release()

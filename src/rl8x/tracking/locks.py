"""A lock on a file, which is released when the process that holds it ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from pathlib import Path

_held: set[FileLock] = set()
_held_guard = threading.RLock()


class FileLock:
    """An exclusive lock between processes, and between the threads of one.

    It is `flock`'s, which belongs to one opening of the file: other than a POSIX record lock it stays where this
    process opens and closes the file once more, as it does to copy a folder. A forked child would share it, and keep it
    beyond the end of its parent: so the child closes it at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, timeout_s: float = 0.0) -> bool:
        """Take the lock, waiting at most `timeout_s`; False where another one keeps it.

        Raises:
            OSError: The file cannot be made, or its file system has no locks.
        """
        deadline = time.monotonic() + timeout_s
        while not self._try():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def _try(self) -> bool:
        with _held_guard:
            if self._fd is not None:
                return False
            # In somebody else's folder it may be a link to any file, which would be cut to nothing below.
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with contextlib.ExitStack() as unless_locked:
                unless_locked.callback(os.close, fd)
                if not (_lock(fd, fcntl.LOCK_EX) and self._is_there(fd)):
                    return False
                unless_locked.pop_all()
            self._fd = fd
            _held.add(self)
            with contextlib.suppress(OSError):  # only there to be read by a person or an error message
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
            return True

    def _is_there(self, fd: int) -> bool:
        """Return whether the path still names an open file: its folder may have been removed by the last owner."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        return False

    @property
    def is_held(self) -> bool:
        """Whether this process holds it; a fork of the one that does never does."""
        return self._fd is not None

    def owner(self) -> str:
        """Return the name of the process that last took the lock, for a message."""
        try:
            pid = self.path.read_text().strip()
        except (OSError, UnicodeDecodeError):
            return "another process"
        return "this process" if pid == str(os.getpid()) else f"process {pid or '?'}"

    def release(self) -> None:
        """Give the lock back; without effect where it is not held."""
        with _held_guard:
            if self._fd is not None:
                with contextlib.suppress(OSError):  # whose process ends without that has left its number there
                    os.ftruncate(self._fd, 0)
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing would not do where a library of C has forked
                self.close()

    def close(self) -> None:
        """Close the file of a lock that is held: in a forked child, where the parent goes on holding it."""
        assert self._fd is not None
        os.close(self._fd)
        self._fd = None
        _held.discard(self)

    def __enter__(self) -> FileLock:
        """Take the lock, however long it takes."""
        self.acquire(timeout_s=float("inf"))
        return self

    def __exit__(self, *exception: object) -> None:
        """Give the lock back."""
        self.release()


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on a file; makes and changes none."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return not _lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)
    return False


def was_left(path: Path) -> bool:
    """Return whether the last process with the lock on a file ended without giving it back, as a killed one does."""
    with contextlib.suppress(OSError):
        return path.stat().st_size > 0 and not is_locked(path)
    return False


def _lock(fd: int, kind: int) -> bool:
    """Lock an open file; False where it is locked by another opening of it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close()
    _held_guard.release()


os.register_at_fork(before=_held_guard.acquire, after_in_parent=_held_guard.release, after_in_child=_close_in_child)

"""Locks on a file or folder that are released when the holding process ends, for whatever reason."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
from pathlib import Path
from typing import Final

from rl8x.disk import is_at, moved_to

LOCK: Final = "lock"  # the file in a locked folder
_held: set[FileLock] = set()
_held_guard = threading.RLock()


class FileLock:
    """An exclusive lock between processes, and between the threads of one process.

    It uses `flock`: unlike a POSIX record lock, the lock is kept when this process opens and closes the file again. A
    forked child would share the lock and keep it after the parent's end, so the child closes its copy at once.
    """

    def __init__(self, path: Path, *, signs: bool = True) -> None:
        self.path = path
        self._signs = signs
        # In somebody else's folder the path may be a link to any file, which would be truncated.
        self._opened = {path: os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW}
        self._fds: list[int] = []  # the open files while the lock is held

    @property
    def fd(self) -> int:
        """The descriptor of the locked file; -1 if the lock is not held."""
        return self._fds[-1] if self._fds else -1

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock; False in a forked child of the holder."""
        return bool(self._fds)

    def acquire(self, timeout_s: float = 0.0) -> bool:
        """Take the lock, waiting at most `timeout_s`; return False if another holder keeps it."""
        deadline = time.monotonic() + timeout_s
        while not self._try():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        return True

    def _try(self) -> bool:
        with _held_guard:
            if self._fds:
                return False
            with contextlib.ExitStack() as unless_locked:
                fds = []
                for path, flags in self._opened.items():
                    fd = os.open(path, flags, 0o600)
                    unless_locked.callback(os.close, fd)
                    # Its folder may have been removed by the last owner.
                    if not (_lock(fd, fcntl.LOCK_EX) and is_at(fd, path)):
                        return False
                    fds.append(fd)
                unless_locked.pop_all()
            self._fds = fds
            _held.add(self)
            with contextlib.suppress(OSError):  # the ID is only for people and error messages
                if self._signs:
                    os.ftruncate(self.fd, 0)
                    os.pwrite(self.fd, str(os.getpid()).encode(), 0)
            return True

    def owner(self) -> str:
        """Return a name of the process that holds the lock, for a message."""
        pid = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            pid = self.path.read_text().strip()
        pid = pid or next(filter(None, map(_holder, self._opened)), "")
        return "another process" if not pid else "this process" if pid == str(os.getpid()) else f"process {pid}"

    def release(self) -> None:
        """Release the lock; no effect if it is not held."""
        with _held_guard:
            if self._fds:
                with contextlib.suppress(OSError):  # a killed process leaves its ID in the file, see `was_left`
                    if self._signs:
                        os.ftruncate(self._fds[-1], 0)
                for fd in self._fds:
                    fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough if a C library has forked
                self.close()

    def close(self) -> None:
        """Close the files without unlocking: in a forked child, the parent continues to hold the lock."""
        while self._fds:
            os.close(self._fds.pop())
        _held.discard(self)

    def __enter__(self) -> FileLock:
        """Take the lock, waiting as long as needed."""
        self.acquire(timeout_s=float("inf"))
        return self

    def __exit__(self, *exception: object) -> None:
        """Release the lock."""
        self.release()


class FolderLock(FileLock):
    """A lock on a folder and on the file `lock` in it; a clean-up that deletes the file leaves the folder locked.

    The file has the ID of the holder, or of a killed one, and excludes other machines: network file systems share locks
    on files, but not on folders.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / LOCK)
        self.folder = folder
        self._opened = {folder: os.O_RDONLY | os.O_DIRECTORY, **self._opened}

    @property
    def place(self) -> Path:
        """A path that stays valid if the locked folder is moved, on systems with `/proc`; else the folder's path."""
        place = Path(f"/proc/self/fd/{self._fds[0]}") if self._fds else self.folder
        return place if place.is_dir() else self.folder

    @property
    def is_deleted(self) -> bool:
        """Whether the lock is held and its folder was deleted, not moved."""
        return self.is_held and os.fstat(self._fds[0]).st_nlink == 0

    def follow(self) -> bool:
        """Update the path if the locked folder was moved; return whether it was."""
        folder = moved_to(self._fds[0], self.folder) if self.is_held else None
        if folder is not None:
            self.folder, self.path = folder, folder / LOCK
            self._opened = dict(zip((self.folder, self.path), self._opened.values(), strict=True))
        return folder is not None


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock on a folder; creates and changes nothing."""
    for path in (folder, folder / LOCK):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if not _lock(fd, fcntl.LOCK_SH):
                    return True
            finally:
                os.close(fd)
    return False


def was_left(folder: Path) -> bool:
    """Return whether the last holder of a folder's lock ended without releasing it, as a killed process does."""
    with contextlib.suppress(OSError):
        return (folder / LOCK).stat().st_size > 0 and not is_locked(folder)
    return False


def _holder(path: Path) -> str:
    """Return the ID of the process that holds a lock, from Linux's `/proc/locks`; "" if unknown."""
    with contextlib.suppress(OSError):
        status = path.stat()
        named = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5] == named:
                return words[4]
    return ""


def _lock(fd: int, kind: int) -> bool:
    """Lock an open file or folder; return False if it is locked through another descriptor."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):  # some file systems cannot lock folders
            raise
    return True


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close()
    _held_guard.release()


os.register_at_fork(before=_held_guard.acquire, after_in_parent=_held_guard.release, after_in_child=_close_in_child)

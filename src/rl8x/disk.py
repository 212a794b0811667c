"""Files: writes that survive a power cut, digests, files that were moved, and who else can write."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from rl8x.output import shown

SUMS: Final = "SHA256SUMS"
"""The file with the digests of the other files in its folder."""


def named_path(path: str | os.PathLike[str], owner: str) -> Path:
    """Check and return a path that a user gave; `owner` names the argument in errors."""
    text = os.fsdecode(path) if isinstance(path, str | os.PathLike) else ""
    if not text.strip() or "\0" in text:
        raise ValueError(f"{owner} must be a path, without NUL; got {shown(path)}.")
    return Path(text)


def is_own_file(path: Path) -> bool:
    """Whether a path is a regular file of this user or root that nobody else can write to."""
    with contextlib.suppress(OSError):
        about = path.lstat()
        return stat.S_ISREG(about.st_mode) and about.st_uid in (0, os.geteuid()) and not about.st_mode & 0o022
    return False


def exposure(folder: Path) -> str | None:
    """Say who else could change files in a folder, or replace the folder; None if only this user and root can."""
    # Above the folder, a sticky bit is enough to keep others from replacing it, and this user's own group may write, as
    # the umask of many systems allows. In a container root may have another ID: that of the owner of `/`.
    real = Path(os.path.realpath(folder))
    for path in (real, *real.parents):
        about, inside = path.stat(), path is real
        if about.st_uid not in (0, os.geteuid()) and (inside or about.st_uid != os.stat("/").st_uid):
            return f"{path} is another user's"
        others = 0o022 if inside or about.st_gid != os.getegid() else 0o002
        if about.st_mode & others and (inside or not about.st_mode & stat.S_ISVTX):
            return f"other users can write to {path}"
    return None


def check_writable(folder: Path) -> None:
    """Raise `OSError` if a folder can neither be written nor made; leave no trace."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder")
    tempfile.TemporaryFile(dir=folder).close()  # permissions do not show read-only disks


def write_synced(path: Path, data: bytes | memoryview, *, mode: int = 0o666) -> None:
    """Write a file and sync it to the disk; a new one gets `mode` less the umask."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to the disk, if the system can."""
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def replace_synced(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace a file atomically, with `mode`: a power cut leaves the old or the new one, a full disk the old one."""
    beside = path.with_name(f"{path.name}.new-{uuid.uuid4().hex[:8]}")  # other ranks may write the same file
    try:
        write_synced(beside, data, mode=mode)
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    sync_folder(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or make a synced copy where that is impossible, as on another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())


def sums_of(folder: Path, names: Iterable[str], known: Mapping[str, str] | None = None) -> str:
    """Return the digests of a folder's files as `sha256sum` writes them; `known` digests are not computed."""
    lines = []
    for name in names:
        digest = (known or {}).get(name)
        if digest is None:
            with open(folder / name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {name}\n")
    return "".join(lines)


def wrong_sums(folder: Path, actual: str) -> str | None:
    """Say which files of a folder do not match the digests in its `SUMS`; None if all do."""
    expected = (folder / SUMS).read_text(encoding="utf-8")
    if expected == actual:
        return None
    wrong = [line.split("  ")[-1] for line in actual.splitlines() if line not in expected.splitlines()]
    return f"{' and '.join(wrong) or SUMS} does not have the digest that was written"


def is_at(fd: int, path: Path) -> bool:
    """Return whether a path leads to an open file or folder."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def moved_to(fd: int, path: Path) -> Path | None:
    """Return the new path of an open file or folder; None if it was not moved, was deleted, or cannot be found."""
    if is_at(fd, path):
        return None
    with contextlib.suppress(OSError):
        now = Path(os.readlink(f"/proc/self/fd/{fd}"))  # on Linux alone
        return now if is_at(fd, now) else None
    return None

"""Copies of artifacts in a spool, made when they are logged and removed when the store has them.

Each lies in a numbered folder, `files/<number>/<name>`, which is what an op names.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from rl8x.tracking.journal import FILES, JOURNAL
from rl8x.tracking.names import artifact_name, readable
from rl8x.tracking.protocol import TrackingError


def highest_number(spool: Path) -> int:
    """Return the highest number of a copy in a spool; 0 without one."""
    names = [path.name for path in (spool / FILES).glob("*")]
    return max((int(name) for name in names if name.isascii() and name.isdigit() and len(name) < 10), default=0)


def keep(spool: Path, number: int, source: Path, besides: Collection[Path] = ()) -> str:
    """Copy a file or folder into a spool; returns its path there, in which all names are UTF-8.

    No other copy has its number. All spools are left out, and the folders `besides`.
    """
    name = artifact_name(source.name)
    target = spool / FILES / str(number) / name
    try:
        (spool / FILES).mkdir(exist_ok=True)  # but no spool where there is none: it was moved or deleted
        target.parent.mkdir()
        if source.is_dir():
            spools = [path.parent for path in spool.parent.glob(f"*/{JOURNAL}")]
            left_out = {os.path.realpath(folder) for folder in (*besides, spool.parent, *spools)}
            shutil.copytree(source, target, ignore=lambda folder, names: _left_out(folder, names, left_out))
            _rename_non_utf8(target)
        else:
            shutil.copyfile(source, target)
    except OSError:
        shutil.rmtree(target.parent, ignore_errors=True)  # half a copy would only take room that rows need
        raise
    return f"{FILES}/{number}/{name}"


def _left_out(folder: str, names: list[str], paths: set[str]) -> list[str]:
    """List the names in a folder to leave out: those that lead to one of `paths`, or to a parent of the folder."""
    here = Path(os.path.realpath(folder))
    back = paths | {str(path) for path in (here, *here.parents)}
    return [name for name in names if os.path.realpath(here / name) in back]


def _rename_non_utf8(folder: Path) -> None:
    """Rename files and folders whose names are not UTF-8, since no store takes them."""
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in (*folders, *files):
            if readable(name) != name:
                os.rename(os.path.join(parent, name), os.path.join(parent, artifact_name(name)))


def kept_path(spool: Path, file: str) -> Path:
    """Return the path of a copy; raises `TrackingError` where what an op names would lie outside the spool."""
    name = PurePosixPath(artifact_name(file))
    if name.parts[0] != FILES or len(name.parts) != 3:
        raise TrackingError(f"not a file of this spool: {name}")
    return spool / name


def check_kept(path: Path, spool: Path) -> None:
    """Refuse what no spool of ours has: a link on the way to a copy or in a copied folder, a device, a pipe.

    Nothing is opened.
    """
    if not os.path.lexists(path):
        raise TrackingError("its file is not in the spool")
    for folder in list(path.relative_to(spool).parents)[:-1]:
        _check_mode(spool / folder)
    left = [path]
    while left:
        entry = left.pop()
        if stat.S_ISDIR(_check_mode(entry)):
            left += entry.iterdir()


def _check_mode(path: Path) -> int:
    mode = path.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise TrackingError(f"{path.name} is no plain file: links are not followed, devices and pipes not read")
    return mode

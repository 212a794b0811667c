"""The cache of compiled programs on disk, keyed by a hash of everything that they depend on."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import shutil
import tempfile
import time
import uuid
import warnings
from pathlib import Path
from typing import Any, Final, NamedTuple

import platformdirs
import torch

from rl8x import __version__
from rl8x.disk import exposure, is_own_file

_LIMIT_MB: Final = 500  # a program takes 0.5 MB
# A program that was written or looked up less than this many seconds ago is never removed: a run may be about to load
# it.
_IN_USE_S: Final = 3600.0
_MOST_NOTES: Final = 4096
# Age in seconds after which the temporary files of a build count as abandoned.
_LONG_AGO_S: Final = 600.0


def limit_mb() -> float:
    """Return the cache's size limit in MB; a `ValueError` if `RL8X_CACHE_MB` is not a finite number of at least 0."""
    given = os.environ.get("RL8X_CACHE_MB", str(_LIMIT_MB))
    with contextlib.suppress(ValueError):
        if math.isfinite(limit := float(given)) and limit >= 0:
            return limit
    raise ValueError(f"RL8X_CACHE_MB must be a number of megabytes, finite and at least 0; got {given!r}.")


class Artifact(NamedTuple):
    """A compiled program on disk."""

    key: str  # its file name without the suffix
    size: int  # in bytes
    used: float  # time of its last use, in Unix seconds
    torch: str  # the version that compiled it; empty if unknown


class Artifacts:
    """A folder of compiled programs: shared libraries, each followed by a line of JSON with its hash and verdict.

    Several processes may use it at once, since files are renamed into it. A program is loaded only if nobody but this
    user and root could have written it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        given = os.environ.get("RL8X_CACHE_DIR") or platformdirs.user_cache_dir("rl8x", appauthor=False)
        self.folder = (folder or Path(given)).absolute()
        self.left = ""  # the configured folder, and why this process uses a temporary one instead

    def make_folder(self) -> None:
        """Create the folder, private to this user since it contains code; use a temporary one if that fails."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._leave_if_exposed()
        if not os.access(self.folder, os.W_OK | os.X_OK):
            self._leave_folder("cannot be written to")

    def _leave_if_exposed(self) -> None:
        """Use a temporary folder if other users could put programs into this one."""
        why = exposure(self.folder) if not self.left and self.folder.is_dir() else None
        if why is not None:
            warnings.warn(
                f"compiled programs are neither taken from {self.folder} nor kept there, since {why}: set "
                "RL8X_CACHE_DIR to a folder that only you can write to, in folders that only you can write to.",
                RuntimeWarning,
                stacklevel=2,
            )
            self._leave_folder(f"is not safe ({why})")

    def _leave_folder(self, why: str) -> None:
        self.left, self.folder = f"{self.folder} {why}", Path(tempfile.mkdtemp(prefix="rl8x-cache-"))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)

    def beside(self, kind: str) -> Path:
        """Return a unique temporary path; process IDs are not unique among containers that share a folder."""
        return self.folder / f".{uuid.uuid4().hex}.{kind}"

    def library(self, key: str) -> Path:
        """Return the path of a key's shared library."""
        return self.folder / f"{key}.so"

    def find(self, key: str) -> dict[str, Any] | None:
        """Return a program's notes if its hash matches; remove a damaged program, or one that others can write to."""
        self._leave_if_exposed()
        path = self.library(key)
        with contextlib.suppress(OSError, ValueError):
            if is_own_file(path):
                _, notes = _read(path)
                os.utime(path)
                return notes
        with contextlib.suppress(OSError):  # no such file, or another user's folder
            path.unlink()
        return None

    def put(self, key: str, built: Path) -> None:
        """Add a shared library."""
        self._write(key, built.read_bytes(), {"torch": torch.__version__})
        self.trim()

    def judge(self, key: str, verdict: str) -> None:
        """Store the verdict on a program in its notes: empty if the program agrees with its function."""
        with contextlib.suppress(OSError, ValueError):
            library, notes = _read(self.library(key))
            self._write(key, library, notes | {"verdict": verdict})

    def _write(self, key: str, library: bytes, notes: dict[str, Any]) -> None:
        """Write a program that only its owner may change, whatever the umask."""
        beside, notes = self.beside("so"), notes | {"sha256": hashlib.sha256(library).hexdigest()}
        beside.write_bytes(library + b"\n" + json.dumps(notes).encode())
        beside.chmod(beside.stat().st_mode & ~0o022)
        beside.replace(self.library(key))

    def list(self) -> list[Artifact]:
        """Return all programs, most recently used first."""
        artifacts = []
        for path in self.folder.glob("[!.]*.so"):
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                stat, notes = path.stat(), {}
                with contextlib.suppress(ValueError, TypeError), path.open("rb") as file:
                    file.seek(-min(stat.st_size, _MOST_NOTES), os.SEEK_END)
                    notes = dict(json.loads(file.read().rpartition(b"\n")[2]))
                artifacts.append(Artifact(path.stem, stat.st_size, stat.st_mtime, str(notes.get("torch", ""))))
        return sorted(artifacts, key=lambda artifact: -artifact.used)

    def clear(self) -> int:
        """Remove all programs, and return the number of bytes freed."""
        artifacts = self.list()
        for artifact in artifacts:
            self.library(artifact.key).unlink(missing_ok=True)
        return sum(artifact.size for artifact in artifacts)

    def trim(self) -> None:
        """Remove the least recently used programs beyond the size limit, except those that may be in use."""
        left, since = limit_mb() * 1e6, time.time() - _IN_USE_S
        for artifact in self.list():
            left -= artifact.size
            if left < 0 and artifact.used < since:
                self.library(artifact.key).unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Remove old temporary files of builds that were killed, for example when a run ended during a build."""
        for left in self.folder.glob(".*"):
            with contextlib.suppress(OSError):  # another process has removed it, or another user owns it
                if left.stat().st_mtime < time.time() - _LONG_AGO_S:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()


def _read(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return a program and its notes; a `ValueError` if they are damaged."""
    library, _, line = path.read_bytes().rpartition(b"\n")
    notes = json.loads(line)
    if not isinstance(notes, dict) or notes.get("sha256") != hashlib.sha256(library).hexdigest():
        raise ValueError(f"{path} is damaged")
    return library, notes


def cpu_info() -> str:
    """Return Linux's description of the processors; an empty string on other systems."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


@functools.cache
def surroundings() -> str:
    """Return a hash of all that programs depend on except their texts: versions, processor, C++ compiler."""
    own = [path.read_bytes() for path in sorted(Path(__file__).parent.iterdir()) if path.is_file()]
    kinds = ("vendor_id", "model", "flags", "Features")
    processor = sorted({line for line in cpu_info().splitlines() if line.startswith(kinds)})
    compiler = os.environ.get("CXX") or "g++"
    place = os.path.realpath(shutil.which(compiler.split()[0]) or compiler)  # the path contains the version
    processor = processor or [platform.processor(), platform.machine()]
    facts = [__version__, torch.__version__, torch.version.git_version, compiler, place, processor]
    return hashlib.sha256(b"".join([*own, json.dumps(facts).encode()])).hexdigest()


def key_of(program: str) -> str:
    """Return the cache key of a program's text, which also depends on `surroundings`."""
    return hashlib.sha256(f"{surroundings()} {program}".encode()).hexdigest()[:40]

"""The cache of compiled programs on disk, keyed by a hash of everything that a compiled program depends on."""

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
# Age in seconds after which what a build left counts as abandoned.
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
    used: float  # when it was last used, in seconds since 1970
    torch: str  # the version that compiled it; empty if unknown


class Artifacts:
    """A folder of compiled programs: shared libraries that end with a line of JSON, with a hash and the verdict.

    Several processes may use it at once, since files are renamed into it. A program is loaded only if nobody but this
    user and root could have written it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        given = os.environ.get("RL8X_CACHE_DIR") or platformdirs.user_cache_dir("rl8x", appauthor=False)
        self.folder = (folder or Path(given)).absolute()
        self.left = ""  # the configured folder, and why a temporary one of this process is used instead

    def make_folder(self) -> None:
        """Create the folder, readable by this user alone since it contains code; a temporary one if that fails."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._leave_if_exposed()
        if not os.access(self.folder, os.W_OK | os.X_OK):
            self._leave_folder("cannot be written to")

    def _leave_if_exposed(self) -> None:
        """Use a temporary folder if others could put programs of theirs into this one."""
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
        """Return a unique temporary path; process IDs would not do, as containers that share a folder repeat them."""
        return self.folder / f".{uuid.uuid4().hex}.{kind}"

    def library(self, key: str) -> Path:
        """Return the path of a key's shared library."""
        return self.folder / f"{key}.so"

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the notes of a program if its hash matches; remove it if it is damaged, or not ours."""
        self._leave_if_exposed()
        path = self.library(key)
        with contextlib.suppress(OSError, ValueError):
            if is_own_file(path):
                _, notes = _read(path)
                os.utime(path)
                return notes
        with contextlib.suppress(OSError):  # there is none, or the folder is another user's
            path.unlink()
        return None

    def put(self, key: str, built: Path) -> None:
        """Add a shared library."""
        self._write(key, built.read_bytes(), {"torch": torch.__version__})
        self.trim()

    def judge(self, key: str, verdict: str) -> None:
        """Keep the verdict on a program in its notes: empty if it agrees with its function."""
        with contextlib.suppress(OSError, ValueError):
            library, notes = _read(self.library(key))
            self._write(key, library, notes | {"verdict": verdict})

    def _write(self, key: str, library: bytes, notes: dict[str, Any]) -> None:
        """Write a program, which its owner alone may change, whatever the umask."""
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
        """Remove least recently used programs until the limit holds, except those that may be in use."""
        left, since = limit_mb() * 1e6, time.time() - _IN_USE_S
        for artifact in self.list():
            left -= artifact.size
            if left < 0 and artifact.used < since:
                self.library(artifact.key).unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Remove what builds left in the folder that were killed, as when a run ends during a build."""
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
    """Return what Linux says about the processors; nothing on other systems."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


@functools.cache
def surroundings() -> str:
    """Return a hash of what a compiled program depends on beside its description: versions, processor, C++ compiler."""
    own = [path.read_bytes() for path in sorted(Path(__file__).parent.iterdir()) if path.is_file()]
    kinds = ("vendor_id", "model", "flags", "Features")
    processor = sorted({line for line in cpu_info().splitlines() if line.startswith(kinds)})
    compiler = os.environ.get("CXX") or "g++"
    place = os.path.realpath(shutil.which(compiler.split()[0]) or compiler)  # it names the version
    processor = processor or [platform.processor(), platform.machine()]
    facts = [__version__, torch.__version__, torch.version.git_version, compiler, place, processor]
    return hashlib.sha256(b"".join([*own, json.dumps(facts).encode()])).hexdigest()


def key_of(program: str) -> str:
    """Return the cache key of a described program, which also depends on `surroundings`."""
    return hashlib.sha256(f"{surroundings()} {program}".encode()).hexdigest()[:40]

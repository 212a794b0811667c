"""Modules that this user has trusted on this machine: remembered by the paths and digests of their files.

Code is trusted if the user said so, with `--trust`, `trust=True` or by typing a module's name, and it then ran; owner
and place of a file do not matter. A module whose files have changed is not trusted any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

from rl8x.disk import exposure, is_own_file, replace_synced

Entries: TypeAlias = dict[str, dict[str, Any]]
"""By the file of each trusted module: `files`, digests of it and of the neighbouring files that it imports, and
`called`, its functions that may be called."""

_OWN: Final = ("rl8x", "torch", "gymnasium", "__main__")
_forgets: bool = False
newly: Final[list[str]] = []
"""The files of newly trusted modules, until a command has reported them."""


def memory() -> Path:
    """Return the path of the file that remembers trust; deleting the file forgets all."""
    import platformdirs  # imported late, since `rl8x doctor` works without it

    return Path(platformdirs.user_config_dir("rl8x", appauthor=False)) / "trusted.json"


def unsafe() -> str | None:
    """Return why the file is not used, for example because others could change it; None if it is safe or missing."""
    file = memory()
    if not file.is_absolute():  # without a home folder it would lie in the working directory
        return f"there is no folder for it: {file}"
    if not os.path.lexists(file):
        return None
    why = exposure(file.parent)
    return why or (None if is_own_file(file) else f"{file} is not this user's alone")


def entries() -> Entries:
    """Return the remembered entries; none if the file is damaged, or others could have written it."""
    found: Entries = {}
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
        if unsafe() is None:
            for main, entry in json.loads(memory().read_bytes()).items():
                found[main] = {"files": dict(entry["files"]), "called": list(entry["called"])}
    return found


def is_intact(entry: dict[str, Any]) -> bool:
    """Whether all files of an entry are unchanged since it was trusted."""
    return all(_digest(path) == digest for path, digest in entry["files"].items())


def is_remembered(module: str, function: str | None = None) -> bool:
    """Whether the user trusted a module on this machine, and all its files are unchanged; nothing is imported."""
    fitting = (entry for entry in _entries_with(module) if function is None or function in entry["called"])
    return any(map(is_intact, fitting))


def is_changed(module: str) -> bool:
    """Whether a module was trusted and its files have changed since."""
    return not all(map(is_intact, _entries_with(module)))


def _entries_with(module: str) -> list[dict[str, Any]]:
    known = entries()
    files = set(_files_of(module)) if known else set()
    return [entry for entry in known.values() if files and entry["files"].keys() >= files]


def remember(module: ModuleType, function: str | None = None) -> None:
    """Remember, if possible, that the user trusts an imported module, and the neighbouring modules that it imports."""
    main = None if _forgets else _file_of(module)
    if main is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    known = {path: entry for path, entry in entries().items() if os.path.exists(path)}
    before = known.get(main, {"files": {}, "called": []})
    files = _beside(module, main) if function is None else before["files"]
    called = before["called"] if files.get(main) == before["files"].get(main) else []
    entry = {"files": files, "called": sorted({*called, *([] if function is None else [function])})}
    if entry != before and files and _write({**known, main: entry}) and function is None:
        newly.append(main)


@contextlib.contextmanager
def nothing_remembered() -> Iterator[None]:
    """Remember no trust within the context, where it is not the user who gives it."""
    global _forgets
    before, _forgets = _forgets, True
    try:
        yield
    finally:
        _forgets = before


def _write(known: Entries) -> bool:
    """Replace the file, for this user alone; return False if that fails or others could change it."""
    file = memory()
    with contextlib.suppress(OSError):
        if file.is_absolute():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if exposure(file.parent) is None:
                replace_synced(file, json.dumps(known, indent=1).encode(), mode=0o600)
                return True
    return False


def _digest(path: str) -> str | None:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return None


def _file_of(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None)
    return os.path.realpath(file) if isinstance(file, str) else None


def _beside(module: ModuleType, main: str) -> dict[str, str]:
    """Return the digests of imported files in a module's package, and of those in its folder that are not installed."""
    top, above = module.__name__.partition(".")[0], Path(main).parents
    depth = module.__name__.count(".") + (os.path.basename(main) == "__init__.py")
    root = str(above[min(depth, len(above) - 1)])
    installed = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    roots = [os.path.realpath(path) for path in installed]

    def lies_in(file: str, folder: str) -> bool:
        return file.startswith(os.path.join(folder, ""))

    digests = {}
    for name, other in list(sys.modules.items()):
        file, first = _file_of(other), name.partition(".")[0]
        if file is None or first in _OWN:
            continue
        is_local = lies_in(file, root) and root not in roots and not any(lies_in(file, path) for path in roots)
        digest = _digest(file) if first == top or is_local else None
        if digest is not None:
            digests[file] = digest
    return digests


def _files_of(module: str) -> list[str]:
    """Find the files of a module and of its packages, also in the working directory, without running any."""
    files: list[str] = []
    names, folders = module.split("."), None
    for length in range(1, len(names) + 1):
        name = ".".join(names[:length])
        spec = _spec(name, folders) or (PathFinder.find_spec(name, [os.getcwd()]) if length == 1 else None)
        folders = None if spec is None else spec.submodule_search_locations
        origin = spec.origin if spec is not None and spec.has_location else None
        if (origin if length == len(names) else folders) is None:
            return []  # no such module, or it has no file
        if origin is not None:
            files.append(os.path.realpath(origin))
    return files


def _spec(name: str, folders: Any) -> ModuleSpec | None:
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
    specs = (finder.find_spec(name, folders) for finder in finders)
    with contextlib.suppress(KeyError):  # for a namespace package within another, whose parent must be imported
        return next((spec for spec in specs if spec is not None), None)
    return None

"""Naming importable things by dotted path, and importing what a path names: all that a file may make rl8x import."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re
from typing import Any, Final

_DOTTED: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


def is_dotted(text: str) -> bool:
    """Whether a text has the form of a dotted path, `module.attribute`."""
    return _DOTTED.fullmatch(text) is not None


def import_named(path: str) -> Any:
    """Import what a dotted path names: an attribute of a module.

    Args:
        path: For example `my_package.my_module.MyEnv`.

    Raises:
        ValueError: If it is no dotted path, or there is no such module or attribute.
    """
    if not is_dotted(path):
        shown = repr(path) if len(repr(path)) <= 80 else f"{path!r:.77}..."
        raise ValueError(f"a dotted path looks like package.module.Name; got {shown}.")
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"cannot import {path!r}: {reason}. Is it installed, or in the working directory?") from None
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"module {module_name!r} has no {name!r}.{hint}")
    return getattr(module, name)


def dotted_path(thing: Any) -> str | None:
    """Name a class or function by the shortest dotted path under which `import_named` finds it; None where none does.

    The shortest, because packages show there what they mean to keep: `rl8x.PPOConfig`, wherever its file may move.
    """
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name:
        return None
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        path = ".".join((*parts[:length], name))
        with contextlib.suppress(ValueError):
            if import_named(path) is thing:
                return path
    return None

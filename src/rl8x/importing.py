"""Imports objects that run files and checkpoints name, if they are trusted: importing runs code.

Modules that are imported already, and those of rl8x, torch and Gymnasium, need no trust. All others need `--trust` or
`trust=True` for the file, or a name typed by the user. `rl8x.trusted` remembers trust.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any, Final, TypeAlias

from rl8x.names import did_you_mean
from rl8x.trusted import is_changed, is_remembered, remember

Trust: TypeAlias = bool | Collection[str]
"""Which names may import any module: all (True), none (False), or the listed ones, which the user typed."""

CLASS: Final = "$class"
"""The key of a class in plain data, `{"$class": path}`."""
NOT_PLAIN: Final = object()
"""The result of `to_plain` for values that cannot be saved to a file."""

_OWN: Final = ("rl8x", "torch", "gymnasium")
_DOTTED: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_GYMNASIUM_ID: Final = re.compile(r"-v\d+\s*$", re.ASCII)
# The name has a letter, unlike that of "cuda:0".
_ID_OF_MODULE: Final = re.compile(
    r"(?P<module>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?=.*[A-Za-z_])(?:[\w-]+/)?[\w.-]+\s*", re.ASCII
)


class UntrustedError(ValueError):
    """A name would run code that is not trusted."""


@contextlib.contextmanager
def importing_much() -> Iterator[None]:
    """Disable garbage collection within the context, for large imports, and exempt the imported objects for good."""
    # They are never freed; scanning them takes a fifth of the time of importing torch or MLflow, and 0.5 s at exit.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def is_dotted(text: str) -> bool:
    """Whether a text has the form of a dotted path, `module.attribute`."""
    return _DOTTED.fullmatch(text) is not None


def is_gymnasium_id(text: str) -> bool:
    """Whether a text has the form of a Gymnasium id with a version, such as `CartPole-v1` or `module:MyEnv-v0`."""
    return _GYMNASIUM_ID.search(text) is not None


def module_named(text: str) -> str | None:
    """Return the module that a dotted path or a Gymnasium id of the form `module:MyEnv-v0` may import, else None."""
    if is_dotted(text):
        return text.rpartition(".")[0]
    match = _ID_OF_MODULE.fullmatch(text)
    return None if match is None else match["module"]


def would_import(text: str) -> str | None:
    """Return the module that a text would import as a name, else None; for "left:right", only if the module exists."""
    module = module_named(text)
    if module is None or is_dotted(text) or is_gymnasium_id(text):
        return module
    top = module.partition(".")[0]
    return module if top in sys.modules or importlib.util.find_spec(top) is not None else None


def values_in(data: Any) -> Iterator[Any]:
    """Yield plain data itself and every value within it."""
    yield data
    for part in data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ():
        yield from values_in(part)


def keys_in(data: Any) -> Iterator[str]:
    """Yield every key of the mappings in plain data."""
    return (str(key) for value in values_in(data) if isinstance(value, Mapping) for key in value)


def texts(data: Any) -> Iterator[str]:
    """Yield every text in plain data, the keys of mappings too."""
    yield from keys_in(data)
    yield from (value for value in values_in(data) if isinstance(value, str))


def classes_in(data: Any) -> Iterator[str]:
    """Yield the paths of the classes in plain data."""
    return (value[CLASS] for value in values_in(data) if isinstance(value, Mapping) and set(value) == {CLASS})


def needs_trust(name: str) -> bool:
    """Whether a file with this name needs `--trust` in a new process, because its code is not remembered as trusted."""
    module = would_import(name)
    if module is None or module.partition(".")[0] in _OWN:
        return False
    named = getattr(sys.modules.get(module), name.rpartition(".")[2], None)
    return not is_remembered(module, None if named is None or isinstance(named, type) else name)


def check_gymnasium_id(name: str, trust: Trust) -> None:
    """Raise a `ValueError` for a Gymnasium id whose module does not exist, or is not trusted."""
    module, colon, own = name.partition(":")
    if ":" in own:
        raise ValueError(f"an id of Gymnasium's looks like module:namespace/Name-v0; got {name!r}.")
    if colon:
        _import_module(module, name, trust)  # as Gymnasium will do


def find_modules_here(trust: Trust) -> None:
    """Append the working directory to `sys.path`, where it hides nothing, if trusted names may be found there."""
    here = os.getcwd()
    if isinstance(trust, bool):
        wanted = trust
    else:
        tops = {module.partition(".")[0] for module in map(module_named, trust) if module is not None}
        wanted = any(PathFinder.find_spec(top, [here]) is not None for top in tops)
    if wanted and here not in sys.path:
        sys.path.append(here)


def _trusts(name: str, trust: Trust) -> bool:
    return trust if isinstance(trust, bool) else name in trust


def import_named(path: str, *, trust: Trust = False) -> Any:
    """Import the object at a dotted path, such as `my_package.my_module.MyEnv`; the caller checks its type."""
    if not is_dotted(path):
        shown = repr(path) if len(repr(path)) <= 80 else f"{path!r:.77}..."
        raise ValueError(f"a dotted path looks like package.module.Name; got {shown}.")
    module_name, _, name = path.rpartition(".")
    module = _import_module(module_name, path, trust)
    if not hasattr(module, name):
        of_script = " It stood in the script that ran then: define it in this one, or in a module that both import."
        hint = of_script if module_name == "__main__" else did_you_mean(name, dir(module))
        raise ValueError(f"module {module_name!r} has no {name!r}.{hint}")
    return getattr(module, name)


def _import_module(name: str, path: str, trust: Trust) -> ModuleType:
    """Import the module of a name if its code is trusted; remember new trust that the user has given."""
    top = name.partition(".")[0]
    is_new, is_trusted = name not in sys.modules and top not in _OWN, _trusts(path, trust)
    if is_new and not is_trusted:
        if not is_remembered(name):
            changed = " and has changed since you trusted it" if is_changed(name) else ""
            raise UntrustedError(
                f"{path!r} would import the module {name!r} and run its code, which is not rl8x's{changed}. If you "
                "trust that code, say so once: --trust on the command line, trust=True in Python, or import the "
                "module first."
            )
        if importlib.util.find_spec(top) is None:  # it is in the working directory
            sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"cannot import {path!r}: {reason}. Is it installed, or in the working directory?") from None
    if is_new and is_trusted:
        remember(module)
    return module


def import_class(path: str, kinds: tuple[type, ...], *, trust: Trust = False) -> Any:
    """Import the object at a dotted path: a subclass of one of some kinds, or anything if the name is trusted."""
    named = import_named(path, trust=trust)
    if isinstance(named, type) and issubclass(named, kinds):
        return named
    module = path.rpartition(".")[0]
    if _trusts(path, trust):
        remember(sys.modules[module], path)
        return named
    if is_remembered(module, path):
        return named
    listed = ", ".join(dict.fromkeys(kind.__name__ for kind in kinds))
    raise UntrustedError(
        f"{path!r} is not a subclass of {listed}, and nothing else may be used by its name alone. If you trust the "
        "file that names it, say so: --trust on the command line, trust=True in Python."
    )


def dotted_path(thing: Any) -> str | None:
    """Return the shortest dotted path by which `import_named` finds a class or function; None if there is none."""
    module, name = getattr(thing, "__module__", None) or "", getattr(thing, "__qualname__", None) or ""
    packages = itertools.accumulate(module.split("."), "{}.{}".format)  # a package keeps its path even if files move
    paths = (f"{each}.{name}" for each in packages if getattr(sys.modules.get(each), name, None) is thing)
    return next(filter(is_dotted, paths), None)


def to_plain(value: Any, form: Callable[[Any], Any] = lambda value: value) -> Any:
    """Return a value in a form for JSON, classes by their dotted path; `NOT_PLAIN` if it has none."""
    if isinstance(value, type):
        path = dotted_path(value)
        return NOT_PLAIN if path is None else {CLASS: path}
    value = form(value)
    if isinstance(value, Mapping):
        items = {key: to_plain(item, form) for key, item in value.items()}
        has_form = all(isinstance(key, str) and item is not NOT_PLAIN for key, item in items.items())
        return items if has_form else NOT_PLAIN
    if isinstance(value, list | tuple):
        listed = [to_plain(item, form) for item in value]
        return NOT_PLAIN if any(item is NOT_PLAIN for item in listed) else listed
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return NOT_PLAIN
    return value


def from_plain(value: Any, kinds: tuple[type, ...], *, trust: Trust = False) -> Any:
    """Return plain data with each `{"$class": path}` replaced by that class, which must be a subclass of `kinds`."""
    if isinstance(value, dict):
        if set(value) == {CLASS}:
            return import_class(str(value[CLASS]), kinds, trust=trust)
        return {key: from_plain(item, kinds, trust=trust) for key, item in value.items()}
    if isinstance(value, str) and not is_dotted(value) and would_import(value) is not None:
        check_gymnasium_id(value, trust)
    return [from_plain(item, kinds, trust=trust) for item in value] if isinstance(value, list) else value

"""The fingerprint of a function's trace: a cache key computed from the function's objects, without tracing it.

The fingerprint covers everything that a trace can depend on:

- the values of objects' attributes, and the layouts of tensors (programs read the tensors' values at each call);
- the sources of classes and functions, and of the modules that they import;
- for a user's own code also its bytecode, since the source may have been edited after it was loaded, and the values
  that its names refer to: globals, class attributes, closure cells;
- functions of torch or rl8x that a user has monkey-patched.

An object that cannot be described has no fingerprint, and the function is traced. A value that a user's name refers to
and that cannot be described is represented by its type.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import json
import pathlib
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

# Traces do not depend on generators, since random numbers are drawn outside of programs.
_IGNORED: Final = (torch.Generator, np.random.Generator, np.random.RandomState)
# Attributes that are skipped. Gymnasium creates the generators of spaces lazily.
_LEFT_OUT: Final = ("__weakref__", "__dict__", "_np_random", "_np_random_seed")
_HEAP_TYPE: Final = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE: set for classes that are defined in Python
_IN_C: Final = ("builtins", "_thread", "_io", "_queue", "_socket", "select")
_PLAIN: Final = (bool, int, str, bytes, type(None), complex, pathlib.PurePath)
_TORCH: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.dtype, np.generic)
_BUILTIN: Final = (
    property,
    classmethod,
    staticmethod,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    np.ufunc,
    type(torch.ops.aten.add),
    type(torch.ops.aten.add.Tensor),
)
_IN_TORCH: Final = (types.BuiltinFunctionType, types.MethodDescriptorType)
# Namespaces in which rl8x's own code looks up torch's functions.
_TORCH_FUNCTIONS: Final[tuple[tuple[str, Any], ...]] = (
    ("torch", torch),
    ("torch.Tensor", Tensor),
    ("torch.nn.functional", torch.nn.functional),
    ("torch.special", torch.special),
    ("torch.linalg", torch.linalg),
)
# Modules of rl8x whose functions are traced.
_COMPUTES: Final = tuple(
    f"rl8x.{name}"
    for name in (
        *("algorithms", "distributions", "envs", "functional", "models", "nn", "obs_moments", "policy", "portable"),
        *("q_values", "randomization", "replay", "rollouts", "spaces", "trees"),
    )
)
_MADE_OF_FUNCTIONS: Final = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    type(functools.cache(lambda: None)),
)


class Fingerprint(NamedTuple):
    """A text that identifies a trace, and the tensors that the trace may read.

    Attributes:
        text: Equal for objects that give the same trace.
        tensors: The tensors that a trace may read, by their path from the roots.
    """

    text: str
    tensors: dict[str, Tensor]

    def places(self, read: Sequence[Tensor]) -> list[str] | None:
        """Return the paths of tensors `[*]` that a trace read; None if one of them is unknown."""
        known = {_identity(tensor): place for place, tensor in self.tensors.items()}
        places = [known.get(_identity(tensor)) for tensor in read]
        return None if None in places else [place for place in places if place is not None]


def fingerprint(roots: Sequence[object]) -> Fingerprint | None:
    """Return the fingerprint of the trace that objects determine; None if one of them cannot be described."""
    walk = _Walk()
    try:
        parts = [walk.describe(root, str(i)) for i, root in enumerate(roots)]
        return Fingerprint(json.dumps([parts, walk.sources(), walk.patches()]), walk.tensors)
    except (_UnknownError, OSError, RecursionError):  # OSError: a source file is gone; RecursionError: deep nesting
        return None


class _UnknownError(Exception):
    """An object cannot be described."""


class _Walk:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._modules: set[str] = set()
        self._read: set[tuple[str, str]] = set()
        self._seen: dict[int, int] = {}
        self._held: list[object] = []  # keeps objects alive, so that no id is reused

    def describe(self, value: Any, place: str) -> Any:
        """Describe a value as plain data for JSON."""
        if isinstance(value, _PLAIN) or value is ... or value is NotImplemented:
            return [type(value).__name__, repr(value)]
        if isinstance(value, float):
            return value.hex()
        if isinstance(value, _TORCH):
            return [type(value).__name__, str(value)]
        if isinstance(value, _IGNORED):
            return type(value).__name__
        if isinstance(value, Tensor):
            self.tensors[place] = value
            return [str(value.dtype), list(value.shape), list(value.stride()), str(value.device), value.requires_grad]
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                raise _UnknownError
            return [str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
        if id(value) in self._seen:
            return ["seen", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        return [type(value).__name__, *self._compound(value, place)]

    def _compound(self, value: Any, place: str) -> list[Any]:
        if isinstance(value, enum.Enum):
            return [str(value), self._code(type(value))]
        if isinstance(value, Mapping):
            items = [[self.describe(key, place), self.describe(each, f"{place}.{key}")] for key, each in value.items()]
            standard = type(value).__module__ in ("builtins", "collections", "types", "rl8x.frozen")
            return items if standard else [items, *self._object(value, place)]
        if isinstance(value, list | tuple):
            items = [self.describe(each, f"{place}.{i}") for i, each in enumerate(value)]
            return [items, *([] if type(value) in (list, tuple) else [self._code(type(value))])]
        if isinstance(value, set | frozenset):
            return sorted(json.dumps(self.describe(each, place)) for each in value)
        if isinstance(value, functools.partial):
            return [self.describe(part, f"{place}.{name}") for name, part in _parts(value, "func", "args", "keywords")]
        if isinstance(value, types.MethodType):
            return [self.describe(part, f"{place}.{name}") for name, part in _parts(value, "__func__", "__self__")]
        if isinstance(value, types.FunctionType):
            return self._function(value, place)
        if isinstance(value, type):
            return [self._code(value), *[[*self._attributes(each, place)] for each in value.__mro__[:-1]]]
        if isinstance(value, _BUILTIN):
            return [str(getattr(value, "__qualname__", getattr(value, "__name__", "")))]
        return self._object(value, place)

    def _object(self, value: Any, place: str) -> list[Any]:
        """Describe an object by its class and its attributes."""
        kind = type(value)
        names = set(itertools.chain.from_iterable(getattr(each, "__slots__", ()) for each in kind.__mro__))
        attributes = {name: getattr(value, name) for name in names if isinstance(name, str) and hasattr(value, name)}
        if hasattr(value, "__dict__"):
            attributes |= vars(value)
        elif not names:
            raise _UnknownError
        # Objects implemented in C may have hidden state.
        if any(not base.__flags__ & _HEAP_TYPE for base in kind.__mro__[:-1]) or kind.__module__ in _IN_C:
            raise _UnknownError
        left_out = (*_LEFT_OUT, *getattr(kind, "not_traced", ()))
        described = [
            [name, self.describe(each, f"{place}.{name}")]
            for name, each in sorted(attributes.items())
            if name not in left_out
        ]
        return [self.describe(kind, place), described]

    def _function(self, function: types.FunctionType, place: str) -> list[Any]:
        """Describe a function by defaults and closure; a user's also by its bytecode and the values of its names."""
        try:
            captured = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # an empty cell
            raise _UnknownError from None
        held = (function.__defaults__, function.__kwdefaults__, captured)
        parts = [self._code(function), *[self.describe(each, f"{place}.{i}") for i, each in enumerate(held)]]
        if not _is_users_function(function):
            return parts
        names, known = sorted(_names(function.__code__)), function.__globals__
        values = [(name, known.get(name, sys.modules.get(name))) for name in names]
        meant = [[name, self._meant(value, names, f"{place}.{name}")] for name, value in values if value is not None]
        return [*parts, _bytecode(function.__code__), meant]

    def _meant(self, value: Any, names: Sequence[str], place: str) -> Any:
        """Describe what a name in a user's code refers to; of a module, its attributes that are among `names`."""
        if not isinstance(value, types.ModuleType):
            try:
                return self.describe(value, place)
            except RecursionError:
                raise
            except Exception:  # it cannot be described, or its attributes raise, as those of closed files may
                return type(value).__name__
        users, meanings = _is_users(value), list[Any]()
        if users:
            self._modules.add(value.__name__)
        for name in names:
            part, which = vars(value).get(name), (value.__name__, name)
            if which not in self._read and (users or _is_users_function(part)):
                self._read.add(which)
                meanings.append([name, self._meant(part, names, f"{place}.{name}")])
        return meanings

    def _attributes(self, cls: type, place: str) -> Iterator[list[Any]]:
        """Describe attributes of a class: all of a user's class, those that a user has patched of any other."""
        users, left_out = _is_users_name(cls.__module__), getattr(cls, "not_traced", ())
        for name, value in sorted(vars(cls).items()):
            functions = [each for each in _functions(value) if users or _is_users_function(each)]
            for function in functions:
                yield [name, self._meant(function, (), f"{place}.{name}")]
            if users and not functions and not name.startswith(("__", "_abc_")) and name not in left_out:
                yield [name, self._meant(value, (), f"{place}.{name}")]

    def _code(self, value: Any) -> str:
        """Return the qualified name of a class or function, and record the modules that contain its code."""
        for each in getattr(value, "__mro__", (value,)):
            self._modules.add(each.__module__)
        return f"{value.__module__}.{value.__qualname__}"

    def patches(self) -> list[Any]:
        """Describe monkey-patched functions of torch and rl8x that rl8x's own code calls."""
        patches = []
        for space, name, value in _patched():
            code = value.__code__ if isinstance(value, types.FunctionType) else None
            meant = self._meant(value, (), f"{space}.{name}")
            patches.append([space, name, meant, [] if code is None else _bytecode(code)])
        return patches

    def sources(self) -> list[Any]:
        """Describe the modules that contain the code found, and the user's modules that they import."""
        sources: dict[str, Any] = {}
        waiting = set(self._modules)
        while waiting:
            name = waiting.pop()
            module = sys.modules.get(name)
            if name in sources or module is None:
                continue
            sources[name] = _source(module)
            if _is_users(module):
                sources[name] = [sources[name], [*_globals(module)], [*_siblings(name)]]
                waiting |= {*_imported(module)}
            elif _top(name) == "rl8x":
                sources[name] = [sources[name], [*_globals(module)]]
        return sorted(sources.items())


def _patched() -> Iterator[tuple[str, str, Any]]:
    """Yield monkey-patched functions: the namespace, the name, and the value found there."""
    own = [(name, each) for name, each in sorted(sys.modules.items()) if name.startswith(_COMPUTES)]
    for space, names in (*_TORCH_FUNCTIONS, *own):
        for name, value in list(vars(names).items()):
            kind = type(value)
            if kind is types.FunctionType:
                is_other = not value.__code__.co_filename.startswith(_known_files()) or value.__module__ == "__main__"
            elif kind in _IN_TORCH:  # `torch.special.entr` is `special_entr`
                is_other = not value.__name__.strip("_").endswith(name.strip("_"))
            else:
                is_other = kind is functools.partial or (
                    not isinstance(value, type) and _is_users_name(kind.__module__)
                )
            if is_other:
                yield space, name, value


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), str(tensor.device)


def _parts(value: Any, *names: str) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(value, name)) for name in names)


def _top(name: str) -> str:
    return name.partition(".")[0]


@functools.cache
def _known_files() -> tuple[str, ...]:
    """Return path prefixes of code that is identified by a version or a source hash, and of generated code ("<")."""
    return (*_installed(), str(Path(__file__).parents[1]), "<")


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return the folders of installed packages, which their versions identify."""
    return tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def _is_users(module: types.ModuleType) -> bool:
    """Return whether a module is a user's own: neither installed nor part of rl8x."""
    file = getattr(module, "__file__", None)
    return file is not None and _top(module.__name__) != "rl8x" and not file.startswith(_installed())


def _is_users_name(name: str | None) -> bool:
    """Return whether the module of this name is a user's own, or not loaded."""
    module = sys.modules.get(name or "")
    return module is None or _is_users(module)


def _is_users_function(value: object) -> bool:
    return isinstance(value, types.FunctionType) and _is_users_name(value.__module__)


def _functions(value: object) -> list[types.FunctionType]:
    """Return the functions that an attribute of a class wraps."""
    parts = [value]
    if isinstance(value, _MADE_OF_FUNCTIONS):
        parts = [getattr(value, name, None) for name in ("__wrapped__", "func", "fget")]
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _names(code: types.CodeType) -> set[str]:
    """Return the names of globals, attributes and imports in a code object and the functions nested in it."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return {*code.co_names, *itertools.chain.from_iterable(inner)}


def _bytecode(code: types.CodeType) -> list[Any]:
    """Describe a code object independently of its file and line."""
    consts = [_bytecode(each) if isinstance(each, types.CodeType) else _constant(each) for each in code.co_consts]
    return [code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, consts]


def _constant(value: object) -> str:
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _source(module: types.ModuleType) -> str:
    """Return a hash of a module's source, or the version of the installed package that it belongs to."""
    file = getattr(module, "__file__", None)
    if _top(module.__name__) == "rl8x":
        return _own_source()
    if file is None:
        if module.__name__ == "__main__":
            raise _UnknownError  # an interactive session or a notebook
        return ""
    version = getattr(sys.modules.get(_top(module.__name__)), "__version__", None)
    if isinstance(version, str) and not _is_users(module):
        return version
    return _digest(file, Path(file).stat().st_mtime_ns)


@functools.cache
def _digest(file: str, _: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.cache
def _own_source() -> str:
    """Return a hash of rl8x's source."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _globals(module: types.ModuleType) -> Iterator[list[str]]:
    """Yield the plain values of a module and of its classes, which may have changed after import."""
    spaces = [vars(module), *[vars(each) for each in vars(module).values() if isinstance(each, type)]]
    for i, space in enumerate(spaces):
        for name, value in space.items():
            values = value if isinstance(value, tuple | list) else (value,)
            if not name.startswith("__") and all(isinstance(each, bool | int | float | str) for each in values):
                yield [str(i), name, repr(value)]


def _siblings(name: str) -> Iterator[list[str]]:
    """Yield the sources of loaded modules of the same package, which functions may import when called."""
    for other, module in sorted(sys.modules.items()):
        if other != "__main__" and _top(other) == _top(name) and getattr(module, "__file__", None):
            yield [other, _source(module)]


def _imported(module: types.ModuleType) -> Iterator[str]:
    """Yield the names of the user's modules whose objects a module refers to."""
    for value in vars(module).values():
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        other = sys.modules.get(name) if isinstance(name, str) else None
        if other is not None and _is_users(other):
            yield other.__name__

"""Names, values and steps as MLflow takes them, checked where they are logged: one bad name spoils a whole request."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import posixpath
import re
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.secrets import logger

_log = logger(__name__)
_ValueT = TypeVar("_ValueT")

MAX_NAME_LENGTH = 250
MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 8000
_ILLEGAL = re.compile(r"[^/\w.\- :]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def readable(text: str) -> str:
    """Escape what no store takes: parts that are not UTF-8, as arguments in Latin-1 leave them, and null bytes.

    Arguments in UTF-8 that an ASCII locale left unread are read.
    """
    with contextlib.suppress(UnicodeEncodeError):
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def legal_name(name: str) -> str:
    """Turn any text into a name that MLflow takes: letters, digits, `_ - . : /` and space, at most 250 characters.

    A legal name comes back as it is. Illegal characters become `_`, empty parts of the path go, a name that is too
    long ends in a digest of the whole. Raises `TypeError`, and `ValueError` where nothing is left.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name must be a str; got {type(name).__name__} {name!r}")
    parts = [part if part.strip(".") else "_" * len(part) for part in _ILLEGAL.sub("_", name).split("/") if part]
    legal = "/".join(parts)
    if not legal:
        raise ValueError(f"a name must have at least one character that is not '/'; got {name!r}")
    if len(legal) > MAX_NAME_LENGTH:
        legal = f"{legal[: MAX_NAME_LENGTH - 9]}-{digest(readable(name))[:8]}"
    return legal


def digest(text: str) -> str:
    """Return sixteen letters that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fitted(name: str, text: str) -> tuple[str, str | None]:
    """Cut a param to what a store takes; returns it and the artifact that is to have the whole text, if it is cut."""
    if len(text) <= MAX_PARAM_LENGTH:
        return text, None
    file = f"params/{name.replace(':', '_')}.txt"
    if len(file.encode()) > 250:  # of a file's name, in bytes; param names may be longer
        file = f"params/{digest(name)}.txt"
    note = f" ... (the whole value is the artifact {file})"
    return text[: MAX_PARAM_LENGTH - len(note)] + note, file


def typed_name(name: str | None, is_unique: bool) -> str | None:
    """Return a run's name as a command started in this folder takes it; None where it would not find the run."""
    if not name or not is_unique or not name.isprintable() or name.startswith("-") or os.path.exists(name):
        return None  # it is unknown, or would be taken for something else
    return shlex.quote(name)


class NameTable:
    """Remembers which legal name each given name got, and numbers those that would become one: `a_`, `a_-2`.

    Where it is told what `kind` of thing is named, it warns at the first use of a name that is not legal.

    Args:
        kind: What is named.
        before: The `state` of the table by which the run began.
    """

    def __init__(self, kind: str = "", before: Mapping[str, str] = MappingProxyType({})) -> None:
        self._kind = kind
        self._legal = dict(before)
        self._given = {legal: name for name, legal in before.items()}

    @property
    def state(self) -> dict[str, str]:
        """The names that another process could take otherwise: all that are not legal, and that one of them is like."""
        changed = {name: legal for name, legal in self._legal.items() if legal != name}
        return changed | {other: other for other in map(legal_name, changed) if other in self._legal}

    def legal(self, named: Mapping[str, _ValueT]) -> Mapping[str, _ValueT]:
        """Return values under the legal ones of their names, whatever order they come in; raises as `legal_name`."""
        new = [name for name in named if name not in self._legal]
        for name in sorted(new, key=lambda name: (legal_name(name) != name, name)):
            self.add(name)
        return {self._legal[name]: value for name, value in named.items()}

    def add(self, name: str) -> str:
        """Return the legal name of `name`, which no other name has."""
        if name in self._legal:
            return self._legal[name]
        first = legal = legal_name(name)
        number = 1
        while self._given.setdefault(legal, name) != name:
            number += 1
            legal = f"{first[: MAX_NAME_LENGTH - len(f'-{number}')]}-{number}"
        self._legal[name] = legal
        if number > 1:
            _log.warning("tracking: %r is logged as %r, since %r is called %r", name, legal, self._given[first], first)
        elif legal != name and self._kind:
            _log.warning("tracking: the %s %r is logged as %r, which MLflow takes", self._kind, name, legal)
        return legal


def metric_value(name: str, value: object) -> float:
    """Turn a number (or a tensor or array of one) into a float, or raise `TypeError`; NaN and infinities stay."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"metric {name!r} must be one number; got {type(value).__name__} {value!r:.80}") from error


def metric_step(step: object, quantity: str = "step") -> int:
    """Turn a step, or a time in milliseconds, into an int; raises `TypeError`, and `ValueError` beyond 64 bits."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{quantity} must be an integer; got {type(step).__name__} {step!r:.80}") from error
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{quantity} must fit into 64 bits; got {number!s:.80}")
    return number


def artifact_name(name: str) -> str:
    """Return an artifact's name as a store has it; `TrackingError` for what is not a relative path inside its folder.

    What is not UTF-8 in it is written as numbers.
    """
    text = _SURROGATE.sub(lambda surrogate: f"_u{ord(surrogate[0]):x}", str(name))
    path = posixpath.normpath(text) if text.strip() else "."
    odd = path == "." or text.startswith(("/", "~")) or "\\" in text or "\0" in text
    if odd or ":" in text.split("/")[0] or ".." in text.split("/"):
        raise TrackingError(f"an artifact's name must be a relative path without '..', ':' or '\\'; got {text!r}")
    return path

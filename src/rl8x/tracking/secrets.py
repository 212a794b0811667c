"""Take passwords and tokens out of every text that leaves the process: tags, files, messages.

Two kinds are found: what stands in a URI at the place of a password or token, whoever's it is, and the values that this
process knows as secrets, wherever they stand: of environment variables, of URIs in them, on its command line or given.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN: Final = "***"

_NAMES: Final = (
    "password|passwd|passphrase|pwd|token|secret|api[_-]?key|access[_-]?key|account[_-]?key|private[_-]?key|secret[_-]?key"
    "|signature|connection[_-]?string"
)
# Up to the last `@`, since people write `/` and `@` in passwords as they are. A port and a path with `@` are none.
_PASSWORD: Final = re.compile(r"(://(?!\[)[^\s/:?#]*:)(?!\d{1,5}(?:[/?#\"'<>`]|$))(\S{1,4000})(?=@)")
_PASSWORD_IN_SQL: Final = re.compile(r"((?:postgresql|mysql|mssql)[\w+]*://[^\s/:]*:)(\S{1,4000})(?=@)", re.IGNORECASE)
# A user without a password is mostly a token; by these schemes it is the name of a user, or of a container.
_NAMED: Final = r"ssh|sftp|scp|rsync|postgres\w*|mysql|mariadb|mssql|oracle|wasbs?|abfss?|hdfs|file"
_LONE_TOKEN: Final = re.compile(
    rf"(?<![\w+.-])((?![\w+.-]*\b(?:{_NAMED})\b[\w+.-]*://)[\w+.-]+://)([^\s/:?#]+)(?=@)", re.IGNORECASE
)
# Git's servers take a token with an empty password, or with this one.
_TOKEN_AS_USER: Final = re.compile(r"(https?://)([^\s/:?#@]+)(?=:(?:x-oauth-basic)?@(?!\S*@))", re.IGNORECASE)
_QUERY: Final = re.compile(
    rf"([?&;#](?:[\w.-]*(?:{_NAMES})|pass|sig|odbc_connect)=)([^\s&\"'<>`]+)", re.IGNORECASE | re.ASCII
)
_IN_URIS: Final = (_TOKEN_AS_USER, _PASSWORD_IN_SQL, _PASSWORD, _LONE_TOKEN, _QUERY)
_HIDDEN_IN_DATA: Final = re.compile(r"(?<!\*)\*\*\*(?!\*)")
_HIDDEN_IN_URI: Final = re.compile(r"[/:]\*\*\*:?@|[?&;#][\w.-]+=\*\*\*(?=[&\s\"'<>`]|$)")
_SECRET_NAME: Final = re.compile(rf"(?:^|[\W_])(?:{_NAMES})$|(?:password|passwd|secret|apikey)$", re.IGNORECASE)
_NOT_SECRETS: Final = ("PWD", "OLDPWD")  # folders
_FLAGS: Final = ("true", "false", "none", "null")

# What is shorter is hidden in URIs only: as a piece of other words it would be everywhere.
_SHORTEST: Final = 4
# What is shorter is hidden as a whole word only, and not in data that is read back.
_STRONG: Final = 8
_LONG: Final = 20

_given: dict[str, None] = {}


def learn(uri: str) -> None:
    """Remember a tracking URI that has a secret, to hide that wherever it occurs, and to find the whole URI again."""
    if hide_in_uris(uri) != uri and not is_hidden(uri):
        _given[uri] = None


def recall(shown: str) -> str | None:
    """Return the last learned URI that looks like this without its secrets; None if there is none."""
    return next((uri for uri in reversed(list(_given)) if hide_in_uris(uri) == shown), None)


def hide(text: str) -> str:
    """Replace each password and token in a text for a person to read."""
    return _known(_SHORTEST).sub(HIDDEN, hide_in_uris(text))


def hide_in_uris(text: str) -> str:
    """Replace passwords and tokens where they stand in a URI; the same text gives the same in every process."""
    if "://" in text:
        for pattern in _IN_URIS[:-1]:
            text = pattern.sub(rf"\1{HIDDEN}", text)
    return _QUERY.sub(rf"\1{HIDDEN}", text) if "=" in text else text


def hide_in_data(data: Any) -> Any:
    """Replace secrets in the strings of data that programs read: those in URIs, and long ones anywhere."""
    return _replaced(data, _known(_STRONG))


def hide_in_words(words: Iterable[str]) -> list[str]:
    """Replace secrets in the words of a command line: in URIs, and after options such as `--password`."""
    hidden, is_value = [], False
    for word in words:
        name, equals, value = word.partition("=")
        names_one = _SECRET_NAME.search(name) is not None
        if is_value and not word.startswith("-"):
            hidden.append(HIDDEN)
        else:
            hidden.append(f"{name}={HIDDEN}" if names_one and value else hide(word))
        is_value = names_one and name.startswith("-") and not equals
    return hidden


def is_hidden(text: str) -> bool:
    """Return whether something was taken out of a URI here."""
    return _HIDDEN_IN_URI.search(text) is not None


def find_hidden(data: Any, name: str) -> str | None:
    """Return where in plain data something was taken out of a text, as in `env_kwargs.url`; None where nowhere."""
    if isinstance(data, str):
        return name if _HIDDEN_IN_DATA.search(data) else None
    parts: list[tuple[Any, str]] = []
    if isinstance(data, Mapping):
        parts = [(value, f"{name}.{key}") for key, value in data.items()]
    elif isinstance(data, list | tuple):
        parts = [(value, f"{name}[{index}]") for index, value in enumerate(data)]
    return next((found for value, where in parts if (found := find_hidden(value, where)) is not None), None)


def showable(error: Exception) -> Exception | None:
    """Return an error that a traceback may show as a cause; None where one of its chain has a secret in its text."""
    text = "".join(traceback.format_exception(error))
    return error if hide(text) == text else None


def logger(name: str) -> logging.Logger:
    """Return a logger whose records have no secrets: error texts of MLflow, SQLAlchemy and requests hold whole URIs."""
    named = logging.getLogger(name)
    named.addFilter(_hide_in_record)
    return named


def _hide_in_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = hide(record.getMessage()), None
    if record.exc_info:
        record.exc_text, record.exc_info = hide(logging.Formatter().formatException(record.exc_info)), None
    return True


def _replaced(data: Any, known: re.Pattern[str]) -> Any:
    if isinstance(data, str):
        return known.sub(HIDDEN, hide_in_uris(data))
    if isinstance(data, Mapping):
        return {name: _replaced(value, known) for name, value in data.items()}
    if isinstance(data, list) or type(data) is tuple:
        return (tuple if isinstance(data, tuple) else list)(_replaced(value, known) for value in data)
    return data


def _known(shortest: int) -> re.Pattern[str]:
    """Return a pattern of the secrets that this process knows."""
    here = ""
    with contextlib.suppress(OSError):  # what stands in its path is not a secret, and hidden it would spoil other paths
        here = os.getcwd()
    return _pattern(tuple(os.environ.items()), (*_given, *sys.argv[1:]), here, shortest)


@functools.lru_cache(maxsize=8)
def _pattern(
    variables: tuple[tuple[str, str], ...], words: tuple[str, ...], here: str, shortest: int
) -> re.Pattern[str]:
    forms = {
        form
        for secret, around in _secrets(variables, words)
        for form in _forms(secret)
        if len(form) >= shortest and form.lower() not in _FLAGS and form.strip("*")
        if form not in around and form not in here
    }
    parts = [
        re.escape(form) if len(form) >= _STRONG else rf"(?:(?<!\w)|(?<=%[0-9A-Fa-f]{{2}})){re.escape(form)}(?!\w)"
        for form in sorted(forms, key=len, reverse=True)
    ]
    return re.compile("|".join(parts) or "(?!)")  # which is nowhere


def _secrets(variables: Iterable[tuple[str, str]], words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each secret with the rest of its URI: what stands there too, such as a user's name, is not a secret."""
    for name, value in variables:
        if _SECRET_NAME.search(name) and name not in _NOT_SECRETS:
            yield value, ""
    for uri in (*words, *(value for _, value in variables)):
        if "://" in uri:
            around = hide_in_uris(uri)
            for pattern in _IN_URIS if around != uri else ():
                found = (match[2] for match in pattern.finditer(uri))
                yield from ((secret, around) for secret in found if pattern is not _LONE_TOKEN or _is_token(secret))


def _is_token(user: str) -> bool:
    """Whether what stands in the place of a user's name is none, which other texts, such as paths, would have too."""
    return len(user) >= _LONG or (len(user) >= _STRONG and any(map(str.isdecimal, user)))


def _forms(secret: str) -> set[str]:
    """Return how a secret may be written: as it is, decoded, encoded, with the escapes of Python and JSON."""
    plain = {secret, unquote(secret), unquote_plus(secret)}
    encoded = {form for text in plain for form in (quote(text), quote(text, safe=""), quote_plus(text))}
    lower = {re.sub("%..", lambda match: match[0].lower(), text) for text in encoded}
    return plain | encoded | lower | {escape(text)[1:-1] for text in plain for escape in (repr, json.dumps)}

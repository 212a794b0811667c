"""Remove passwords and tokens from every text that leaves the process: tags, files, messages.

Two kinds are found: any password or token in a URI, and, anywhere in a text, the secrets that this process knows: from
environment variables, and from URIs in variables, on the command line or given to `learn`.
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
# Up to the last `@`, since people do not escape `/` and `@` in passwords. A port and a path with `@` do not match.
_PASSWORD: Final = re.compile(r"(://(?!\[)[^\s/:?#]*:)(?!\d{1,5}(?:[/?#\"'<>`]|$))(\S{1,4000})(?=@)")
_PASSWORD_IN_SQL: Final = re.compile(r"((?:postgresql|mysql|mssql)[\w+]*://[^\s/:]*:)(\S{1,4000})(?=@)", re.IGNORECASE)
# A user without a password is usually a token; with these schemes it is the name of a user or container.
_NAMED: Final = r"ssh|sftp|scp|rsync|postgres\w*|mysql|mariadb|mssql|oracle|wasbs?|abfss?|hdfs|file"
_LONE_TOKEN: Final = re.compile(
    rf"(?<![\w+.-])((?![\w+.-]*\b(?:{_NAMED})\b[\w+.-]*://)[\w+.-]+://)([^\s/:?#]+)(?=@)", re.IGNORECASE
)
# Git servers accept a token with an empty password, or with this one.
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

# Shorter secrets are hidden in URIs only, since they may be parts of many words.
_SHORTEST: Final = 4
# Shorter secrets are hidden as whole words only, and not in data that is read back.
_STRONG: Final = 8
_LONG: Final = 20

_given: dict[str, None] = {}


def learn(uri: str) -> None:
    """Remember a tracking URI that has a secret, to hide the secret everywhere and to `recall` the whole URI."""
    if hide_in_uris(uri) != uri and not is_hidden(uri):
        _given[uri] = None


def recall(shown: str) -> str | None:
    """Return the last learned URI whose form without secrets is `shown`; None if there is none."""
    return next((uri for uri in reversed(list(_given)) if hide_in_uris(uri) == shown), None)


def hide(text: str) -> str:
    """Hide each password and token in a text for people."""
    return _known(_SHORTEST).sub(HIDDEN, hide_in_uris(text))


def hide_in_uris(text: str) -> str:
    """Hide passwords and tokens in URIs; the result depends only on the text, so it is the same in every process."""
    if "://" in text:
        for pattern in _IN_URIS[:-1]:
            text = pattern.sub(rf"\1{HIDDEN}", text)
    return _QUERY.sub(rf"\1{HIDDEN}", text) if "=" in text else text


def hide_in_data(data: Any) -> Any:
    """Hide secrets in the strings of data for programs: any secret in a URI, and known ones of 8 or more characters."""
    return _replaced(data, _known(_STRONG))


def hide_in_words(words: Iterable[str]) -> list[str]:
    """Hide secrets in the words of a command line: known ones, in URIs, and after options such as `--password`."""
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
    """Return whether a text has a URI with a hidden secret."""
    return _HIDDEN_IN_URI.search(text) is not None


def find_hidden(data: Any, name: str) -> str | None:
    """Return the path of a hidden secret in plain data, such as `env_kwargs.url`; None if there is none."""
    if isinstance(data, str):
        return name if _HIDDEN_IN_DATA.search(data) else None
    parts: list[tuple[Any, str]] = []
    if isinstance(data, Mapping):
        parts = [(value, f"{name}.{key}") for key, value in data.items()]
    elif isinstance(data, list | tuple):
        parts = [(value, f"{name}[{index}]") for index, value in enumerate(data)]
    return next((found for value, where in parts if (found := find_hidden(value, where)) is not None), None)


def showable(error: Exception) -> Exception | None:
    """Return an error that may be shown as a cause; None if the text of its chain has a secret."""
    text = "".join(traceback.format_exception(error))
    return error if hide(text) == text else None


def logger(name: str) -> logging.Logger:
    """Return a logger that hides secrets, since error texts of MLflow, SQLAlchemy and requests have whole URIs."""
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
    """Return a pattern of this process's known secrets of at least `shortest` characters."""
    here = ""
    with contextlib.suppress(OSError):  # a part of this path is no secret; hiding it would spoil other paths
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
    return re.compile("|".join(parts) or "(?!)")  # matches nothing


def _secrets(variables: Iterable[tuple[str, str]], words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each secret with the rest of its URI; text that occurs there too, such as a user's name, is no secret."""
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
    """Whether the user in a URI is a token and not a name, which other texts, such as paths, would have too."""
    return len(user) >= _LONG or (len(user) >= _STRONG and any(map(str.isdecimal, user)))


def _forms(secret: str) -> set[str]:
    """Return the forms of a secret: unchanged, URL-decoded, URL-encoded, and with escapes of Python and JSON."""
    plain = {secret, unquote(secret), unquote_plus(secret)}
    encoded = {form for text in plain for form in (quote(text), quote(text, safe=""), quote_plus(text))}
    lower = {re.sub("%..", lambda match: match[0].lower(), text) for text in encoded}
    return plain | encoded | lower | {escape(text)[1:-1] for text in plain for escape in (repr, json.dumps)}

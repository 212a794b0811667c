"""Plain data: what states of conditions, and conditions in run files, are made of."""

from __future__ import annotations

from typing import Any


def plain(value: Any) -> Any:
    """Copy plain data.

    Args:
        value: Numbers, texts, flags, None, and lists, tuples and dicts of them.

    Raises:
        TypeError: If it is of another kind, which the message names.
    """
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        if not all(isinstance(key, str) and not key.startswith("$") for key in value):
            raise TypeError("a dict with keys that are not texts or begin with '$'")
        return {key: plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a value of type {type(value).__qualname__}")

"""Formats numbers and Markdown tables, and picks values from rows. The standard library alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, rule: str = "|---") -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(line) + " |" for line in (header, *rows)]
    return "\n".join([lines[0], rule * len(header) + "|", *lines[1:]])


def names(rows: Sequence[Row], key: str, **tags: Any) -> list[Any]:
    """Return the different values of a key in the rows with these tags, in the order of their first row."""
    return list(dict.fromkeys(select(rows, key, **tags)))


def select(rows: Sequence[Row], key: str, **tags: Any) -> list[Any]:
    """Return the values of a key in the rows with these tags."""
    return [row[key] for row in rows if key in row and all(row.get(name) == value for name, value in tags.items())]


def short(rate: float) -> str:
    """Write a rate: 3.2M, 412k, 4.7k, 83."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            number = rate / size
            return f"{number:.1f}{unit}" if number < 10 else f"{number:.0f}{unit}"
    return f"{rate:.0f}"


def percent(share: float | None) -> str:
    """Write a share; nothing where there is none."""
    return "" if share is None else f"{share:.0%}"

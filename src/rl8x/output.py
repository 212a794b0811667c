"""Prints messages and tables; a closed or full stream never raises."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any, Final, TextIO

# A closed pipe or terminal: after such an error a stream never writes again.
_GONE: Final = (errno.EPIPE, errno.EIO)


class Unfailing:
    """A text stream that never raises; with None, which `sys.stderr` is in some processes, it drops all text."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text if possible; return the number of its characters."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if possible."""
        self._try("flush")

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._try("isatty") is True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, name: str, *arguments: str) -> Any:
        if self._stream is None:
            return None
        try:
            return getattr(self._stream, name)(*arguments)
        except OSError as error:
            if error.errno in _GONE:
                self.forsake()
        except UnicodeEncodeError:  # the stream's encoding, that of the locale, lacks some letters
            encoding = getattr(self._stream, "encoding", None) or "ascii"
            escaped = (text.encode(encoding, "backslashreplace").decode(encoding) for text in arguments)
            return getattr(self._stream, name)(*escaped)
        except ValueError:  # it is closed
            pass
        return None

    def forsake(self) -> None:
        """Redirect the stream to the null device: at exit Python would flush it again, fail, and exit with code 120."""
        with contextlib.suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), self.fileno())


def message_of(error: BaseException) -> str:
    """Return the message of an exception; empty if its `__str__` raises."""
    try:
        return str(error)
    except Exception:  # a defect of the exception's class must not hide the exception
        return ""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type."""
    lines = message_of(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def described(error: BaseException) -> str:
    """Return the name of an exception's type and its message."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def in_line(text: str) -> str:
    r"""Return a text for one line of a terminal, with escapes such as `\n` for characters that do not print."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """Return a value's repr for an error's message: in one line, cut to 200 characters."""
    return f"{in_line(repr(value)):.200}"


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def is_interactive() -> bool:
    """Whether someone types at this process: Python's or IPython's prompt, or a notebook."""
    return hasattr(sys, "ps1")


def say(text: str, *, err: bool = False) -> None:
    """Print a line to standard output, or to standard error (`err`), if possible."""
    print(text, file=Unfailing(sys.stderr if err else sys.stdout), flush=True)


def counted(number: int, one: str, several: str | None = None) -> str:
    """Write a number of things, such as "1 row" and "1,200 rows"; `several` is for plurals that add more than an s."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def percent(share: float) -> str:
    """Write a share in percent with all its digits: 95%, 99.9%."""
    return f"{100 * share:g}%"


def short(count: float) -> str:
    """Write a count in three digits: 3.21M, 412k, 83."""
    rounded = float(f"{count:.3g}")  # maybe up to the next unit
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rounded >= size:
            number = rounded / size
            digits = 2 if number < 10 else 1 if number < 100 else 0
            return f"{number:.{digits}f}{unit}"
    return f"{count:.0f}"


def measured(value: float) -> str:
    """Write a measured number in four digits, or all before the point: 0.1235, 1.235, 12346, 1e+300."""
    return f"{value:.0f}" if 9_999.5 <= abs(value) < 1e15 else f"{value:.4g}"


def table(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Put rows of cells in columns; if `width` is given, in blocks of at most that, each with the first column."""
    if width is not None:
        return _in_blocks(rows, width)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _in_blocks(rows: Sequence[Sequence[str]], width: int) -> str:
    # A first column wider than half the width, and other cells wider than the rest, are cut.
    most = max(width // 2, 8)
    rest = max(width - min(most, max(len(row[0]) for row in rows)) - 2, 8)
    firsts = cut_apart([row[0] for row in rows], most)
    rows = [[first, *(cut_middle(cell, rest) for cell in row[1:])] for first, row in zip(firsts, rows, strict=True)]
    blocks: list[list[int]] = [[0]]
    for column in range(1, len(rows[0])):
        if len(blocks[-1]) > 1 and width_of([[row[each] for each in (*blocks[-1], column)] for row in rows]) > width:
            blocks.append([0])
        blocks[-1].append(column)
    return "\n\n".join(table([[row[column] for column in block] for row in rows]) for block in blocks)


def width_of(rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table."""
    return sum(2 + max(map(len, column)) for column in zip(*rows, strict=True)) - 2


def cut_middle(text: str, width: int) -> str:
    """Shorten a text in its middle, since its ends often distinguish it from others."""
    if len(text) <= width:
        return text
    left = (width - 3) // 2
    return f"{text[:left]}...{text[len(text) - (width - 3 - left) :]}"


def cut_apart(texts: Sequence[str], width: int) -> list[str]:
    """Shorten texts in their middles to a width, or to the least at which no two of them read the same."""
    longest, number = max(map(len, texts), default=0), len({*texts})
    widths = (*range(width, longest), longest)
    return next(cut for at in widths if len({*(cut := [cut_middle(text, at) for text in texts])}) == number)

"""Immutable pieces of a large state, which checkpoints share with those before instead of writing them again."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypeAlias

from torch import Tensor

# Such a name becomes that of a file: nothing in it leads anywhere.
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")

Content: TypeAlias = dict[str, Tensor]
"""The tensors of a segment by name, of any shapes."""


class Segment:
    """A piece of a state that never changes under its name."""

    def __init__(self, name: str, content: Callable[[], Content]) -> None:
        if not is_segment_name(name):
            raise ValueError(f"a segment's name has small letters, digits and '-', 100 at most; got {name!r}.")
        self.name = name
        self.content = content


def is_segment_name(name: object) -> bool:
    """Whether something is a text that a segment can have as its name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


_ROWS: Final = 32_768
_BYTES: Final = 8_000_000


class Piece(NamedTuple):
    """A segment's rows, by their numbers, counted from the first row ever appended.

    Attributes:
        first: Number of the first row.
        last: Number of the row after the last.
        name: The segment's name.
    """

    first: int
    last: int
    name: str


class Segmentation:
    """The pieces of a replay's rows: full ones never change, the last is replaced as rows are appended.

    A full piece ends at a multiple of 32,768 rows, or fewer where these are more than 8 MB. A checkpoint therefore
    costs the rows that are new since the one before, and at most one piece besides.
    """

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self._pieces = list(pieces)
        self._key = uuid.uuid4().hex

    def pieces(self, oldest: int, total: int, row_bytes: int) -> list[Piece]:
        """Return the pieces that contain the rows from `oldest` to `total`."""
        pieces = [piece for piece in self._pieces if piece.last > oldest]
        length = segment_rows(row_bytes)
        if pieces and pieces[-1].last < total and pieces[-1].last % length:
            pieces.pop()
        first = max(oldest, pieces[-1].last if pieces else 0)
        while first < total:
            last = min((first // length + 1) * length, total)
            pieces.append(Piece(first, last, f"{self._key}-{first}-{last}"))
            first = last
        self._pieces = pieces
        return list(pieces)

    def has(self, piece: Piece) -> bool:
        """Return whether a piece is still current, so that none of its rows has been overwritten or replaced."""
        return piece in self._pieces


def segment_rows(row_bytes: int) -> int:
    """Return the number of rows of a full segment, a power of two."""
    rows = _ROWS
    while rows > 1 and rows * row_bytes > _BYTES:
        rows //= 2
    return rows

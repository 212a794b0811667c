"""Tables that fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rl8x.output import table


def in_blocks(rows: Sequence[Sequence[str]], width: int) -> str:
    """Write a table in at most `width` columns of text: in blocks below each other, each with the first column.

    A first column that takes more than half of the width, and any other cell that takes more than is left, is cut.
    """
    first = min(max(len(row[0]) for row in rows), max(width // 2, 8))
    rest = max(width - first - 2, 8)
    rows = [[cut_middle(row[0], first), *(cut_middle(cell, rest) for cell in row[1:])] for row in rows]
    blocks: list[list[int]] = [[]]
    used = first
    for column in range(1, len(rows[0])):
        needed = 2 + max(len(row[column]) for row in rows)
        if blocks[-1] and used + needed > width:
            blocks.append([])
            used = first
        blocks[-1].append(column)
        used += needed
    return "\n\n".join(table([[row[0], *(row[column] for column in block)] for row in rows]) for block in blocks)


def width_of(rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table that is written in one block."""
    return sum(2 + max(map(len, column)) for column in zip(*rows, strict=True)) - 2


def cut_middle(text: str, width: int) -> str:
    """Cut a text in its middle, so that what distinguishes its ends stays."""
    if len(text) <= width:
        return text
    left = (width - 3) // 2
    return f"{text[:left]}...{text[len(text) - (width - 3 - left) :]}"

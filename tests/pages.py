"""README.md and the pages of docs/, as tests read them: their blocks of code and their commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block; `title` is the file that a reader saves it as."""

    language: str
    title: str | None
    code: str


def all_blocks(page: Path) -> list[Block]:
    return [Block(match[1], match[2], match[3]) for match in _BLOCK.finditer(page.read_text())]


def blocks(page: Path, language: str) -> list[str]:
    return [block.code for block in all_blocks(page) if block.language == language]


def commands(page: Path) -> Iterator[list[str]]:
    for code in blocks(page, "bash"):
        yield from commands_of(code)


def commands_of(code: str) -> Iterator[list[str]]:
    for line in code.splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))

"""README.md and the pages of docs/, as tests read them: blocks of code, commands, and the names of the reference."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
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
            yield [*itertools.takewhile(lambda word: word != ">", words)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def documented() -> list[str]:
    """The public names that the reference has, with their modules."""
    pages = sorted(REFERENCE.glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]


def resolve(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)

"""README.md and the pages of docs/, as tests read them: blocks of code, commands, and the names of the reference."""

import importlib
import itertools
import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)(?: title=\"(.+?)\")?\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block; `title` is the file that a reader saves it as."""

    language: str
    title: str | None
    code: str


def all_blocks(page):
    return [Block(match[1], match[2], match[3]) for match in _BLOCK.finditer(page.read_text())]


def blocks(page, language):
    return [block.code for block in all_blocks(page) if block.language == language]


def commands_of(code):
    for line in code.splitlines():
        if words := shlex.split(line, comments=True):
            yield [*itertools.takewhile(lambda word: word != ">", words)]


def commands(page):
    return [words for code in blocks(page, "bash") for words in commands_of(code)]


def name_of(page):
    return str(page.relative_to(ROOT))


def documented():
    """The public names that the reference has, with their modules."""
    pages = sorted(REFERENCE.glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]


def resolve(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)

"""Each command that a page, a help text or an example prints is one that its program takes; none is run here."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import pytest
from tests.pages import PAGES, ROOT, name_of
from torch.distributed.run import get_args_parser

from rl8x.cli.errors import UserError
from rl8x.cli.main import COMMANDS
from rl8x.cli.main import rl8x as group

_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_CALL = re.compile(r"^(?:\$ |srun |bash +|zsh +|fish +|[A-Z]+=\S+ )*((?:rl8x|torchrun|python) [a-z-].*)")
_ENDS = {">", "&", "|", "with"}  # of a line, where what is the program's ends
CLASS = """
import dataclasses
from rl8x.algorithms import PPOConfig
from rl8x.algorithms.hyperparameters import option

@dataclasses.dataclass(frozen=True, kw_only=True)
class MyConfig(PPOConfig):
    capacity: int = option(10000, "Transitions that are kept.", low=1)
"""


def of_page(text: str) -> Iterator[str]:
    """The lines of a page's blocks, continued ones as one, and what stands between backticks in its sentences."""
    text = text.replace("\\\n", " ")
    for block in _FENCED.findall(text):
        yield from block.splitlines()
    for span in re.findall(r"`([^`]+)`", _FENCED.sub("", text)):
        yield " ".join(span.split())


def of_help(name: str) -> Iterator[str]:
    made = group.get_command(click.Context(group), name).imported()
    yield from (made.epilog or "").splitlines()
    yield from of_page(made.help or "")


def of_examples() -> Iterator[str]:
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.suffix in (".py", ".yaml"):
            comments = (line.partition("# ")[2] for line in path.read_text().splitlines())
            yield from (text for comment in comments for text in (comment.rpartition(": ")[2], *of_page(comment)))


def calls(lines: Iterable[str]) -> Iterator[list[str]]:
    for line in lines:
        if match := _CALL.search(line.strip()):
            yield [*itertools.takewhile(lambda word: word not in _ENDS, shlex.split(match[1], comments=True))]


def check(words: list[str]) -> None:
    """Let a program read its words, and do nothing.

    Raises:
        click.UsageError: If a command or an option of rl8x does not exist, or a value is not legal.
        SystemExit: If torchrun refuses its own.
    """
    program, *rest = words
    if program == "rl8x":
        check_rl8x(*rest)
    elif program == "torchrun":
        whole = any(word == "-m" or word.endswith(".py") for word in rest)
        started = get_args_parser().parse_args(rest if whole else [*rest, "script.py"])
        if started.module:
            check([started.training_script, *started.training_script_args])
    elif rest[0].endswith(".py"):
        assert (ROOT / rest[0]).exists()
    elif rest[0] == "-m" and len(rest) > 1:
        module = ROOT / rest[1].replace(".", "/")
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()


def check_rl8x(name: str, *words: str) -> None:
    made = group.get_command(click.Context(group), name)
    # A command that is only named, in a sentence, needs not be whole.
    if words:
        try:
            made.make_context(name, [word for word in words if word != "--help"])
        except click.MissingParameter:
            return
        except UserError as error:
            if not str(error).startswith("there is no run"):
                raise


def sources() -> Iterator[tuple[str, Iterator[str]]]:
    for path in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        yield name_of(path), of_page(path.read_text())
    for name in COMMANDS:
        yield f"rl8x {name} --help", of_help(name)
    yield "examples", of_examples()


def test_the_commands_that_are_printed_are_legal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("mypackage.py", "my_module.py"):
        (tmp_path / name).write_text(CLASS)
    for name in ("examples/demo.yaml", "examples/study.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("run.yaml", "settings.yaml", "study.yaml"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    checked: dict[str, int] = {}
    for source, lines in sources():
        for words in calls(lines):
            try:
                check(words)
            except (Exception, SystemExit) as error:
                pytest.fail(f"{source}: {shlex.join(words)}: {error!r}")
            checked[source] = checked.get(source, 0) + 1
    # All kinds of places are found: blocks of each language, sentences, help and comments.
    for name in ("mypackage", "my_module"):
        sys.modules.pop(name, None)
    pages = {f"docs/{name}.md" for name in ("scaling", "hyperparameters", "export", "datasets")}
    assert {*pages, "rl8x bench --help", "examples"} <= {*checked}

"""Each command that a page, a help text or an example prints is one that its program takes; none is run here."""

import itertools
import re
import shlex
import sys

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


def of_page(text):
    """The lines of a page's blocks, continued ones as one, and what stands between backticks in its sentences."""
    text = text.replace("\\\n", " ")
    for block in _FENCED.findall(text):
        yield from block.splitlines()
    for span in re.findall(r"`([^`]+)`", _FENCED.sub("", text)):
        yield " ".join(span.split())


def sources():
    """Where commands are printed, with the lines there."""
    for path in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        yield name_of(path), of_page(path.read_text())
    for name in COMMANDS:
        made = group.get_command(click.Context(group), name).imported()
        yield f"rl8x {name} --help", [*(made.epilog or "").splitlines(), *of_page(made.help or "")]
    for path in sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.yaml")]):
        comments = [line.partition("# ")[2] for line in path.read_text().splitlines()]
        yield "examples", [text for each in comments for text in (each.rpartition(": ")[2], *of_page(each))]


def check(words):
    """Let a program read its words, and do nothing; raises `click.UsageError`, or torchrun's `SystemExit`."""
    program, *rest = words
    if program == "rl8x":
        made = group.get_command(click.Context(group), rest[0])
        try:
            # A command that is only named, in a sentence, needs not be whole.
            if rest[1:]:
                made.make_context(rest[0], [word for word in rest[1:] if word != "--help"])
        except click.MissingParameter:
            return
        except UserError as error:
            if not str(error).startswith("there is no run"):
                raise
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


def test_the_commands_that_are_printed_are_legal(monkeypatch, tmp_path):
    (tmp_path / "examples").mkdir()
    files = dict.fromkeys(("mypackage.py", "my_module.py"), CLASS)
    files |= dict.fromkeys(("run.yaml", "settings.yaml", "study.yaml"), "{}")
    files |= {name: (ROOT / name).read_text() for name in ("examples/demo.yaml", "examples/study.yaml")}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    checked = set()
    for source, lines in sources():
        for match in filter(None, (_CALL.search(line.strip()) for line in lines)):
            words = [*itertools.takewhile(lambda word: word not in _ENDS, shlex.split(match[1], comments=True))]
            try:
                check(words)
            except (Exception, SystemExit) as error:
                pytest.fail(f"{source}: {shlex.join(words)}: {error!r}")
            checked.add(source)
    for name in ("mypackage", "my_module"):
        sys.modules.pop(name, None)
    # All kinds of places are found: blocks of each language, sentences, help and comments.
    pages = {f"docs/{name}.md" for name in ("scaling", "hyperparameters", "export", "datasets")}
    assert {*pages, "rl8x bench --help", "examples"} <= checked

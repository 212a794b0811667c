"""A stranger's path: docs/tutorials/own-environment.md is done from an empty folder, as it stands, step by step."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.pages import ROOT, all_blocks, commands_of

from rl8x.cli.main import COMMANDS, main

PAGE = ROOT / "docs" / "tutorials" / "own-environment.md"
NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?"
FOLLOWED = ("train", "compare", "resume", "export")  # `ui` would serve for ever


def shape(text: str) -> str:
    """A text without its numbers, which another processor may have otherwise, and without the spaces that they need."""
    return re.sub(r" +", " ", re.sub(NUMBER, "N", text)).strip()


@pytest.mark.long
def test_a_stranger_comes_from_an_empty_folder_to_policies_that_are_compared_and_exported(
    mlruns: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = mlruns.parent
    monkeypatch.setenv("COLUMNS", "120")
    path = list(sys.path)
    printed, followed = "", []
    for language, title, code in all_blocks(PAGE):
        if title is not None:
            (folder / title).write_text(code)
        if language == "python" and title != "room.py":
            monkeypatch.setattr(sys, "path", [*path, str(folder)])  # where `python weather.py` finds `room`
            exec(compile(code, str(title), "exec"), {"__name__": "__main__"})
        elif language == "bash":
            for program, command, *words in commands_of(code):
                assert program == "rl8x"
                assert command in COMMANDS
                if command in FOLLOWED:
                    sys.modules.pop("room", None)  # a command is a process of its own, which finds `room` by itself
                    monkeypatch.setattr(sys, "path", list(path))
                    assert main([command, *words]) == 0
                    followed.append(command)
        elif language == "text":
            assert shape(code) in shape(printed), f"it was: {printed}"
        else:
            continue
        if language != "text":
            printed = capsys.readouterr().out
        if title == "weather.py":
            off = {(line[:11].strip(), line[11:16].strip()): line for line in printed.splitlines()}
            mild, drawn = (float(re.findall(NUMBER, off[name, "-10"])[-1]) for name in ("mild", "any-weather"))
            assert mild < 1.5 * drawn < 0  # what the page says of them
    sys.modules.pop("room", None)
    assert followed == ["train", "train", "compare", "resume", "export"]
    assert (folder / "reports" / "compare-mild" / "compare.html").exists()

"""Pages quote what `benchmarks/results` backs: the renderer says so, run as a program on copies of the repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import ROOT

COPIED = ("README.md", "docs", "benchmarks", "tests", "src/rl8x/config/settings")


def check(root: Path) -> tuple[int, list[str]]:
    """Return the exit code and the lines of the renderer in a folder."""
    command = [sys.executable, "-m", "benchmarks.pages", "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_the_pages_say_what_the_results_say() -> None:
    assert check(ROOT) == (0, ["The pages say what the results say."])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with copies of pages, results and the programs that make the ones of the others."""
    left_out = shutil.ignore_patterns("*.png", "*.gif", "__pycache__")
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=left_out)
        else:
            shutil.copyfile(source, target)
    return tmp_path


def test_whatever_a_page_says_otherwise_is_named(copy: Path) -> None:
    """One number of each kind: a table, a sentence, a setting that users have by name, and results themselves."""

    def change(name: str, old: str, new: str) -> None:
        text, count = re.subn(re.escape(old), new, (copy / name).read_text(), count=1)
        assert count == 1, old
        (copy / name).write_text(text)

    change("README.md", "| 62k |", "| 63k |")
    change("docs/environments.md", "| 5,079,941 |", "| 5,079,942 |")
    change("docs/export.md", "9.5e-7", "9.5e-8")
    change("src/rl8x/config/settings/measured.json", '"transitions": 1003520', '"transitions": 1003521')
    # A seed that misses its bound, and a task whose settings are others by now.
    mean = '"task": "acrobot", "seed": 0, "return_mean": -'
    change("benchmarks/results/learning.json", mean, f"{mean}2")
    change("benchmarks/results/precision.json", '"gamma": 0.99', '"gamma": 0.9')
    code, lines = check(copy)
    assert code == 1
    for start in (
        "README.md: the section speed ",
        "docs/environments.md: the section envs ",
        "docs/export.md does not say: The largest difference there is 9.5e-7.",
        "src/rl8x/config/settings/measured.json ",
        "acrobot, seed 0, does not reach what is asked",
        "precision.json: cartpole fp32 was measured under other settings",
    ):
        assert [line for line in lines if line.startswith(start)], (start, lines)

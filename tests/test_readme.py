"""What README.md and docs/ print works: Python runs at a reduced size, commands exist, links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rl8x.trainers.base
from benchmarks import learning
from rl8x import NullTracker, PPOConfig, Trainer
from rl8x.cli.main import COMMANDS, main
from rl8x.conditions import from_spec

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            if words := shlex.split(line, comments=True):
                yield words


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shrink what a snippet asks for: 64 copies at most, 2 steps a run, no MLflow."""
    init, run = PPOConfig.__init__, Trainer.run

    def small_init(self: PPOConfig, **fields: Any) -> None:
        num_envs = min(fields.get("num_envs", 8), 64)
        size = {"sgd_minibatch_size": 64} if fields.get("sgd_minibatch_size") else {}
        init(self, **{**fields, **size, "num_envs": num_envs, "device": "cpu"})

    def small_run(self: Trainer, **options: Any) -> Any:
        return run(self, **{**options, "max_steps": 2})

    monkeypatch.setattr(PPOConfig, "__init__", small_init)
    monkeypatch.setattr(Trainer, "run", small_run)
    monkeypatch.setattr(rl8x.trainers.base, "default_tracker", NullTracker)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_runs(page: Path) -> None:
    namespace: dict[str, Any] = {}
    for number, code in enumerate(blocks(page, "python"), start=1):
        code = re.sub(r"\b(\d+)_000\b", r"\1", code)
        exec(compile(code, f"{page.name}, snippet {number}", "exec"), namespace)


def test_the_script_is_there_as_promised() -> None:
    line = (
        "Trainer(PPOConfig(num_envs=8192, horizon=32).build(CartPole))"
        '.run(steps_per_eval=5, stop_conditions=[Plateau("returns/mean", patience=10, rtol=0.05)])'
    )
    assert line in blocks(PAGES[0], "python")[0].splitlines()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for program, command, *rest in commands(page):
        assert program in ("make", "rl8x"), f"{program} {command}"
        if program == "make":
            assert command in targets
        elif command == "train" and "--help" not in rest:
            assert main([command, *rest, "--dry-run"]) == 0, rest
        else:
            assert command in COMMANDS
            assert main([command, "--help"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_run_files_are_legal(page: Path) -> None:
    for block in blocks(page, "yaml"):
        for spec in yaml.safe_load(block)["stop_conditions"]:
            from_spec(spec)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:src|tests|examples|benchmarks|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_architecture_names_the_layers_that_are_tested() -> None:
    from tests.test_layers import LAYERS

    rows = re.findall(r"^\| L\d \| (.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
    assert [set(re.findall(r"`(\w+)`", row)) | {"_version"} for row in rows[:1]] == [LAYERS[0]]
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows[1:]] == LAYERS[1:]


def test_the_figures_are_those_of_the_committed_measurement() -> None:
    document = json.loads(learning.DEFAULT_OUT.read_text())
    table = learning.report(document["rows"], learning.TASKS)
    assert table in (ROOT / "README.md").read_text()
    assert {row["task"] for row in document["rows"]} == set(learning.TASKS)
    for row in document["rows"]:
        task = learning.TASKS[row["task"]]
        assert task.passes(row["return_mean"]) is row["passed"] is True, row
    for name, task in document["tasks"].items():
        assert task["config"] == json.loads(json.dumps(learning.TASKS[name].settings)), f"{name} was measured otherwise"


def test_the_learning_benchmark_measures_the_final_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = learning.dataclasses.replace(learning.TASKS["cartpole"], transitions=4096, bound=5.0)
    monkeypatch.setattr(learning, "TASKS", {"cartpole": task})
    out = tmp_path / "learning.json"
    assert learning.main(["--tasks", "cartpole", "--seeds", "2", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["seed"], row["env_steps"], row["updates"], row["episodes"]) for row in rows] == [
        (0, 4096, 32, 256),
        (1, 4096, 32, 256),
    ]
    assert "cartpole" in capsys.readouterr().out
    monkeypatch.setattr(learning, "TASKS", {"cartpole": learning.dataclasses.replace(task, bound=501.0)})
    assert learning.main(["--tasks", "cartpole", "--seeds", "1", "--out", str(out)]) == 1


def test_what_is_published_replaces_the_table_and_draws_the_curves(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("before\n<!-- learning -->\nold\n<!-- /learning -->\nafter\n")
    document = json.loads(learning.DEFAULT_OUT.read_text())
    learning.publish(document, tmp_path)
    table = learning.report(document["rows"], learning.TASKS)
    assert (tmp_path / "README.md").read_text() == f"before\n<!-- learning -->\n{table}\n<!-- /learning -->\nafter\n"
    assert (tmp_path / "docs" / "images" / "learning.png").read_bytes().startswith(b"\x89PNG")

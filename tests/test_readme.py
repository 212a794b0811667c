"""What README.md and docs/ print works: Python runs at a reduced size, commands exist, links lead somewhere."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.pages import PAGES, ROOT, blocks, commands, name_of
from tests.test_site import exported, packages

import rl8x
import rl8x.trainers.trainer
from rl8x import NullTracker, PPOConfig, Trainer, drawing
from rl8x.algorithms import OnlineConfig
from rl8x.cli.main import main
from rl8x.conditions import from_spec
from rl8x.config import RunSpec, algorithm_configs
from rl8x.envs import CartPole
from rl8x.plain import Loader
from rl8x.studies import Study, StudyConfig

TUTORIAL = ROOT / "docs" / "tutorials" / "own-environment.md"  # run whole, as it stands, by test_tutorial.py
EXTRAS = {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}
NAMES = [name_of(page) for page in PAGES]


def with_blocks(*languages: str) -> Any:
    """Parametrize by the pages that have blocks in these languages."""
    chosen = [page for page in PAGES if any(blocks(page, language) for language in languages)]
    return pytest.mark.parametrize("page", chosen, ids=name_of)


class Untracked(NullTracker):
    """In place of MLflow, where nothing else is given."""

    def check(self) -> None:
        """All is well."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shrink what a snippet asks for: 16 copies at most, 2 steps a run, each evaluated if any is, no MLflow.

    A study has one seed, its trainings one after the other, and one episode in each of few cells; a figure of its
    report is drawn once, not in each theme.
    """
    init, run, study_init, study_run = PPOConfig.__init__, Trainer.run, Study.__init__, Study.run

    def small_init(self: PPOConfig, **fields: Any) -> None:
        num_envs = min(fields.get("num_envs", 8), 16)
        fits = num_envs * fields.get("horizon", 32) % (fields.get("sgd_minibatch_size") or 1) == 0
        size = {} if fits else {"sgd_minibatch_size": 64}
        init(self, **{**fields, **size, "num_envs": num_envs, "device": "cpu"})

    def small_run(self: Trainer, **options: Any) -> Any:
        evaluated = {"steps_per_eval": 1} if options.get("steps_per_eval") else {}
        return run(self, **{**options, **evaluated, "max_steps": 2})

    def small_study_init(self: Study, train: Any, test: Any, **options: Any) -> None:
        options |= {"seeds": 1, "episodes": 1, "tracking": False, "progress": "none"}
        study_init(self, train, json.loads(re.sub(r"\d+\]}", "3]}", json.dumps(test))), **options)

    draw = functools.cache(functools.partial(drawing.png, theme=drawing.LIGHT))
    monkeypatch.setattr(drawing, "png", lambda each, theme, titled=False: draw(each))
    monkeypatch.setattr(PPOConfig, "__init__", small_init)
    monkeypatch.setattr(Trainer, "run", small_run)
    monkeypatch.setattr(Study, "__init__", small_study_init)
    monkeypatch.setattr(Study, "run", lambda self, jobs=1: study_run(self))
    monkeypatch.setattr(rl8x.trainers.trainer, "MLflowTracker", Untracked)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("small")
@with_blocks("python")
def test_python_runs(page: Path) -> None:
    if page == TUTORIAL:
        return
    namespace: dict[str, Any] = {}
    for number, code in enumerate(blocks(page, "python"), start=1):
        code = re.sub(r"\b(\d+)_000\b", r"\1", code)
        exec(compile(code, f"{page.name}, snippet {number}", "exec"), namespace)


@pytest.mark.long
def test_the_first_script_does_what_the_demo_does_and_ends_when_its_return_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[dict[str, Any]] = []
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self, **options: (runs.append(options), run(self, **options))[1])
    monkeypatch.setattr(rl8x.trainers.trainer, "MLflowTracker", Untracked)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    exec(blocks(PAGES[0], "python")[0], namespace)

    demo = RunSpec.from_file(ROOT / "examples" / "demo.yaml")
    assert namespace["config"] == PPOConfig(**demo.algorithm.algorithm_config)
    assert namespace["trainer"].record.spec.trainer.num_eval_envs == demo.trainer.num_eval_envs
    ((asked,), conditions) = runs, demo.run.conditions()
    assert asked["steps_per_eval"] == demo.run.steps_per_eval
    assert [*map(repr, asked["stop_conditions"])] == [*map(repr, conditions)]

    stats = namespace["stats"]
    assert stats["eval/returns/mean"] >= 450
    assert stats["eval/episodes/ended"] == 128
    assert stats["env/steps"] < 204_800
    (promised,) = blocks(PAGES[0], "text")
    figures = r"\d[\d,]*"
    assert re.sub(figures, "N", capsys.readouterr().out) == re.sub(figures, "N", promised)
    assert promised.startswith("Plateau('eval/returns/mean'")
    start = ROOT / "docs" / "index.md"
    assert [blocks(start, language)[0] for language in ("python", "text")] == [blocks(PAGES[0], "python")[0], promised]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("owner", [rl8x, Trainer], ids=["package", "Trainer"])
def test_the_scripts_of_docstrings_run(owner: Any) -> None:
    (code,) = re.findall(r"\n\n((?:    .*\n|\n)+)", inspect.getdoc(owner) or "")
    namespace: dict[str, Any] = {}
    exec(textwrap.dedent(code), namespace)
    # Two steps may reach the bound of the example too, which hangs on how a processor rounds.
    assert namespace["trainer"].stop_reason.split("; ")[-1] == "max_steps=2"


@with_blocks("bash")
def test_commands_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` and `study` go as far as they can without training; others are parsed in test_commands.py."""
    monkeypatch.chdir(ROOT)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for program, command, *rest in commands(page):
        assert program in ("make", "pip", "rl8x"), f"{program} {command}"
        if program == "make":
            assert command in targets
        elif program == "pip":
            (extras,) = re.findall(r"^\.(?:\[(.+)\])?$", *rest)
            assert set(filter(None, extras.split(","))) <= EXTRAS
        elif page != TUTORIAL and command in ("train", "study") and not {"--help", "--backend"} & {*rest}:
            words = [word for word in rest if "--resume" not in rest or word not in ("--resume", "auto")]
            assert main([command, *words, "--dry-run"]) == 0, rest


@with_blocks("yaml")
def test_run_files_are_legal(page: Path) -> None:
    for block in blocks(page, "yaml"):
        data = yaml.load(block, Loader=Loader)
        if "train" in data:
            StudyConfig.from_dict(data).check()
            continue
        if "algorithm_config" in data:
            RunSpec.from_plain({"env": "CartPole", **data})
        assert {"stop_conditions", "env_config", "algorithm_config"} & data.keys()
        for spec in data.get("stop_conditions", ()):
            from_spec(spec)
        CartPole(4).plain_config(data.get("env_config", {}))


def test_the_page_of_studies_has_the_example_and_its_measurement() -> None:
    """What is printed is what is run: script, file and `benchmarks/results/study.json` are one study."""
    page = ROOT / "docs" / "studies.md"
    script, file = blocks(page, "python")[0], blocks(page, "yaml")[0]
    assert len(script.strip().splitlines()) <= 12
    example = (ROOT / "examples" / "study.yaml").read_text()
    assert example.partition("\n")[2] == file
    made: dict[str, Any] = {}
    exec(script.partition("study.run")[0], made)
    document = json.loads((ROOT / "benchmarks" / "results" / "study.json").read_text())
    as_file = {**StudyConfig.from_file(ROOT / "examples" / "study.yaml").to_dict(), "trials": None}
    assert made["study"].config.to_dict() == as_file
    assert document["study"] == json.loads(json.dumps(as_file))


def test_calls_on_pages_name_arguments_that_there_are() -> None:
    modules = [importlib.import_module(package) for package in packages()]
    public = {name: getattr(module, name) for module in modules for name in exported(module)}
    checked = 0
    for page in PAGES:
        for name, arguments in re.findall(r"`(?:[\w.]+\.)?(\w+)\(([^()`]*)\)`", page.read_text()):
            value = public.get(name, getattr(Trainer, name, None))
            named = set(re.findall(r"(?:^|, )(\w+)=", arguments)) - {"gama"}  # which a page has to show the refusal
            if value is not None and named:
                taken = inspect.signature(value).parameters
                checked += 1
                assert named <= {*taken} or any(each.kind == each.VAR_KEYWORD for each in taken.values()), (page, name)
    assert checked > 50


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:src|tests|examples|benchmarks|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_architecture_names_files_that_are_there() -> None:
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|h))`", (ROOT / "docs" / "architecture.md").read_text())
    there = [f"/{path.relative_to(ROOT)}" for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.[ph]*")]
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []


def test_the_architecture_names_the_layers_that_are_tested() -> None:
    from tests.test_layers import LAYERS

    rows = re.findall(r"^\| L\d \| (.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
    named = [set(re.findall(r"`(\w+)`", row)) for row in rows]
    assert named == [set(parts) for parts in LAYERS]


@pytest.mark.parametrize("section", ["PPO", "PQN", "DQN", "SAC", "TD3", "BC", "IQL"])
def test_every_option_of_an_algorithm_is_in_its_section_and_no_other(section: str) -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    intro, own = text.split("\n## ")[0], text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    shared = set(re.findall(r"`(\w+)`", intro.split("Options of all algorithms:")[1]))
    cells = [line.split("|")[1] for line in own.splitlines() if "|" in line]
    fields = {field.name for field in dataclasses.fields(algorithm_configs()[section])}
    assert shared == {field.name for field in dataclasses.fields(OnlineConfig)}
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == fields - shared

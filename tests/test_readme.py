"""What README.md and docs/ print works: scripts run, commands exist, links lead somewhere, and tables are complete."""

import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
import tomllib

import pytest
import yaml
from tests.pages import PAGES, ROOT, all_blocks, blocks, commands, commands_of, name_of
from tests.test_reference import exported, packages

import rl8x
import rl8x.trainers.trainer
from rl8x import NullTracker, OnlineConfig, PPOConfig, Trainer
from rl8x.cli.main import COMMANDS, main
from rl8x.conditions import from_spec
from rl8x.config import RunSpec, algorithm_configs
from rl8x.envs import CartPole
from rl8x.plain import Loader
from rl8x.studies import Study, StudyConfig

DOCS = ROOT / "docs"
TUTORIAL = DOCS / "tutorials" / "own-environment.md"  # done whole, as it stands
NUMBER = r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?"


def with_blocks(language):
    """Parametrize by the pages that have blocks in a language."""
    return pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, language)], ids=name_of)


def keep_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have trainers that are given no tracker keep nothing."""
    monkeypatch.setattr(NullTracker, "check", lambda self: None, raising=False)
    monkeypatch.setattr(rl8x.trainers.trainer, "MLflowTracker", NullTracker)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Shrink what a snippet asks for: 16 copies at most, 2 steps a run, each evaluated if any is, no MLflow.

    A study has one seed, its trainings one after the other, and one episode in each of few cells.
    """
    init, run, study_init, study_run = PPOConfig.__init__, Trainer.run, Study.__init__, Study.run

    def small_init(self, **fields):
        num_envs = min(fields.get("num_envs", 8), 16)
        fits = num_envs * fields.get("horizon", 32) % (fields.get("sgd_minibatch_size") or 1) == 0
        init(self, **{**fields, **({} if fits else {"sgd_minibatch_size": 64}), "num_envs": num_envs, "device": "cpu"})

    def small_run(self, **options):
        evaluated = {"steps_per_eval": 1} if options.get("steps_per_eval") else {}
        return run(self, **{**options, **evaluated, "max_steps": 2})

    def small_study_init(self, train, test, **options):
        options |= {"seeds": 1, "episodes": 1, "tracking": False, "progress": "none"}
        study_init(self, train, json.loads(re.sub(r"\d+\]}", "3]}", json.dumps(test))), **options)

    monkeypatch.setattr(PPOConfig, "__init__", small_init)
    monkeypatch.setattr(Trainer, "run", small_run)
    monkeypatch.setattr(Study, "__init__", small_study_init)
    monkeypatch.setattr(Study, "run", lambda self, jobs=1: study_run(self))
    keep_no_rows(monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("small")
@with_blocks("python")
def test_python_runs(page):
    namespace = {}
    for number, code in enumerate(blocks(page, "python") if page != TUTORIAL else [], start=1):
        code = re.sub(r"\b(\d+)_000\b", r"\1", code)
        exec(compile(code, f"{page.name}, snippet {number}", "exec"), namespace)


@pytest.mark.long
def test_the_first_script_does_what_the_demo_does_and_ends_when_its_return_stays(monkeypatch, tmp_path, capsys):
    asked, run, namespace = {}, Trainer.run, {}
    monkeypatch.setattr(Trainer, "run", lambda self, **options: (asked.update(options), run(self, **options))[1])
    keep_no_rows(monkeypatch)
    monkeypatch.chdir(tmp_path)
    exec(blocks(PAGES[0], "python")[0], namespace)
    demo = RunSpec.from_file(ROOT / "examples" / "demo.yaml")
    assert namespace["config"] == PPOConfig(**demo.algorithm.algorithm_config)
    assert namespace["trainer"].record.spec.trainer.num_eval_envs == demo.trainer.num_eval_envs
    assert asked["steps_per_eval"] == demo.run.steps_per_eval
    assert [*map(repr, asked["stop_conditions"])] == [*map(repr, demo.run.conditions())]
    stats = namespace["stats"]
    assert stats["eval/returns/mean"] >= 450
    assert stats["eval/episodes/ended"] == 128
    assert stats["env/steps"] < 204_800
    (promised,) = blocks(PAGES[0], "text")
    assert re.sub(r"\d[\d,]*", "N", capsys.readouterr().out) == re.sub(r"\d[\d,]*", "N", promised)
    start = DOCS / "index.md"
    assert [blocks(start, language)[0] for language in ("python", "text")] == [blocks(PAGES[0], "python")[0], promised]


def shape(text):
    """A text without its numbers, which another processor may have otherwise, and without the spaces that they need."""
    return re.sub(r" +", " ", re.sub(NUMBER, "N", text)).strip()


@pytest.mark.long
def test_a_stranger_comes_from_an_empty_folder_to_policies_that_are_compared_and_exported(mlruns, monkeypatch, capsys):
    """The tutorial, step by step."""
    folder, path, printed, followed = mlruns.parent, list(sys.path), "", []
    monkeypatch.setenv("COLUMNS", "120")
    for language, title, code in all_blocks(TUTORIAL):
        if title is not None:
            (folder / title).write_text(code)
        if language == "text":
            assert shape(code) in shape(printed), f"it was: {printed}"
            continue
        if language == "python" and title != "room.py":
            monkeypatch.setattr(sys, "path", [*path, str(folder)])  # where `python weather.py` finds `room`
            exec(compile(code, str(title), "exec"), {"__name__": "__main__"})
        for program, command, *words in commands_of(code) if language == "bash" else ():
            assert program == "rl8x"
            assert command in COMMANDS
            if command != "ui":  # which would serve for ever
                sys.modules.pop("room", None)  # a command is a process of its own, which finds `room` by itself
                monkeypatch.setattr(sys, "path", list(path))
                assert main([command, *words]) == 0
                followed.append(command)
        printed = capsys.readouterr().out if language in ("python", "bash") else printed
        if title == "weather.py":
            off = {(line[:11].strip(), line[11:16].strip()): line for line in printed.splitlines()}
            mild, drawn = (float(re.findall(NUMBER, off[name, "-10"])[-1]) for name in ("mild", "any-weather"))
            assert mild < 1.5 * drawn < 0  # what the page says of them
    sys.modules.pop("room", None)
    assert followed == ["train", "train", "compare", "resume", "export"]
    assert (folder / "reports" / "compare-mild" / "compare.html").exists()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("owner", [rl8x, Trainer], ids=["package", "Trainer"])
def test_the_scripts_of_docstrings_run(owner):
    (code,) = re.findall(r"\n\n((?:    .*\n|\n)+)", inspect.getdoc(owner) or "")
    namespace = {}
    exec(textwrap.dedent(code), namespace)
    # Two steps may reach the bound of the example too, which hangs on how a processor rounds.
    assert namespace["trainer"].stop_reason.split("; ")[-1] == "max_steps=2"


@with_blocks("bash")
def test_commands_exist(page, monkeypatch):
    """`train` and `study` go as far as they can without training; others are parsed in test_commands.py."""
    monkeypatch.chdir(ROOT)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for program, command, *rest in commands(page):
        assert program in ("make", "pip", "rl8x"), f"{program} {command}"
        if program == "make":
            assert command in targets
        elif program == "pip":
            (extras,) = re.findall(r"^\.(?:\[(.+)\])?$", *rest)
            assert set(filter(None, extras.split(","))) <= known.keys()
        elif page != TUTORIAL and command in ("train", "study") and not {"--help", "--backend"} & {*rest}:
            words = [word for word in rest if "--resume" not in rest or word not in ("--resume", "auto")]
            assert main([command, *words, "--dry-run"]) == 0, rest


@with_blocks("yaml")
def test_run_files_are_legal(page):
    for data in (yaml.load(block, Loader=Loader) for block in blocks(page, "yaml")):
        if "train" in data:
            StudyConfig.from_dict(data).check()
            continue
        if "algorithm_config" in data:
            RunSpec.from_plain({"env": "CartPole", **data})
        assert {"stop_conditions", "env_config", "algorithm_config"} & data.keys()
        for spec in data.get("stop_conditions", ()):
            from_spec(spec)
        CartPole(4).plain_config(data.get("env_config", {}))


def test_the_page_of_studies_has_the_example_and_its_measurement():
    """What is printed is what is run: script, file and `benchmarks/results/study.json` are one study."""
    script, file = (blocks(DOCS / "studies.md", language)[0] for language in ("python", "yaml"))
    assert (ROOT / "examples" / "study.yaml").read_text().partition("\n")[2] == file
    made = {}
    exec(script.partition("study.run")[0], made)
    as_file = {**StudyConfig.from_file(ROOT / "examples" / "study.yaml").to_dict(), "trials": None}
    assert made["study"].config.to_dict() == as_file
    measured = json.loads((ROOT / "benchmarks" / "results" / "study.json").read_text())["study"]
    assert measured == json.loads(json.dumps(as_file))


def test_calls_on_pages_name_arguments_that_there_are():
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:src|tests|examples|benchmarks|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_architecture_names_files_that_there_are():
    text = (DOCS / "architecture.md").read_text()
    there = [f"/{path.relative_to(ROOT)}" for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.[ph]*")]
    for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|h))`", text):
        assert any(path.endswith(f"/{name}") for path in there), name


@pytest.mark.parametrize("section", ["PPO", "PQN", "DQN", "SAC", "TD3", "BC", "IQL"])
def test_every_option_of_an_algorithm_is_in_its_section_and_no_other(section):
    text = (DOCS / "algorithms.md").read_text()
    intro, own = text.split("\n## ")[0], text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    shared = set(re.findall(r"`(\w+)`", intro.split("Options of all algorithms:")[1]))
    cells = [line.split("|")[1] for line in own.splitlines() if "|" in line]
    fields = {field.name for field in dataclasses.fields(algorithm_configs()[section])}
    assert shared == {field.name for field in dataclasses.fields(OnlineConfig)}
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == fields - shared

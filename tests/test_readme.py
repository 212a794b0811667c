"""What README.md and docs/ print works: Python runs at a reduced size, commands exist, links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
import yaml
from tests.pages import PAGES, ROOT, blocks, commands, name_of

import rl8x
import rl8x.trainers.trainer
from benchmarks import learning, learning_envs, learning_runs, report, study_figures
from rl8x import NullTracker, PPOConfig, Trainer, drawing
from rl8x.cli.main import COMMANDS, main
from rl8x.cli.main import rl8x as group
from rl8x.conditions import from_spec
from rl8x.config import RunSpec
from rl8x.config.tuned import measured, tuned_files
from rl8x.envs import CartPole
from rl8x.plain_yaml import Loader
from rl8x.studies import Study, StudyConfig
from rl8x.trainers import TrainStats

TUTORIAL = ROOT / "docs" / "tutorials" / "own-environment.md"  # run whole, as it stands, by test_tutorial.py
EXTRAS = {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}
NAMES = [name_of(page) for page in PAGES]


def with_blocks(*languages: str) -> Any:
    """Parametrize by the pages that have blocks in these languages."""
    chosen = [page for page in PAGES if any(blocks(page, language) for language in languages)]
    return pytest.mark.parametrize("page", chosen, ids=name_of)


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
    monkeypatch.setattr(rl8x.trainers.trainer, "default_tracker", NullTracker)
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


def test_the_first_script_does_what_the_demo_does_and_ends_when_its_return_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[dict[str, Any]] = []
    run = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self, **options: (runs.append(options), run(self, **options))[1])
    monkeypatch.setattr(rl8x.trainers.trainer, "default_tracker", NullTracker)
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
    assert stats["eval/returns/mean"] >= 490
    assert stats["eval/episodes/ended"] == 128
    assert stats["env/steps"] < 204_800
    (promised,) = blocks(PAGES[0], "text")
    figures = r"\d[\d,]*"
    assert re.sub(figures, "N", capsys.readouterr().out) == re.sub(figures, "N", promised)
    assert promised.startswith("Plateau('eval/returns/mean'")
    start = ROOT / "docs" / "index.md"
    assert [blocks(start, language)[0] for language in ("python", "text")] == [blocks(PAGES[0], "python")[0], promised]


@pytest.mark.parametrize("owner", [rl8x, Trainer], ids=["package", "Trainer"])
def test_the_scripts_of_docstrings_solve_their_task(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"\n\n((?:    .*\n|\n)+)", inspect.getdoc(owner) or "")
    run, init = Trainer.run, PPOConfig.__init__
    monkeypatch.setattr(Trainer, "run", lambda self, **options: run(self, **options, max_steps=200))
    monkeypatch.setattr(PPOConfig, "__init__", lambda self, **fields: init(self, **fields, seed=0, device="cpu"))
    monkeypatch.setattr(rl8x.trainers.trainer, "default_tracker", NullTracker)
    namespace: dict[str, Any] = {}
    exec(textwrap.dedent(code), namespace)
    assert namespace["trainer"].stop_reason.startswith("HitsUpperBound('eval/returns/mean', 475): ")


@pytest.mark.usefixtures("small")
def test_the_page_of_conditions_has_a_complete_one(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    (code,) = [code for code in blocks(ROOT / "docs" / "conditions.md", "python") if "(Condition)" in code]
    exec(code, namespace)
    assert capsys.readouterr().out == "[False, False, False, True]\n"
    name, falls = "episodes/returns/mean", namespace["falls"]
    assert repr(falls) == f"Falls('{name}', 0.5)"
    assert falls.reason({name: 40.0}) == f"Falls('{name}', 0.5): {name} = 40"
    assert [falls({}), (~falls)({}), (~falls)({name: 60.0})] == [False, False, True]

    resumed = namespace["Falls"](**falls.arguments())
    assert resumed({name: 40.0}) is False
    resumed.load_state_dict(json.loads(json.dumps(falls.state_dict())))
    assert resumed({name: 40.0}) is True
    resumed.start()
    assert resumed({name: 40.0}) is False

    algorithm = PPOConfig(num_envs=8, horizon=8).build("CartPole")
    trainer = Trainer(algorithm, tracker=NullTracker())
    with pytest.raises(ValueError, match="Unknown metric 'episodes/return/mean' in Falls"):
        trainer.run(stop_conditions=[namespace["Falls"]("episodes/return/mean", 0.5)])


@pytest.mark.usefixtures("small")
def test_the_callbacks_of_their_page_do_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    for code in blocks(ROOT / "docs" / "callbacks.md", "python"):
        exec(code, namespace)
    assert re.fullmatch(r"([\d,]+ transitions: return \d+\n){2}max_steps=2\n", capsys.readouterr().out)
    assert len(namespace["trainer"].tracker.history("weights/norm")) == 2

    Path("STOP").touch()
    stopped = Trainer(PPOConfig().build(CartPole), tracker=NullTracker(), callbacks=[namespace["stop_file"]])
    assert stopped.run(progress="none").stop_reason == "there is a file STOP"

    rates, halves = [1.0], namespace["HalvesRate"]()
    trainer = SimpleNamespace(algorithm=SimpleNamespace(set_lr=rates.append))
    after = []
    for value in (
        10,
        10,
        9,
        10,
        10,
        10,
        10,
        11,
    ):  # three no better than 10, then three no better than the first of these
        row = TrainStats({"eval/returns/mean": value, "coefficients/lr": rates[-1]})
        halves(trainer, row)
        halves(trainer, TrainStats(row, fresh=frozenset()))  # a row without an evaluation
        after.append(rates[-1])
    assert after == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5]


@with_blocks("bash")
def test_commands_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train` and `study` go as far as they can without training; others are parsed with what is typed there."""
    monkeypatch.chdir(ROOT)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for program, command, *rest in commands(page):
        assert program in ("make", "pip", "rl8x"), f"{program} {command}"
        if program == "make":
            assert command in targets
        elif program == "pip":
            assert command == "install"
            (extras,) = re.findall(r"^\.(?:\[(.+)\])?$", *rest)
            assert set(filter(None, extras.split(","))) <= EXTRAS
        elif page == TUTORIAL:
            assert command in COMMANDS
        elif (command == "train" and "--help" not in rest) or (command == "study" and "--backend" not in rest):
            if "--resume" in rest:
                rest = [word for word in rest if word not in ("--resume", "auto")]
            assert main([command, *rest, "--dry-run"]) == 0, rest
        elif "--help" in rest:
            assert main([command, *("PPO" if word == "mypackage.MyConfig" else word for word in rest)]) == 0
        else:
            parse(command, rest)


def parse(command: str, words: list[str]) -> None:
    """Let a command read what is typed after it, and do nothing."""
    made = group.get_command(click.Context(group), command)
    assert made is not None, f"no command {command!r}"
    made.make_context(command, list(words))


def test_the_defaults_that_are_told_to_users_of_rl8_are_so() -> None:
    text = (ROOT / "docs" / "coming-from-rl8.md").read_text()
    (told,) = re.findall(r"^## Defaults\n(.*?)\. What", text, flags=re.DOTALL | re.MULTILINE)
    theirs, ours = told.split("rl8x's own")
    for config, words, count in ((PPOConfig.rl8(), theirs, 18), (PPOConfig(), ours, 7)):
        defaults = {name: ast.literal_eval(value) for name, value in re.findall(r"`(\w+)=(.*?)`", words)}
        assert len(defaults) == count
        assert {name: getattr(config, name) for name in defaults} == defaults


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
    document = json.loads(study_figures.RESULTS.read_text())
    as_file = {**StudyConfig.from_file(ROOT / "examples" / "study.yaml").to_dict(), "trials": None}
    assert made["study"].config.to_dict() == as_file
    assert document["study"] == json.loads(json.dumps(as_file))
    assert f"<!-- study -->\n{study_figures.table(document)}\n<!-- /study -->" in page.read_text()


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
    named = [set(re.findall(r"`(\w+)`", row)) for row in rows]
    assert [named[0] | {"_version"}, *named[1:]] == [set(parts) for parts in LAYERS]


@pytest.mark.parametrize(
    ("page", "tasks"),
    [
        ("README.md", learning.shown()),
        ("docs/learning.md", learning.TASKS),
        ("docs/which-algorithm.md", learning.compared()),
    ],
    ids=["README.md", "docs/learning.md", "docs/which-algorithm.md"],
)
def test_the_figures_are_those_of_the_committed_measurement(page: str, tasks: dict[str, Any]) -> None:
    document = json.loads(learning.DEFAULT_OUT.read_text())
    table = learning.report(document["rows"], tasks)
    assert f"<!-- learning -->\n{table}\n<!-- /learning -->" in (ROOT / page).read_text()


def test_the_speeds_are_those_of_the_committed_measurement() -> None:
    readme = (ROOT / "README.md").read_text()
    assert report.README_SECTION.search(readme)
    assert report.filled_readme(readme, ROOT / "benchmarks" / "results") == readme


def test_every_seed_of_every_task_passed_under_the_present_settings() -> None:
    document = json.loads(learning.DEFAULT_OUT.read_text())
    tasks, means = learning.all_tasks(), {(row["task"], row["seed"]): row["return_mean"] for row in document["rows"]}
    assert {*learning.shown(), *learning.OFFLINE} <= set(document["tasks"]) <= set(tasks)
    for row in document["rows"]:
        task = tasks[row["task"]]
        if isinstance(task, learning.OfflineTask):
            compared = (row["data_mean"], means.get((task.above, row["seed"])))
        else:
            compared = (row.get("first_at"),)
        assert task.passes(row["return_mean"], *compared) is row["passed"] is True, row
        assert row["episodes"] == task.episodes
        assert row.get("invalid_actions", 0) == 0
    for name, task in document["tasks"].items():
        seeds = [row["seed"] for row in document["rows"] if row["task"] == name]
        wanted = [*range(tasks[name].seeds)]
        # Seeds of hours come one by one, and the table says how many there are.
        assert seeds == wanted[: len(seeds) if getattr(tasks[name], "best_bound", None) else None]
        described = {key: value for key, value in task.items() if key != "machine"}
        assert described == json.loads(json.dumps(tasks[name].described)), f"{name} was measured otherwise"
        assert task["machine"]["versions"]["torch"]
    assert any("invalid_actions" in row for row in document["rows"])


def test_the_learning_benchmark_measures_the_final_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = dataclasses.replace(learning.TASKS["cartpole"].changed(4096), bound=5.0)
    monkeypatch.setattr(learning, "TASKS", {"cartpole": task})
    out = tmp_path / "learning.json"
    assert learning.main(["--tasks", "cartpole", "--seeds", "0", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["seed"], row["env_steps"], row["updates"], row["episodes"]) for row in rows] == [
        (0, 4096, 32, 256),
        (1, 4096, 32, 256),
    ]
    assert "cartpole" in capsys.readouterr().out
    monkeypatch.setattr(learning, "TASKS", {"cartpole": dataclasses.replace(task, bound=501.0)})
    assert learning.main(["--tasks", "cartpole", "--seeds", "0", "--out", str(out)]) == 1


def test_the_learning_benchmark_counts_the_invalid_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    task = dataclasses.replace(learning.TASKS["action-mask"].changed(4096), bound=0.0)
    row = learning.measure("action-mask", task, 0)
    assert (row["invalid_actions"], row["passed"]) == (0, True)
    # A policy that does not look at the mask takes traps, and fails for it.
    monkeypatch.setattr(
        learning_envs.Traps,
        "observe",
        lambda self, state, parameters: {
            "action_mask": torch.ones_like(state["worth"], dtype=torch.int8),
            "worth": state["worth"] + ~state["legal"],
        },
    )
    row = learning.measure("action-mask", task, 0)
    assert 4096 * 0.2 < row["invalid_actions"] < 4096 + 256 * 16
    assert row["passed"] is False


def test_the_bound_must_be_reached_in_time_and_at_the_end() -> None:
    task = dataclasses.replace(learning.TASKS["cartpole-dqn"], first_within=500)
    assert [task.passes(*seen) for seen in ((480.0, 500), (480.0, 501), (480.0, None), (470.0, 100))] == [
        *(True, False, False, False)
    ]
    row = {"seed": 0, "env_steps": 1000, "updates": 500, "cpu_s": 1.0, "return_mean": 480.0, "task": "cartpole-dqn"}
    rows = [{**row, "first_at": 300}, {**row, "first_at": 400, "return_mean": 490.0}]
    last = "| cartpole-dqn | ≥ 475, first within 500 | 480.0, first at 400 | 485.0 |  | 2 of 5 | 1,000 | 500 | 1.0 |"
    assert learning.report(rows, {"cartpole-dqn": task}).splitlines()[-1] == last
    assert "first never" in learning.report([{**row, "first_at": None}], {"cartpole-dqn": task})


def test_when_the_bound_was_first_reached_is_measured() -> None:
    task = learning.TASKS["cartpole-dqn"].changed(640, warmup_steps=128, execution="eager")
    task = dataclasses.replace(task, steps_per_eval=2, episodes=4, bound=5.0, first_within=256)
    row = learning.measure("cartpole-dqn", task, 0)
    assert (row["first_at"], row["passed"], row["updates"]) == (256, True, 512)
    row = learning.measure("cartpole-dqn", dataclasses.replace(task, bound=501.0), 0)
    assert (row["first_at"], row["passed"]) == (None, False)


def test_the_offline_table_is_that_of_the_measurements() -> None:
    rows = json.loads(learning.DEFAULT_OUT.read_text())["rows"]
    table = learning.report_offline(rows, learning.OFFLINE)
    assert f"<!-- offline -->\n{table}\n<!-- /offline -->" in (ROOT / "docs" / "learning.md").read_text()


def test_new_rows_replace_those_of_their_task_and_seed_alone() -> None:
    tasks = {name: learning.TASKS[name] for name in ("cartpole", "pendulum", "acrobot")}

    def row(task: str, seed: int, mean: float) -> dict[str, Any]:
        return {"task": task, "seed": seed, "return_mean": mean}

    first = learning.merged({}, [row("pendulum", 1, 2.0), row("cartpole", 0, 1.0)], tasks)
    assert [*first["tasks"]] == ["cartpole", "pendulum"]
    assert first["rows"] == [row("cartpole", 0, 1.0), row("pendulum", 1, 2.0)]
    second = learning.merged(first, [row("pendulum", 0, 3.0), row("acrobot", 0, 4.0)], tasks)
    assert [each["return_mean"] for each in second["rows"]] == [1.0, 3.0, 2.0, 4.0]
    assert learning.merged(second, [row("cartpole", 0, 9.0)], tasks)["rows"][0] == row("cartpole", 0, 9.0)
    # Under other settings the task's older rows say nothing any more.
    changed = {**tasks, "pendulum": tasks["pendulum"].changed(gamma=0.9)}
    third = learning.merged(second, [row("pendulum", 0, 5.0)], changed)
    assert [each["return_mean"] for each in third["rows"]] == [1.0, 5.0, 4.0]
    assert json.loads(learning.as_text(third)) == third


def test_what_is_published_replaces_the_table_and_draws_the_curves(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    settings = tmp_path / learning.MEASURED.relative_to(ROOT)
    settings.parent.mkdir(parents=True)
    pages = [tmp_path / name for name in ("README.md", "docs/which-algorithm.md", "docs/learning.md")]
    for page in pages:
        page.write_text("before\n<!-- learning -->\nold\n<!-- /learning -->\nafter\n")
    with pages[-1].open("a") as page_of_offline:
        page_of_offline.write("<!-- offline -->\nold\n<!-- /offline -->\nend\n")
    document = json.loads(learning.DEFAULT_OUT.read_text())
    learning.publish(document, tmp_path)
    for page, tasks in zip(pages, (learning.shown(), learning.compared(), learning.TASKS), strict=True):
        table = learning.report(document["rows"], tasks)
        text, _, offline = page.read_text().partition("<!-- offline -->\n")
        assert text == f"before\n<!-- learning -->\n{table}\n<!-- /learning -->\nafter\n"
    assert offline == f"{learning.report_offline(document['rows'], learning.OFFLINE)}\n<!-- /offline -->\nend\n"
    assert settings.read_text() == learning.MEASURED.read_text()
    for suffix in ("", "-all", "-dqn", "-pqn", "-sac", "-td3"):
        assert (tmp_path / "docs" / "images" / f"learning{suffix}.png").read_bytes().startswith(b"\x89PNG")


def test_tasks_whose_simulator_is_missing_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {name: name in ("mujoco", "torch") for name in ("mujoco", "Box2D", "torch")}
    monkeypatch.setattr(learning.importlib.util, "find_spec", lambda name: object() if found[name] else None)
    packages = {name: learning.missing(task) for name, task in learning.TASKS.items()}
    lacking = {"lunar-lander", "lunarlander-v3-dqn", "lunarlander-v3-pqn", "carracing-v3-ppo"}
    assert {name: package for name, package in packages.items() if package} == dict.fromkeys(lacking, "Box2D")
    (tmp_path / "learning.json").write_text('{"tasks": {}, "rows": []}')
    assert learning.main(["--tasks", "lunar-lander", "--out", str(tmp_path / "learning.json")]) == 0
    assert "lunar-lander         left out: it needs Box2D" in capsys.readouterr().out


def test_every_setting_that_users_have_by_name_is_a_task_and_its_results_are_the_measured_ones() -> None:
    document = json.loads(learning.DEFAULT_OUT.read_text())
    results = learning.of_settings(document, learning.TASKS)
    assert results == measured()
    assert results["LunarLander-v3-ppo"]["transitions"] == 1_003_520
    runs = [task.run for task in learning.TASKS.values()]
    for task, algorithms in tuned_files().items():
        for algorithm in algorithms:
            assert rl8x.tuned(task, algorithm) in runs, (task, algorithm)


def test_results_under_other_settings_are_not_told() -> None:
    document = json.loads(learning.DEFAULT_OUT.read_text())
    assert "CartPole-ppo" in learning.of_settings(document, {"cartpole": learning.TASKS["cartpole"]})
    # One that was changed for an experiment is none that users have by name.
    assert learning.of_settings(document, {"cartpole": learning.TASKS["cartpole"].changed(gamma=0.9)}) == {}
    document["tasks"]["cartpole"]["run"]["algorithm_config"]["gamma"] = 0.9
    assert learning.of_settings(document, {"cartpole": learning.TASKS["cartpole"]}) == {}


def test_a_curve_is_thinned_from_its_end() -> None:
    curve = [[float(i), 0.0] for i in range(10)]
    assert learning_runs.thinned(curve, most=4) == [[0.0, 0.0], [3.0, 0.0], [6.0, 0.0], [9.0, 0.0]]
    assert learning_runs.thinned(curve, most=10) == curve
    assert learning_runs.thinned([]) == []

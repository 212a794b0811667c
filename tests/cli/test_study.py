"""`rl8x study`, `report` and `compare`: what they print, write and log, and their exit codes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.studies.synthetic import SUPPORTS, evaluations, write_study

from rl8x import drawing
from rl8x.cli.main import main
from rl8x.tracking.location import locate
from rl8x.tracking.repeats import Point
from rl8x.tracking.store import MLflowStore, NewRun

FILE = """\
env: CartPole
max_steps: 1
algorithm_config: {num_envs: 8, horizon: 8, device: cpu, model_config: {hidden_sizes: [8]}}
tracking: false
train: {fixed: {length: 0.5}, wide: {length: {uniform: [0.25, 1.0]}}}
test: {length: [0.25, 0.5, 2.0]}
episodes: 2
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(FILE)
    return tmp_path / "tiny.yaml"


NONE = "no test cell is inside of what it is trained on: none has "
MOON = f"moon: {NONE}all of it at once (a parameter that the test does not name has its default)"


def test_a_study_runs_and_says_what_came_out(file, capsys):
    words = ["study", "-f", "tiny.yaml", "seeds=[3]", "train={fixed: {length: 0.5}, moon: {gravity: 1.6}}"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["training", "seeds", "return", "inside", "outside", "own", "worst", "cell"]
    assert [line.split()[:2] for line in lines[1:3]] == [["fixed", "1"], ["moon", "1"]]
    assert lines[3:] == [MOON, f"to look at it: rl8x report {file.parent / 'mlruns' / 'studies' / 'tiny'}"]
    said = [line for line in err.splitlines() if line.startswith("rl8x: ")]
    expected = ["fixed seed=3", "fixed seed=3", "moon seed=3", "moon seed=3"]
    assert [line.split(":")[1].strip() for line in said] == expected
    assert "(2/2)" in said[-1]
    assert main(words) == 0  # which only reads
    again, err = capsys.readouterr()
    assert again == out
    assert "begins" not in err


def test_a_dry_run_lists_the_trainings_and_writes_nothing(file, call):
    lines = call("study", "-f", "tiny.yaml", "seeds=2", "vary.lr=[1e-3, 1e-2]", "--dry-run").splitlines()
    assert len(lines) == 10
    assert lines[1] == "fixed lr=0.001 seed=1"
    assert lines[-2:] == ["8 trainings", "each tested in 3 cells, 2 episodes in each: 6 episodes a test"]
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("train", "test", "notes"),
    [
        # A grid that misses the default
        ("{calm: {}, wide: {length: {uniform: [0.2, 1]}}}", "{length: [0.3, 0.7]}", [f"calm: {NONE}length 0.5"]),
        (
            "{drawn: {length: {uniform: [1, 2]}}, fixed: {force_mag: 7}}",
            "{length: {linspace: [0.1, 0.9, 5]}, force_mag: [7, 10]}",
            [f"drawn: {NONE}length from 1 to 2"],
        ),
        # All is at its default but the gravity, which the test does not name
        ("{moon: {gravity: 1.6}}", "{length: [0.5, 1]}", [MOON]),
        ("{lists: {length: {choice: [0.5, 1]}}}", "{length: [0.5, 3]}", []),
    ],
)
def test_a_training_without_a_cell_inside_says_why(file, call, train, test, notes):
    out = call("study", "-f", "tiny.yaml", "seeds=[3]", f"train={train}", f"test={test}", "--dry-run")
    assert [line for line in out.splitlines() if "inside of what" in line] == notes


def test_trainings_that_fail_are_named_and_the_exit_code_is_1(file, call, monkeypatch):
    answer = lambda job: {"key": job["key"], "error": "the disk is full"}  # noqa: E731
    monkeypatch.setattr("rl8x.studies.study.run_job", answer)
    assert "failed: wide seed=0: the disk is full" in call("study", "-f", "tiny.yaml", code=1).splitlines()


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Draw nothing: tests of figures are elsewhere, and each takes a third of a second."""
    monkeypatch.setattr(drawing, "png", lambda *_, titled=False: b"a picture")


@pytest.fixture
def study(tmp_path):
    table = evaluations(grid={"length": np.linspace(0.1, 2.0, 4)})
    return write_study(tmp_path / "poles", table, SUPPORTS, name="poles", env="CartPole")


def test_a_folder_is_reported(study, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    text = call("report", study, "--baseline", "uniform", "--no-log")
    assert "fixed    3" in text
    assert "Evaluations online: 6 policies in 96 episodes" in text
    assert f"Written: {study}/report/report.html" in text
    assert {path.name for path in (study / "report").iterdir()} == {
        "report.html", "summary.csv", "intervals.png", "curve-length.png", "profiles.png"
    }  # fmt: skip


def test_a_parent_run_is_reported_and_gets_the_files(study, mlruns, mlflow_client, call):
    store = MLflowStore(locate(None))
    parent = store.create_run(NewRun("1", "studies", None, "my study", 1))
    for name in ("evaluations.json", "study.json"):
        store.log_artifact(parent, study / name, None)
    told = call("report", "my study", "--output", "figures").splitlines()[:3]
    logged = {entry.path for entry in mlflow_client.list_artifacts(parent, "report")}
    assert logged == {f"report/{path.name}" for path in (mlruns.parent / "figures").iterdir()}
    assert "report/report.html" in logged
    assert call("report", study, "--no-log").splitlines()[:3] == told


def test_the_report_of_a_studys_folder_goes_to_the_run_with_its_key(tmp_path, mlruns, mlflow_client, call):
    store = MLflowStore(locate(None))
    other, parent = (store.create_run(NewRun(key, "studies", None, "alike", 1)) for key in ("1", "0" * 32))
    table = evaluations(grid={"length": [0.5, 1.0]})
    call("report", write_study(tmp_path / "untracked", table, tracking=False))
    assert not mlflow_client.list_artifacts(parent, "report")
    call("report", write_study(tmp_path / "poles", table))
    assert "report/report.html" in {entry.path for entry in mlflow_client.list_artifacts(parent, "report")}
    assert not mlflow_client.list_artifacts(other, "report")


def test_runs_are_compared(mlruns, call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    store = MLflowStore(locate(None))
    for number, lr in enumerate(("0.1", "0.2")):
        run = store.create_run(NewRun(str(number), "poles", None, f"run-{number}", 1 + number))
        store.log_params(run, {"lr": lr, "gamma": "0.9"})
        store.log_points(run, [Point("eval/returns/mean", 5.0 * number + step, 1 + step, step) for step in range(3)])
    text = call("compare", "run-0", "run-1", "--group-by", "lr")
    rows = [line.split() for line in text.splitlines()[:5]]  # runs as columns, as rows would be too wide
    expected = [["run", "run-0", "run-1"], ["lr", "0.1", "0.2"], ["status"] + ["running"] * 2, ["steps", "2", "2"]]
    assert rows[:4] == expected
    assert rows[4] == ["eval/returns/mean", "2", "7"]
    assert "gamma" not in text
    table, _, _ = text.rpartition("\n\n")
    assert max(map(len, table.splitlines())) <= 90
    assert "Written: reports/compare-run-0/compare.html" in text
    assert (mlruns.parent / "reports" / "compare-run-0" / "compare.html").is_file()

"""`rl8x report` and `rl8x compare`: what they print, write and log, and their mistakes."""

import numpy as np
import pytest
from tests.studies.synthetic import SUPPORTS, evaluations, write_study

from rl8x import drawing
from rl8x.tracking.location import locate
from rl8x.tracking.repeats import Point
from rl8x.tracking.store import MLflowStore, NewRun


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

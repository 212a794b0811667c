"""`rl8x report` and `rl8x compare`: what they print, write and log, and their mistakes."""

import numpy as np
import pytest
from tests.studies.synthetic import SUPPORTS, evaluations, write_study

from rl8x import drawing
from rl8x.cli.main import main
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


def test_a_folder_is_reported(study, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["report", str(study), "--baseline", "uniform", "--no-log"]) == 0
    text = capsys.readouterr().out
    assert "fixed    3" in text
    assert "Evaluations online: 6 policies in 96 episodes" in text
    assert f"Written: {study}/report/report.html" in text
    assert {path.name for path in (study / "report").iterdir()} == {
        "report.html", "summary.csv", "intervals.png", "curve-length.png", "profiles.png"
    }  # fmt: skip


def test_a_parent_run_is_reported_and_gets_the_files(study, mlruns, mlflow_client, capsys):
    store = MLflowStore(locate(None))
    parent = store.create_run(NewRun("1", "studies", None, "my study", 1))
    for name in ("evaluations.json", "study.json"):
        store.log_artifact(parent, study / name, None)
    assert main(["report", "my study", "--output", "figures"]) == 0
    logged = {entry.path for entry in mlflow_client.list_artifacts(parent, "report")}
    assert logged == {f"report/{path.name}" for path in (mlruns.parent / "figures").iterdir()}
    assert "report/report.html" in logged

    by_folder = capsys.readouterr().out.splitlines()[:3]
    assert main(["report", str(study), "--no-log"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == by_folder


def test_the_report_of_a_studys_folder_goes_to_the_run_with_its_key(tmp_path, mlruns, mlflow_client):
    store = MLflowStore(locate(None))
    other, parent = (store.create_run(NewRun(key, "studies", None, "alike", 1)) for key in ("1", "0" * 32))
    table = evaluations(grid={"length": [0.5, 1.0]})
    assert main(["report", str(write_study(tmp_path / "untracked", table, tracking=False))]) == 0
    assert not mlflow_client.list_artifacts(parent, "report")
    assert main(["report", str(write_study(tmp_path / "poles", table))]) == 0
    assert "report/report.html" in {entry.path for entry in mlflow_client.list_artifacts(parent, "report")}
    assert not mlflow_client.list_artifacts(other, "report")


def test_runs_are_compared(mlruns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    store = MLflowStore(locate(None))
    for number, lr in enumerate(("0.1", "0.2")):
        run = store.create_run(NewRun(str(number), "poles", None, f"run-{number}", 1 + number))
        store.log_params(run, {"lr": lr, "gamma": "0.9"})
        store.log_points(run, [Point("eval/returns/mean", 5.0 * number + step, 1 + step, step) for step in range(3)])
    assert main(["compare", "run-0", "run-1", "--group-by", "lr"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()[:5]]  # runs as columns, as rows would be too wide
    expected = [["run", "run-0", "run-1"], ["lr", "0.1", "0.2"], ["status"] + ["running"] * 2, ["steps", "2", "2"]]
    assert rows[:4] == expected
    assert rows[4] == ["eval/returns/mean", "2", "7"]
    assert "gamma" not in text
    table, _, _ = text.rpartition("\n\n")
    assert max(map(len, table.splitlines())) <= 90
    assert "Written: reports/compare-run-0/compare.html" in text
    for number, name in enumerate(("a/poles", "b/poles")):  # names, not paths: neither's files take the other's place
        store.log_points(store.create_run(NewRun(f"s{number}", "poles", None, name, 9)), [Point("x", 1.0, 9, 1)])
        assert main(["compare", name, "--metric", "x"]) == 0
        assert f"Written: reports/compare-{name[0]}-poles/compare.html" in capsys.readouterr().out
    assert (mlruns.parent / "reports" / "compare-run-0" / "compare.html").is_file()

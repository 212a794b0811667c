import pytest

from rl8x.tracking import TrackingError, find_run
from rl8x.tracking.runs import find_journal, user_run_id
from tracking.fakes import BothSides, header, left_over


def test_find_run(mlruns, mlflow_client):
    experiment = mlflow_client.create_experiment("e")
    run = mlflow_client.create_run(experiment, run_name="nice-fox")
    for found in (find_run(run.info.run_id), find_run("nice-fox")):
        assert (found.info.run_id, found.info.run_name) == (run.info.run_id, "nice-fox")
    with pytest.raises(TrackingError, match=r"no run 'nice-box'.*did you mean nice-fox"):
        find_run("nice-box")
    other = mlflow_client.create_run(experiment, run_name="nice-fox")
    with pytest.raises(TrackingError, match=f"2 runs are called 'nice-fox'.*{other.info.run_id}"):
        find_run("nice-fox")
    with pytest.raises(TrackingError, match="there is no run"):
        find_run("x' OR '1'='1")


def test_find_run_without_a_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrackingError, match=r"mlflow\.db does not exist"):
        find_run("x")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TrackingError, match="cannot read runs"):
        find_run("x", "http://127.0.0.1:9")
    with pytest.raises(TrackingError, match="cannot read runs"):  # without its driver, or without a server
        find_run("x", "postgresql://user:word@127.0.0.1:9/runs")


def test_find_journal(tmp_path):
    left_over(tmp_path, "one")
    left_over(tmp_path, "two", run_id="mine")
    journal = BothSides(tmp_path, header("three"))
    journal.acknowledge(run_id="sent")
    journal.close()
    assert find_journal(tmp_path, "spool-one") == tmp_path / "one"
    assert find_journal(tmp_path, "spool-four") is None
    assert find_journal(tmp_path, "mine") == tmp_path / "two"
    assert find_journal(tmp_path, "sent") == tmp_path / "three"
    assert find_journal(tmp_path, "other") is None
    with pytest.raises(TrackingError, match="not the handle"):
        find_journal(tmp_path, "spool-../../etc")


def test_the_users_run_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert user_run_id(None) is None
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    assert user_run_id(None) == ("abc", f"sqlite:///{tmp_path}/mlruns/mlflow.db")

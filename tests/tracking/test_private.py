"""The tracker does without each private name of MLflow."""

import sqlite3

import pytest

from rl8x.tracking import MLflowTracker, private
from rl8x.tracking.location import locate
from rl8x.tracking.store import MLflowStore


def remove_engines(monkeypatch):
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    monkeypatch.setattr(SqlAlchemyStore, "_engine_map", None)


def remove_cache(monkeypatch):
    from mlflow.tracking._tracking_service import utils

    monkeypatch.setattr(utils, "_artifact_repos_cache", None)


def remove_tables(monkeypatch):
    def none(*args, **options):
        raise sqlite3.OperationalError("no such table: metrics")

    monkeypatch.setattr(private.sqlite3, "connect", none)


@pytest.mark.parametrize("remove", [remove_cache, remove_tables])
def test_a_run_arrives_without_it(remove, mlruns, mlflow_client, monkeypatch):
    with monkeypatch.context() as patch:
        remove(patch)
        tracker = MLflowTracker(interval_s=0.01)
        tracker.start(params={"lr": 0.1}, tags={})
        for step in range(20):
            tracker.log_metrics({"a": float(step)}, step)
        if remove is not remove_tables:  # artifacts of a moved folder alone need them
            tracker.log_text("hello", "note.txt")
        tracker.finish("FINISHED")
    run = mlflow_client.get_run(tracker.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.1"})
    points = mlflow_client.get_metric_history(tracker.run_id, "a")
    assert sorted((point.step, point.value) for point in points) == [(step, float(step)) for step in range(20)]


def test_last_steps_are_read_from_histories_without_it(mlruns, monkeypatch):
    tracker = MLflowTracker(interval_s=0.01)
    tracker.start(params={}, tags={})
    for step in (5, 9, 7):
        tracker.log_metrics({"a": 1.0}, step)
    tracker.finish("FINISHED")
    store = MLflowStore(locate())
    assert store.last_steps(tracker.run_id) == {"a": 9}
    monkeypatch.setattr(private, "last_steps", lambda run: None)
    assert store.last_steps(tracker.run_id) == {"a": 9}


def test_what_is_missing_is_none_or_does_nothing(monkeypatch):
    remove_engines(monkeypatch)
    private.forget_engine("sqlite:///x.db", dispose=True)
    private.forget_engine("sqlite:///x.db", dispose=False)
    remove_cache(monkeypatch)
    private.forget_artifacts("run")

    class Run:
        data = object()

    assert private.last_steps(Run) is None

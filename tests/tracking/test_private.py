"""MLflow's inside: the tracker does without its private names; its database is made at once and read as it reads it."""

import contextlib
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy import event
from sqlalchemy.engine import Engine

from rl8x.tracking import MLflowTracker, private, shipper
from rl8x.tracking.location import Location, locate
from rl8x.tracking.private import add_past_points, merge_log
from rl8x.tracking.protocol import StoreDownError
from rl8x.tracking.repeats import Point
from rl8x.tracking.store import MLflowStore, NewRun, ensure_database
from tracking.fakes import query


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
        for step in (*range(18), 19, 18):
            tracker.log_metrics({"a": float(step)}, step)
        if remove is not remove_tables:  # artifacts of a moved folder alone need them
            tracker.log_text("hello", "note.txt")
        tracker.finish("FINISHED")
    run = mlflow_client.get_run(tracker.run_id)
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.1"})
    points = mlflow_client.get_metric_history(tracker.run_id, "a")
    assert sorted((point.step, point.value) for point in points) == [(step, float(step)) for step in range(20)]


def test_what_is_missing_is_none_or_does_nothing(monkeypatch):
    monkeypatch.setattr(SqlAlchemyStore, "_engine_map", None)
    private.reopen_database("sqlite:///x.db")
    remove_cache(monkeypatch)
    private.forget_artifacts("run")


def schema(database):
    """Return the SQL of all tables and indices, as lines in no order: MLflow's own changes with the process."""
    rows = query(database, "SELECT type, name, sql FROM sqlite_master")
    return {(kind, name, *sorted(line.strip(" ,") for line in (sql or "").splitlines())) for kind, name, sql in rows}


def contents(database):
    tables = query(database, "SELECT name FROM sqlite_master WHERE type = 'table'")
    return {name: rows for (name,) in tables if (rows := query(database, f"SELECT * FROM {name}"))}


@contextlib.contextmanager
def not_synced():
    """Let MLflow make a database without waiting for the disk some hundred times."""

    def connect(connection, record):
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", connect)
    yield
    event.remove(Engine, "connect", connect)


ODD = ["'", "b'o\"th", ":lon", "'; DROP TABLE runs; --", "ba\\ck", "new\nline", "?a#b&c=d", "%41%2F", "a@b:c"]
ODD += ["My%20Runs", "a=1&b #5 50% ü", "100%25"]


@pytest.mark.parametrize("name", ODD)
def test_it_can_be_made_in_a_folder_of_any_name(name, tmp_path, monkeypatch):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    for location in (locate(), locate(locate().uri), locate("sqlite:///mlruns/mlflow.db")):
        assert (location.uri, location.database) == (locate().uri, folder / "mlruns/mlflow.db")
    store = MLflowStore(locate())
    for experiment in ("Default", "mine"):
        run_id = store.create_run(NewRun(experiment[0] * 32, experiment, None, "run", 1000))
        store.log_text(run_id, "words", "notes.txt")
    found = [path.relative_to(folder / "mlruns" / "artifacts") for path in folder.rglob("notes.txt")]
    assert sorted(path.parts[0] == "0" for path in found) == [False, True]  # that of the experiment Default
    assert sorted(tmp_path.iterdir()) == [folder]


def test_it_is_what_mlflow_alone_would_have_made_in_wal_mode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ensure_database(locate())
    with not_synced():
        SqlAlchemyStore(f"sqlite:///{tmp_path}/alone.db", "mlruns").engine.dispose()
    made, by_mlflow_alone = tmp_path / "mlruns" / "mlflow.db", tmp_path / "alone.db"
    assert len(schema(made)) > 50
    assert schema(made) == schema(by_mlflow_alone)
    mine, alone = contents(made), contents(by_mlflow_alone)
    assert mine.keys() == alone.keys()
    assert mine["alembic_version"] == alone["alembic_version"]
    assert [row[:2] for row in mine["experiments"]] == [row[:2] for row in alone["experiments"]] == [(0, "Default")]
    assert query(made, "PRAGMA integrity_check") == [("ok",)]
    assert query(made, "PRAGMA journal_mode") == [("wal",)]


def test_its_tables_are_made_once_and_not_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(private, "_migrated", private._migrated.__wrapped__)  # not those that all tests share
    monkeypatch.chdir(tmp_path)
    with not_synced():
        shipper._prepare(locate().database)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(private.tempfile, "TemporaryDirectory", lambda **_: pytest.fail("made twice"))
    ensure_database(locate())
    assert len(schema(tmp_path / "mlruns" / "mlflow.db")) > 50


def test_nothing_but_the_database_stays_in_a_folder_of_the_users_own(tmp_path, monkeypatch):
    mine = [Location(f"sqlite:///{tmp_path}/{name}.db", tmp_path / f"{name}.db") for name in "abc"]
    with ThreadPoolExecutor(6) as threads:
        assert [*threads.map(ensure_database, (*mine, *mine))] == [None] * 6
    assert {path.name for path in tmp_path.iterdir()} == {"a.db", "b.db", "c.db"}
    monkeypatch.setattr(private, "empty_tables", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ensure_database(Location(f"sqlite:///{tmp_path}/d.db", tmp_path / "d.db"))
    assert len(list(tmp_path.iterdir())) == 3


def test_points_are_left_to_mlflow_where_a_number_or_a_column_of_the_table_is_out_of_the_ordinary(mlruns):
    database, points = mlruns / "mlflow.db", [Point("a", 1.0, 1, 1), Point("a", 2.0, 2, 2)]
    too_large = [Point("a", 1.0, 2**63, 1), points[1]]
    query(
        database,
        "INSERT INTO runs (run_uuid, lifecycle_stage) VALUES ('r', 'active')",
        "INSERT INTO latest_metrics (key, value, step, is_nan, run_uuid) VALUES ('a', 0, 0, 0, 'r')",
    )
    assert add_past_points(database, "r", too_large) == too_large
    assert add_past_points(database, "r", points) == points[1:]
    assert query(database, "SELECT value FROM metrics") == [(1.0,)]
    columns = "key, value REAL, timestamp, step, is_nan, run_uuid, workspace TEXT NOT NULL"
    query(database, "DROP TABLE metrics", f"CREATE TABLE metrics ({columns})")
    assert add_past_points(database, "r", points) == points
    assert query(database, "SELECT value FROM metrics") == []


SPEC = NewRun("abc", "e", None, "n", 1234)
PLACE = "artifacts/{}/artifacts"


def connected(root):
    """The store of a folder, and what of a run's artifacts MLflow's client finds there."""
    uri = f"sqlite:///{root}/mlflow.db"
    client = MlflowClient(uri)

    def files(run_id):
        folder = Path(client.get_run(run_id).info.artifact_uri.removeprefix("file://"))
        names = [item.path for item in client.list_artifacts(run_id)]
        return folder, {name: (folder / name).read_text() for name in names}

    return MLflowStore(locate(uri)), files


def run_in(store):
    """Make a run that has an artifact."""
    run_id = store.create_run(SPEC)
    store.log_text(run_id, "1", "old.txt")
    return run_id


@pytest.mark.parametrize("name", ["mlruns", "results"])
def test_of_a_moved_store_lie_beside_it_the_earlier_ones_too(name, mlruns, tmp_path):
    run_id, new = run_in(connected(mlruns)[0]), tmp_path / "new" / name
    new.parent.mkdir()
    mlruns.rename(new)
    store, files = connected(new)
    (tmp_path / "file.txt").write_text("3")
    store.log_text(run_id, "2", "new.txt")
    store.log_artifact(run_id, tmp_path / "file.txt", None)
    assert files(run_id) == (new / PLACE.format(run_id), {"old.txt": "1", "new.txt": "2", "file.txt": "3"})
    later = store.create_run(SPEC._replace(journal_id="later"))
    store.log_text(later, "4", "new.txt")
    assert files(later) == (new / PLACE.format(later), {"new.txt": "4"})
    assert not mlruns.exists()


def test_of_a_copied_store_do_not_go_to_the_original(mlruns, tmp_path):
    store, files = connected(mlruns)
    run_id = run_in(store)
    shutil.copytree(mlruns, tmp_path / "copy/mlruns")
    copy, copied = connected(tmp_path / "copy/mlruns")
    copy.log_text(run_id, "2", "new.txt")
    assert copied(run_id) == (tmp_path / "copy/mlruns" / PLACE.format(run_id), {"old.txt": "1", "new.txt": "2"})
    store.log_text(run_id, "3", "third.txt")
    copy.log_text(run_id, "4", "fourth.txt")
    assert files(run_id) == (mlruns / PLACE.format(run_id), {"old.txt": "1", "third.txt": "3"})


def test_of_a_database_that_left_its_folder_stay_there(mlruns, tmp_path):
    run_id = run_in(connected(mlruns)[0])
    (tmp_path / "alone").mkdir()
    merge_log(mlruns / "mlflow.db")
    (mlruns / "mlflow.db").rename(tmp_path / "alone/mlflow.db")
    store, files = connected(tmp_path / "alone")
    store.log_text(run_id, "2", "new.txt")
    assert files(run_id) == (mlruns / PLACE.format(run_id), {"old.txt": "1", "new.txt": "2"})


def test_a_folder_that_is_gone_is_not_made_anew(mlruns, tmp_path):
    gone = tmp_path / "project/data/artifacts"
    gone.mkdir(parents=True)
    MlflowClient(f"sqlite:///{mlruns}/mlflow.db").create_experiment("e", artifact_location=gone.as_uri())
    run_id = run_in(connected(mlruns)[0])
    (tmp_path / "project").rename(tmp_path / "moved")
    store, _ = connected(mlruns)
    for call in (store.log_text, store.log_artifact):
        with pytest.raises(StoreDownError, match=f"folder of the run's artifacts, {gone}/{run_id}/.*, is not there"):
            call(run_id, tmp_path / "moved", "2")
    store.check_run(run_id)
    assert not (tmp_path / "project").exists()

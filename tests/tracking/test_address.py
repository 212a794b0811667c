"""Where rows go after a folder of runs was moved, copied or taken from somebody else."""

import os
import shutil
from pathlib import Path

import pytest
from tests.conftest import InProcess

from rl8x.tracking import MLflowTracker, TrackingError, sync
from rl8x.tracking.artifacts import keep, kept_path
from rl8x.tracking.location import locate
from rl8x.tracking.store import ensure_database
from tracking.fakes import FakeStore, left_over, row


def no_process(database):
    raise OSError("no answer")


def kept_back(monkeypatch, num_rows=3, **options):
    """Leave a run in a journal, as where MLflow was away; returns the journal."""
    monkeypatch.setattr("rl8x.tracking.shipping._ShipperProcess", no_process)
    tracker = MLflowTracker(interval_s=0.01, outage_timeout_s=0.0, **options)
    tracker.start(params={"lr": 1}, tags={})
    for step in range(num_rows):
        tracker.log_metrics({"a": float(step)}, step)
    tracker.log_text("hello", "note.txt")
    tracker.finish("FINISHED")
    monkeypatch.setattr("rl8x.tracking.shipping._ShipperProcess", InProcess)
    return tracker.journal_folder


def begun():
    """A tracker whose first row has arrived."""
    tracker = MLflowTracker(interval_s=0.01, outage_timeout_s=0.0)
    tracker.start(params={}, tags={})
    tracker.log_metrics({"a": 0.0}, 0)
    assert tracker.flush(30)
    return tracker


def runs_in(database):
    """What MLflow's own client finds: the status and the rows of each run."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    history = {run.info.run_id: client.get_metric_history(run.info.run_id, "a") for run in runs}
    return [(run.info.status, sorted((p.step, p.value) for p in history[run.info.run_id])) for run in runs]


ALL = ("FINISHED", [(0, 0.0), (1, 1.0), (2, 2.0)])


def test_a_copy_and_its_original_each_send_to_their_own_database(mlruns, tmp_path, monkeypatch):
    kept_back(monkeypatch)
    shutil.copytree(mlruns, tmp_path / "copy/mlruns")
    monkeypatch.chdir(tmp_path / "copy")
    assert sync().num_sent == 1
    assert runs_in(tmp_path / "copy/mlruns/mlflow.db") == [ALL]
    assert runs_in(mlruns / "mlflow.db") == []
    monkeypatch.chdir(tmp_path)
    assert sync().num_sent == 1
    assert runs_in(mlruns / "mlflow.db") == [ALL]
    for root in (mlruns, tmp_path / "copy/mlruns"):
        assert len(list(root.glob("artifacts/*/artifacts/note.txt"))) == 1


def test_sync_makes_no_database_and_sends_all_where_another_has_taken_its_place(mlruns, tmp_path, monkeypatch):
    kept_back(monkeypatch)
    (mlruns / "mlflow.db").unlink()
    for to in (None, f"sqlite:///{tmp_path}/none/other.db"):
        told = str(sync(to=to))
        assert all(text in told for text in ("there is no database", "--to URI", "`rl8x ui`", "0 sent, 1 failed"))
    assert not (mlruns / "mlflow.db").exists()
    assert not (tmp_path / "none").exists()
    ensure_database(locate())
    assert sync().num_sent == 1
    assert runs_in(mlruns / "mlflow.db") == [ALL]


def test_runs_whose_folder_is_deleted_lose_no_row_also_of_what_the_database_had(mlruns, tmp_path, caplog):
    tracker = begun()
    with tracker._journal._guard:  # or the thread may look in between, and follow the folder
        mlruns.rename(tmp_path / "gone")  # first: a folder cannot be removed while something is made in it
        shutil.rmtree(tmp_path / "gone")
    for step in (1, 2):
        tracker.log_metrics({"a": float(step)}, step)
        tracker._journal.drain()
    assert not mlruns.exists()
    tracker.finish("FINISHED")
    assert caplog.text.count("was deleted; what has not arrived at the end is written there once more") == 1
    assert tracker.whereabouts().unsent.num_rows == 2
    assert "was deleted, moved or replaced" in tracker.whereabouts().lines()[0]
    assert (mlruns / ".gitignore").exists()
    assert not (mlruns / "mlflow.db").exists()
    later = MLflowTracker(interval_s=0.01)
    later.start(params={}, tags={})
    later.log_metrics({"a": 5.0}, 5)
    later.finish("FINISHED")
    assert runs_in(mlruns / "mlflow.db") == [("FINISHED", [(5, 5.0)])]
    assert sync().num_sent == 1
    assert sorted(runs_in(mlruns / "mlflow.db")) == [ALL, ("FINISHED", [(5, 5.0)])]


def test_the_store_of_a_journal_from_elsewhere_is_used_only_where_the_user_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root, asked, reached = tmp_path / "spool", [], []

    def connect(location):
        reached.append(location.uri)
        return FakeStore()

    left_over(root, "one", uri="http://theirs/")
    told = str(sync(root, connect=connect))
    assert all(text in told for text in ("http://theirs/", "--to URI", "--yes", "0 sent, 1 failed"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mine")
    assert sync(root, connect=connect).num_failed == 1
    sync(root, connect=connect, allow=lambda location: asked.append(location.uri))
    assert (asked, reached) == (["http://theirs/"], [])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://theirs")
    assert sync(root, connect=connect).num_sent == 1
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    left_over(root, "one", uri="http://theirs/")
    assert sync(root, connect=connect, allow=lambda location: True).num_sent == 1
    left_over(root, "one", uri="http://me:***@server")
    assert "the password of http://me:***@server is needed" in str(sync(root, connect=connect))
    assert sync(root, to="http://mine", connect=connect).num_sent == 1
    assert reached == ["http://theirs/", "http://theirs/", "http://mine"]


@pytest.mark.parametrize("database", ["../../../theirs.db", "/etc/passwd", "../../..", "../../a/b.db", "mlflow.db", 7])
def test_a_journal_cannot_name_a_database_elsewhere_as_its_own(database, tmp_path):
    left_over(tmp_path / "root/spool", "one", uri="http://theirs", database=database)
    report = sync(tmp_path / "root/spool", connect=lambda location: pytest.fail(f"reached {location}"))
    assert "http://theirs" in str(report)
    assert report.num_failed == 1


def test_artifacts_of_somebody_elses_database_stay_in_its_folder(mlruns, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    uri = f"sqlite:///{mlruns}/mlflow.db"
    outside = tmp_path / "outside"
    outside.mkdir()
    MlflowClient(uri).create_experiment("trap", artifact_location=outside.as_uri())
    kept_back(monkeypatch, experiment_name="trap")
    told = str(sync())
    assert [path for path in outside.rglob("*") if path.is_file()] == []
    told += "".join(path.read_text() for path in mlruns.glob("spool/*/rejected.jsonl"))
    assert "you have not named this store" in told
    assert sync(to=uri).num_sent == 1
    assert [path.name for path in outside.rglob("*") if path.is_file()] == ["note.txt"]


def snapshot(folder: Path):
    return {
        str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*")) if path.exists()
    }


def link(path, target):
    """Put a link into the place of a file or folder, which is moved to where the link leads if nothing is there."""
    if path.exists() and not target.exists():
        path.rename(target)
    elif path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def link_in_a_folder(path, target):
    path.unlink()
    (path / "deep").mkdir(parents=True)
    (path / "deep/link").symlink_to(target)


def pipe(path, target):
    path.unlink()
    os.mkfifo(path)


# What somebody has put at a path from the copy of an artifact, and where it leads from a folder with secrets
SET_ASIDE = {
    "a copy": (link, ".", "key"),
    "a folder for a copy": (link, ".", "folder"),
    "the folder of a copy": (link, "..", "folder"),
    "in a copied folder": (link_in_a_folder, ".", "key"),
    "a pipe": (pipe, ".", ""),
}
REFUSED = {
    **{name: (link, f"../../../{name}", "key") for name in ("ack.json.new", "rejected.jsonl")},
    **{name: (link, f"../../../{name}", "moved") for name in ("journal.jsonl", "ack.json", "lock", "files")},
    "all": (link, "../../..", "moved"),
    "a pipe of lines": (pipe, "../../../journal.jsonl", ""),
}


@pytest.mark.parametrize("what", [*SET_ASIDE, *REFUSED])
def test_nothing_outside_of_a_journal_is_read_changed_or_deleted(what, tmp_path):
    secret = tmp_path / "secret"
    (secret / "folder").mkdir(parents=True)
    (secret / "key").write_text("secret")
    (secret / "folder/a.txt").write_text("secret")
    (tmp_path / "a.txt").write_text("mine")
    folder = left_over(tmp_path / "spool", "one")
    artifact = {"op": "artifact", "file": keep(folder, tmp_path / "a.txt"), "to": None}
    left_over(tmp_path / "spool", "one", 0, artifact, row(1))
    [copy] = folder.glob("files/*/a.txt")
    make, path, target = {**SET_ASIDE, **REFUSED}[what]
    make(Path(os.path.normpath(copy / path)), secret / target)
    before, store = snapshot(secret), FakeStore()
    report = sync(tmp_path / "spool", to="http://mine", connect=lambda location: store)
    assert snapshot(secret) == before
    assert [run["files"] for run in store.runs.values() if run["files"]] == []
    if what in SET_ASIDE:
        assert len(store.run["points"]) == 1
        assert "no plain file" in (folder / "rejected.jsonl").read_text()
    else:
        assert (report.num_failed, store.runs) == (1, {})
        assert "link, which is not followed" in str(report) or "no plain file" in str(report)


@pytest.mark.parametrize(
    "name", ["../../a.txt", "/etc/passwd", "files/../../a.txt", "journal.jsonl", "files/1/../../lock"]
)
def test_a_kept_file_has_no_name_outside_of_its_folder(name, tmp_path):
    with pytest.raises(TrackingError, match=r"artifact's name|not a file of this journal"):
        kept_path(tmp_path, name)

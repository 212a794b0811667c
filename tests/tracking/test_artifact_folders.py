"""Where artifacts go after the database was moved or copied, as MLflow's own client finds them."""

import shutil
from pathlib import Path

import pytest

from rl8x.tracking.location import locate
from rl8x.tracking.private import merge_log
from rl8x.tracking.protocol import StoreDownError
from rl8x.tracking.store import MLflowStore, NewRun

SPEC = NewRun("abc", "e", None, "n", 1234)


def connected(root):
    from mlflow import MlflowClient

    uri = f"sqlite:///{root}/mlflow.db"
    return MLflowStore(locate(uri)), MlflowClient(uri)


def files(client, run_id):
    """The artifacts in the folder that MLflow has for a run."""
    folder = Path(client.get_run(run_id).info.artifact_uri.removeprefix("file://"))
    return folder, {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["mlruns", "results"])
def test_of_a_moved_store_lie_beside_it_the_earlier_ones_too(name, mlruns, tmp_path):
    store, _ = connected(mlruns)
    run_id = store.create_run(SPEC)
    store.log_text(run_id, "1", "old.txt")
    (tmp_path / "new").mkdir()
    mlruns.rename(tmp_path / "new" / name)
    store, client = connected(tmp_path / "new" / name)
    store.log_text(run_id, "2", "new.txt")
    folder = tmp_path / "new" / name / "artifacts" / run_id / "artifacts"
    assert files(client, run_id) == (folder, {"old.txt": "1", "new.txt": "2"})
    assert {item.path for item in client.list_artifacts(run_id)} == {"old.txt", "new.txt"}
    (tmp_path / "file.txt").write_text("3")
    store.log_artifact(run_id, tmp_path / "file.txt", None)
    assert (folder / "file.txt").read_text() == "3"
    later = store.create_run(SPEC._replace(spool_id="later"))
    store.log_text(later, "4", "new.txt")
    assert (tmp_path / "new" / name / "artifacts" / later / "artifacts/new.txt").read_text() == "4"
    assert not mlruns.exists()


def test_of_a_copied_store_do_not_go_to_the_original(mlruns, tmp_path):
    store, client = connected(mlruns)
    run_id = store.create_run(SPEC)
    store.log_text(run_id, "1", "old.txt")
    shutil.copytree(mlruns, tmp_path / "copy/mlruns")
    copy, copied = connected(tmp_path / "copy/mlruns")
    copy.log_text(run_id, "2", "new.txt")
    place = Path("artifacts", run_id, "artifacts")
    assert files(copied, run_id) == (tmp_path / "copy/mlruns" / place, {"old.txt": "1", "new.txt": "2"})
    store.log_text(run_id, "3", "third.txt")
    copy.log_text(run_id, "4", "fourth.txt")
    assert files(client, run_id) == (mlruns / place, {"old.txt": "1", "third.txt": "3"})


def test_of_a_database_that_left_its_folder_stay_there(mlruns, tmp_path):
    store, _ = connected(mlruns)
    run_id = store.create_run(SPEC)
    store.log_text(run_id, "1", "old.txt")
    (tmp_path / "alone").mkdir()
    merge_log(mlruns / "mlflow.db")
    (mlruns / "mlflow.db").rename(tmp_path / "alone/mlflow.db")
    store, client = connected(tmp_path / "alone")
    store.log_text(run_id, "2", "new.txt")
    assert files(client, run_id) == (mlruns / "artifacts" / run_id / "artifacts", {"old.txt": "1", "new.txt": "2"})


def test_a_folder_that_is_gone_is_not_made_anew(mlruns, tmp_path):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{mlruns}/mlflow.db")
    gone = tmp_path / "project/data/artifacts"
    gone.mkdir(parents=True)
    client.create_experiment("e", artifact_location=gone.as_uri())
    store, _ = connected(mlruns)
    run_id = store.create_run(SPEC)
    store.log_text(run_id, "1", "old.txt")
    (tmp_path / "project").rename(tmp_path / "moved")
    store, _ = connected(mlruns)
    (tmp_path / "file.txt").write_text("3")
    with pytest.raises(StoreDownError, match=f"the folder of the run's artifacts, {gone}/{run_id}/.*, is not there"):
        store.log_text(run_id, "2", "new.txt")
    with pytest.raises(StoreDownError, match="is not there"):
        store.log_artifact(run_id, tmp_path / "file.txt", None)
    store.check_run(run_id)
    assert not (tmp_path / "project").exists()

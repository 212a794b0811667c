"""Which store a resumed run goes on in, after its folder was moved or copied, or where only its checkpoint names it."""

import os
import shutil

import pytest
from tests.trainers.helpers import make, run

from rl8x import MLflowTracker, Trainer
from rl8x.checkpoint import CheckpointError, read
from rl8x.cli.main import main

SMALL = ["--num-envs", "4", "--horizon", "8", "--device", "cpu", "--seed", "1", "--progress", "none"]
SMALL += ["algorithm_config.model_config.hidden_sizes=[8]"]


def steps_in(database):
    """The steps that MLflow's own client finds, of each run."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    histories = [client.get_metric_history(run.info.run_id, "losses/total") for run in runs]
    return [sorted(point.step // 32 for point in history) for history in histories]


def trained(tracker, **options):
    trainer = make(trainer={"tracker": tracker, **options})
    run(trainer, max_steps=2)
    return trainer.checkpoints.directory


@pytest.mark.parametrize("name", ["mlruns", "results"])
def test_a_moved_run_goes_on_in_the_database_that_moved_with_it(name, mlruns, tmp_path, monkeypatch):
    folder = trained(MLflowTracker(interval_s=0.05))
    assert read(folder / "000002-step-2").metadata["run"]["database"] == "../../mlflow.db"
    (tmp_path / "new").mkdir()
    mlruns.rename(tmp_path / "new" / name)
    monkeypatch.chdir(tmp_path / "new")
    run(Trainer.resume(f"{name}/checkpoints/{folder.name}"), max_steps=4)
    assert steps_in(tmp_path / "new" / name / "mlflow.db") == [[1, 2, 3, 4]]
    assert not mlruns.exists()


@pytest.mark.parametrize("original_stays", [True, False])
def test_checkpoints_elsewhere_in_a_copied_project_find_the_run_in_the_copy(
    original_stays, mlruns, tmp_path, monkeypatch
):
    (tmp_path / "project").mkdir()
    mlruns.rename(tmp_path / "project/mlruns")
    monkeypatch.chdir(tmp_path / "project")
    trained(MLflowTracker(interval_s=0.05), checkpoints="saved")
    shutil.copytree(tmp_path / "project", tmp_path / "copy")
    while not original_stays and (tmp_path / "project").exists():  # the shipper may still look at its journal
        shutil.rmtree(tmp_path / "project", ignore_errors=True)
    monkeypatch.chdir(tmp_path / "copy")
    run(Trainer.resume("saved"), max_steps=3)
    assert steps_in(tmp_path / "copy/mlruns/mlflow.db") == [[1, 2, 3]]
    assert (tmp_path / "project").exists() == original_stays


def test_a_store_that_only_the_checkpoint_names_needs_a_word(mlruns, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    mlruns.rename(other)
    uri = f"sqlite:///{other}/mlflow.db"
    folder = trained(MLflowTracker(interval_s=0.05, tracking_uri=uri))
    with pytest.raises(CheckpointError, match=f"it names the store {uri}, which you have not.*`trust=True`"):
        Trainer.resume(folder)
    assert main(["resume", str(folder), "--max-steps", "3", "--progress", "none"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "`--trust`" in error
    assert steps_in(other / "mlflow.db") == [[1, 2]]
    run(Trainer.resume(folder, trust=True), max_steps=3)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert main(["resume", str(folder), "--max-steps", "4", "--progress", "none"]) == 0
    assert steps_in(other / "mlflow.db") == [[1, 2, 3, 4]]
    assert not mlruns.joinpath("mlflow.db").exists()


def test_a_run_file_that_names_the_store_is_word_enough(mlruns, tmp_path, capsys):
    other = tmp_path / "other"
    mlruns.rename(other)
    uri = "sqlite:///other/mlflow.db"
    for steps in ("2", "4"):
        words = ["--tracking-uri", uri, "checkpoints.directory=job", "--resume", "auto", "--max-steps", steps]
        assert main(["train", "CartPole", *SMALL, *words]) == 0
    assert steps_in(other / "mlflow.db") == [[1, 2, 3, 4]]
    words = ["--tracking-uri", "sqlite:///third.db", "--resume", "job", "--max-steps", "5"]
    capsys.readouterr()
    assert main(["train", "CartPole", *SMALL, *words]) == 2
    assert "which you have not" in capsys.readouterr().err
    assert not (tmp_path / "third.db").exists()


def test_a_run_in_another_store_is_found_by_its_name_there(mlruns, tmp_path, capsys):
    other, third = "sqlite:///other.db", "sqlite:///third.db"
    words = ["--tracking-uri", other, "--run-name", "mine", "checkpoints.directory=job", "--max-steps", "1"]
    mlruns.rename(tmp_path / "first")
    shutil.copy(tmp_path / "first" / "mlflow.db", tmp_path / "other.db")
    assert main(["train", "CartPole", *SMALL, *words]) == 0
    for words, told in (
        (["mine"], "mlruns/mlflow.db does not exist"),
        (["mine", "--lr", "1e-4"], "To look in another store set MLFLOW_TRACKING_URI; the path of its checkpoints"),
        (["mien", "--tracking-uri", other], "other.db; did you mean mine"),
        (["mine", "--tracking-uri", third], "third.db does not exist"),
        (["mine", "--tracking-uri", "sqlit:///x"], "unknown scheme 'sqlit'"),
    ):
        capsys.readouterr()
        assert main(["resume", *words]) == 2, words
        error = capsys.readouterr().err
        assert told in error
        assert error.count("\n") == 1
    words = ["mine", "--tracking-uri", other, "--lr", "1e-4", "--max-steps", "3", "--progress", "none"]
    assert main(["resume", *words]) == 0
    assert steps_in(tmp_path / "other.db") == [[1, 2, 3]]
    assert "MLFLOW_TRACKING_URI" not in os.environ
    assert not (tmp_path / "third.db").exists()


X, Y = "sqlite:///x.db", "sqlite:///y.db"
DOWN = "http://127.0.0.1:9"


@pytest.mark.long
@pytest.mark.parametrize(
    ("in_shell", "typed", "source", "expected"),
    [
        (X, None, "mine", "resume mine"),
        (X, X, "mine", "resume mine"),
        (X, None, "FOLDER", "resume mine"),
        (None, None, "mine", "resume mine"),
        (None, None, "FOLDER", "resume mine"),
        (None, X, "mine", "resume --trust FOLDER"),
        (None, "sqlite:///mlruns/x.db", "mine", "resume FOLDER"),
        (Y, X, "mine", "resume --tracking-uri sqlite:///HERE/x.db FOLDER"),
        (Y, "sqlite:///mlruns/x.db", "mine", "resume --tracking-uri sqlite:///HERE/mlruns/x.db FOLDER"),
        (DOWN, None, "FOLDER", "resume FOLDER"),
        (Y, DOWN, "FOLDER", f"resume --tracking-uri {DOWN} FOLDER"),
    ],
)
@pytest.mark.usefixtures("mlflow_client")  # MLflow is imported, as it is where a run is looked for by its name
def test_printed_commands_are_what_is_needed(in_shell, typed, source, expected, mlruns, tmp_path, monkeypatch, capsys):
    for name in ("x.db", "y.db", "mlruns/x.db"):
        shutil.copy(mlruns / "mlflow.db", name)
    if in_shell is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", in_shell)
    where = [] if typed is None else ["--tracking-uri", typed]
    assert main(["train", "CartPole", *SMALL, *where, "--run-name", "mine", "--max-steps", "1"]) == 0
    (folder,) = (mlruns / "checkpoints").iterdir()
    expected = expected.replace("FOLDER", f"mlruns/checkpoints/{folder.name}").replace("HERE", str(tmp_path))

    def printed():
        lines = [line.partition(": rl8x ")[2] for line in capsys.readouterr().out.splitlines()]
        return [line.split(" --max-steps")[0] for line in lines if line.startswith(("resume", "sync"))]

    printed()
    source = source.replace("FOLDER", str(folder))
    words = ["--max-steps", "2", "--progress", "none"]
    assert main(["resume", source, *words, *where]) == 0
    *sends, goes_on = printed()
    assert goes_on == expected
    assert main([*goes_on.split(), "--max-steps", "3", "--progress", "none"]) == 0
    assert printed()[-1] == expected
    if DOWN in (in_shell, typed):
        waits = f"sync mlruns/spool/{folder.name} --to {DOWN}"
        assert sends == ["sync" if in_shell == DOWN else waits]
    else:
        database = (typed or in_shell or "sqlite:///mlruns/mlflow.db").removeprefix("sqlite:///")
        assert sends == []
        assert steps_in(tmp_path / database) == [[1, 2, 3]]
        assert steps_in(tmp_path / "y.db") == []


def test_a_call_in_python_names_a_store_that_the_shell_does_not(mlruns, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", Y)
    shutil.copy(mlruns / "mlflow.db", "x.db")
    trainer = make(trainer={"tracker": MLflowTracker(tracking_uri=X, interval_s=0.05), "callbacks": [lambda *_: None]})
    run(trainer, max_steps=1)
    call = trainer.ending[-1].split("training: ")[1].split(", N above")[0]
    assert f"callbacks=[...], tracker=MLflowTracker(tracking_uri='sqlite:///{tmp_path}/x.db')).run(max_steps=N" in call
    eval(
        call.replace("N)", "2, progress='none')").replace("[...]", "[]"),
        {"Trainer": Trainer, "MLflowTracker": MLflowTracker},
    )
    assert steps_in(tmp_path / "x.db") == [[1, 2]]

"""Two processes at one run, and what a power cut leaves of one: all through files, as processes meet."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
from mlflow import MlflowClient
from tests.forks import ForkedPython
from tests.trainers.helpers import at_step, make, run, saved_steps

from rl8x import Trainer, keys
from rl8x.checkpoint import CheckpointError, Checkpoints, files, find, listed, read
from rl8x.cli.main import main
from rl8x.tracking import MLflowTracker, NullTracker, sync
from rl8x.tracking.journal import read_ack

TRAINS = """
import json, os, shutil, signal, sys, time
from pathlib import Path
from rl8x import PPOConfig, Trainer, keys
from rl8x.envs import CartPole
from rl8x.tracking import MLflowTracker, shipping
from rl8x.tracking.journal import read_ack
from rl8x.trainers import Checkpoints

process = shipping._ShipperProcess
shipping._ShipperProcess = getattr(process, "process", process)  # as for users, which tests are not
fsync = os.fsync

def noted(fd):
    fsync(fd)
    if os.readlink(f"/proc/self/fd/{fd}").endswith("journal.jsonl"):
        Path("synced").write_text(str(os.fstat(fd).st_size))

os.fsync = noted

def is_copied(trainer, stats):
    if stats[keys.STEPS] == 3:
        trainer.checkpoints.wait()
        shutil.make_archive("backup", "zip", "mlruns")
        shutil.copytree("mlruns", "backup")
        print("copied", flush=True)
        sys.stdin.readline()

def dies_when_all_is_in_the_store(trainer, stats):
    if stats[keys.STEPS] == 4:
        while trainer.tracker.run_id is None:  # a checkpoint has this, not the name of the journal, but at the start
            time.sleep(0.05)
        collect = trainer.algorithm.collect  # the next one, once this step is on the disk
        trainer.algorithm.collect = lambda **options: (trainer.checkpoints.wait(), collect(**options))[1]
    if stats[keys.STEPS] == 5:
        folder = trainer.tracker.journal_folder
        while read_ack(folder).offset < os.path.getsize(folder / "journal.jsonl"):
            time.sleep(0.05)
        shipping._shared.popen.kill()
        os.kill(os.getpid(), signal.SIGKILL)

config = PPOConfig(num_envs=4, horizon=8, seed=5, num_sgd_iters=1, model_config={"hidden_sizes": [8]})
patient = MLflowTracker(finish_timeout_s=200.0, outage_timeout_s=200.0)  # its process comes last on a busy machine
options = {"callbacks": [globals()[sys.argv[1]]], "checkpoints": Checkpoints(every_steps=2), "tracker": patient}
Trainer(config.build(CartPole), **options).run(max_steps=8, progress="none")
"""


def trains(what):
    """Return a Python that trains, and its process for MLflow: forks of this one, which has imported all."""
    with mock.patch.object(subprocess, "Popen", ForkedPython):
        return subprocess.Popen(
            [sys.executable, "-c", TRAINS, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )


@pytest.fixture
def client(request):
    """Return what makes MLflow's client: not before processes are forked, whose connections would be its own."""
    return lambda: request.getfixturevalue("mlflow_client")


def the_run(client):
    client = client()
    (found,) = client.search_runs([client.get_experiment_by_name("rl8x").experiment_id])
    return found


def times_logged(client):
    """How often each step is there, by the metric that each row has."""
    points = client().get_metric_history(the_run(client).info.run_id, "losses/total")
    return Counter(point.step for point in points)


EIGHT_STEPS = {32 * step: 1 for step in range(1, 9)}


@pytest.mark.filterwarnings("ignore:the run had callbacks")
def test_a_run_that_is_copied_while_it_runs_stays_its_own_process_s(mlruns, client, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rl8x.checkpoint.manager._BUSY_WAIT_S", 0.1)
    process = trains("is_copied")
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout.readline() == "copied\n"
        (tmp_path / "elsewhere").mkdir()
        (folder,) = (mlruns / "checkpoints").iterdir()
        newest = listed(folder)[-1]
        for place in (tmp_path, tmp_path / "elsewhere"):
            monkeypatch.chdir(place)
            if place != tmp_path:  # a clean-up takes the files of all locks
                assert len([path.unlink() for path in tmp_path.rglob("*lock*")]) >= 4
            assert sync(mlruns / "spool").num_busy == sync(tmp_path / "backup/spool").num_busy == 1
            with pytest.raises(CheckpointError, match=f"in use by process {process.pid}; wait for it or end it"):
                Trainer.resume(folder).run(progress="none")
            capsys.readouterr()
            for source in (str(folder), str(tmp_path / "backup/checkpoints" / folder.name)):
                assert main(["resume", source, "--progress", "none"]) == 2
                error = capsys.readouterr().err
                assert (error.count("\n"), f"in use by process {process.pid}" in error) == (1, True), error
        assert list((tmp_path / "elsewhere").iterdir()) == []
        assert listed(folder)[-1] == newest
        process.communicate("go on\n", timeout=240)
    assert process.returncode == 0
    assert the_run(client).info.status == "FINISHED"
    assert "rl8x.resumed_from" not in the_run(client).data.tags
    assert times_logged(client) == EIGHT_STEPS
    monkeypatch.chdir(tmp_path)
    assert sync("backup/spool").num_sent == 1
    assert the_run(client).info.status == "FINISHED"
    assert times_logged(client) == EIGHT_STEPS


ON_LINUX = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux tells where a folder was moved to")


def trained(checkpoints, act, tracker=None):
    """Train six steps, at the third of which somebody acts, while the checkpoint of the second may be being written."""
    options = {"checkpoints": checkpoints, "callbacks": [at_step(3, act)], "tracker": tracker or NullTracker()}
    trainer = make(trainer=options, execution="eager")
    run(trainer, max_steps=6)
    return trainer


@ON_LINUX
@pytest.mark.parametrize(
    ("moved", "to", "another"),
    [
        ("runs", "archive", True),
        ("runs/a", "runs/b", True),
        ("runs/a", "runs/b", False),
        ("runs", "far/away/runs", False),
    ],
)
def test_checkpoints_that_are_moved_are_followed_and_nothing_is_made_where_they_were(
    moved, to, another, tmp_path, caplog, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    def moves(trainer):
        Path(to).parent.mkdir(parents=True, exist_ok=True)
        os.rename(moved, to)
        if another:
            Path("runs/a").mkdir(parents=True)

    trainer = trained(Checkpoints("runs/a", every_steps=1, keep=9, best="returns/mean"), moves)
    now = tmp_path / ("runs/a".replace(moved, to))
    assert trainer.checkpoints.directory == now
    assert saved_steps(now) == [0, 1, 2, 3, 4, 5, 6]
    assert trainer.checkpoints.best_path.parent == now
    assert trainer.ending[-1].endswith(
        f"Trainer.resume('{now.relative_to(tmp_path)}', callbacks=[...]).run(max_steps=N), N above 6"
    )
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == f"rl8x: the checkpoints in {tmp_path}/runs/a were moved to {now}, where the next ones go"
    assert (list(Path("runs/a").iterdir()) if another else Path("runs/a").exists()) in ([], False)
    assert Trainer.resume(now, callbacks=[]).run(max_steps=7, progress="none")[keys.STEPS] == 7


@ON_LINUX
def test_a_folder_that_is_moved_within_a_write_gets_the_whole_checkpoint(tmp_path, monkeypatch, caplog):
    write, folder = files._write, tmp_path / "a"

    def moving(path, content):
        if folder.exists() and len(listed(folder)) == 3:
            folder.rename(tmp_path / "b")
        write(path, content)

    monkeypatch.setattr(files, "_write", moving)
    trained(Checkpoints(folder, every_steps=1, keep=9), lambda trainer: None)
    assert saved_steps(tmp_path / "b") == [0, 1, 2, 3, 4, 5, 6]
    assert [read(path).path for path in listed(tmp_path / "b")] == listed(tmp_path / "b")
    assert not folder.exists()
    assert len(caplog.records) == 1


def test_a_folder_that_is_deleted_is_made_anew(tmp_path, caplog):
    folder = tmp_path / "a"

    def deletes(trainer):
        trainer.checkpoints.wait()
        shutil.rmtree(folder)

    trainer = trained(Checkpoints(folder, every_steps=1, keep=9), deletes)
    assert saved_steps(folder) == [3, 4, 5, 6]
    assert trainer.checkpoints.directory == folder
    warned = [record.getMessage() for record in caplog.records]
    assert warned == [f"rl8x: {folder} was deleted with its checkpoints, and is made anew"]
    assert find(folder).metadata["counters"][keys.STEPS] == 6


@ON_LINUX
@pytest.mark.parametrize("moved", ["mlruns", "mlruns/checkpoints"])
def test_a_moved_run_goes_on_where_it_is_by_its_last_lines(moved, mlruns, tmp_path, client, monkeypatch):
    def moves(trainer):
        mlflow_tracker.flush()
        os.rename(moved, "moved")

    mlflow_tracker = MLflowTracker(interval_s=0.05, outage_timeout_s=0.2)
    trainer = trained(Checkpoints(every_steps=1), moves, mlflow_tracker)
    now = tmp_path / "moved" / ("checkpoints" if moved == "mlruns" else "") / trainer.checkpoints.directory.name
    assert trainer.checkpoints.directory == now
    assert mlruns.exists() == (moved != "mlruns")
    assert not (mlruns / "checkpoints").exists()
    assert any("rl8x sync" in line for line in trainer.ending) == (moved == "mlruns")
    if moved == "mlruns":
        assert main(["sync", f"moved/spool/{now.name}"]) == 0
    database = tmp_path / ("moved" if moved == "mlruns" else "mlruns") / "mlflow.db"
    mlflow = MlflowClient(f"sqlite:///{database}")
    (found,) = mlflow.search_runs([mlflow.get_experiment_by_name("rl8x").experiment_id])
    assert found.data.tags["rl8x.checkpoints"] == str(now)
    assert len(mlflow.get_metric_history(found.info.run_id, "losses/total")) == 6
    Trainer.resume(now, callbacks=[]).run(max_steps=7, progress="none")
    assert len(mlflow.get_metric_history(found.info.run_id, "losses/total")) == 7


@pytest.mark.parametrize("ack", ["ahead of the journal", "lost"])
def test_a_power_cut_loses_and_doubles_no_row_wherever_the_run_is_resumed_from(
    ack, mlruns, client, tmp_path, monkeypatch
):
    assert trains("dies_when_all_is_in_the_store").wait(240) == -signal.SIGKILL
    (journal,) = (mlruns / "spool").iterdir()
    folder = mlruns / "checkpoints" / journal.name
    assert (folder / read(listed(folder)[-1]).metadata["run"]["journal"]).samefile(journal)
    os.truncate(journal / "journal.jsonl", int((tmp_path / "synced").read_text()))
    assert read_ack(journal).offset > os.path.getsize(journal / "journal.jsonl")
    monkeypatch.setattr("rl8x.tracking.appending.boot_id", lambda: "after the cut")
    if ack == "lost":
        (journal / "ack.json").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer = Trainer.resume(folder)
    trainer.run(progress="none")
    assert trainer.tracker.journal_folder == journal
    for place in (tmp_path / "elsewhere", tmp_path):
        monkeypatch.chdir(place)
        while (report := sync()).num_busy:  # what its shipper concludes it has locked for a moment
            time.sleep(0.05)
        assert report.journals == []
    assert times_logged(client) == EIGHT_STEPS
    assert the_run(client).info.status == "FINISHED"

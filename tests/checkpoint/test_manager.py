"""Two processes at one run, and what a power cut leaves of one: all through files, as processes meet."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from unittest import mock

import pytest
from benchmarks.fault_process import ForkedPython

from rl8x.checkpoint import CheckpointError, listed, read
from rl8x.cli.main import main
from rl8x.tracking import sync
from rl8x.trainers import Trainer

TRAINS = """
import json, os, shutil, signal, sys, time
from pathlib import Path
from rl8x import PPOConfig, Trainer, keys
from rl8x.envs import CartPole
from rl8x.tracking import MLflowTracker, mlflow_tracker, store_process
from rl8x.trainers import Checkpoints

mlflow_tracker.StoreProcess = store_process.StoreProcess  # as for users, which tests are not
fsync = os.fsync

def noted(fd):
    fsync(fd)
    if os.readlink(f"/proc/self/fd/{fd}").endswith("ops.jsonl"):
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
        collect = trainer.algorithm.collect  # the next one, once this step is on the disk
        trainer.algorithm.collect = lambda **options: (trainer.checkpoints.wait(), collect(**options))[1]
    if stats[keys.STEPS] == 5:
        folder = trainer.tracker.spool_folder
        while not (folder / "ack.json").exists():
            time.sleep(0.05)
        while json.loads((folder / "ack.json").read_text())["offset"] < os.path.getsize(folder / "ops.jsonl"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

def dies_at_once(trainer, stats):
    if stats[keys.STEPS] == 5:
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


def test_a_run_that_is_resumed_from_another_folder_has_no_row_twice(mlruns, client, tmp_path, monkeypatch):
    assert trains("dies_at_once").wait(60) == -signal.SIGKILL
    (folder,) = (mlruns / "checkpoints").iterdir()
    spool = mlruns / "spool" / folder.name
    assert (folder / read(listed(folder)[-1]).metadata["run"]["spool"]).samefile(spool)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer = Trainer.resume(folder)
    trainer.run(progress="none")
    assert trainer.tracker.spool_folder == spool
    for place in (tmp_path / "elsewhere", tmp_path):
        monkeypatch.chdir(place)
        assert sync().spools == []
    assert the_run(client).info.status == "FINISHED"
    assert times_logged(client) == EIGHT_STEPS


@pytest.mark.parametrize("ack", ["ahead of the spool", "lost"])
def test_a_power_cut_loses_and_doubles_no_row(ack, mlruns, client, tmp_path):
    assert trains("dies_when_all_is_in_the_store").wait(60) == -signal.SIGKILL
    (spool,) = (mlruns / "spool").iterdir()
    os.truncate(spool / "ops.jsonl", int((tmp_path / "synced").read_text()))
    assert json.loads((spool / "ack.json").read_text())["offset"] > os.path.getsize(spool / "ops.jsonl")
    if ack == "lost":
        (spool / "ack.json").unlink()
    Trainer.resume(mlruns / "checkpoints" / spool.name).run(progress="none")
    assert times_logged(client) == EIGHT_STEPS
    assert the_run(client).info.status == "FINISHED"

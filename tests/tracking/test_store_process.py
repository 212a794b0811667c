import contextlib
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from benchmarks.fault_process import ForkedPython

from rl8x.tracking import MLflowTracker, sync
from rl8x.tracking import store_process as module
from rl8x.tracking.database import Point
from rl8x.tracking.location import Location, locate
from rl8x.tracking.store import MLflowStore, NewRun
from rl8x.tracking.store_errors import RunGoneError, StoreDownError, StoreRefusedError
from rl8x.tracking.store_process import StoreProcess

pytestmark = pytest.mark.store_process
SPEC = NewRun("a" * 32, "apart", None, "mine", 1000)


@pytest.fixture
def store(mlruns):
    """A store whose process is a fork of this one, which has imported MLflow once for all of them."""
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    store = StoreProcess(locate())
    with mock.patch.object(subprocess, "Popen", ForkedPython):
        store.source_tags()  # begins it, before this process has connections to the database that it would share
    yield store
    store.close()


@pytest.fixture
def forks():
    """Let processes be forks of this one also where they are begun later, or another one in their place."""
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    with mock.patch.object(subprocess, "Popen", ForkedPython):
        yield


def history(client, run_id, name):
    return [(point.step, point.value, point.timestamp) for point in client.get_metric_history(run_id, name)]


def test_every_call_does_what_it_does_in_this_process(store, mlflow_client, tmp_path):
    here = MLflowStore(locate())
    run_id = store.create_run(SPEC)
    assert store.find_runs(SPEC) == here.find_runs(SPEC) == [run_id]
    store.check_run(run_id)
    store.log_points(run_id, [Point("a", 0.1, 5, 1), Point("a", -math.inf, 6, 2), Point("b", 2.0**60, 7, 2)])
    store.log_params(run_id, {"lr": "0.1", "name": "\u00fc\n"})
    store.set_tags(run_id, {"kind": "test"})
    store.log_text(run_id, "words", "notes/a.txt")
    (tmp_path / "model.bin").write_bytes(b"\x00\xff")
    store.log_artifact(run_id, tmp_path / "model.bin", "models")
    run = mlflow_client.get_run(run_id)
    assert run.data.params == store.params(run_id) == {"lr": "0.1", "name": "\u00fc\n"}
    assert run.data.tags["kind"] == "test"
    [(_, first, at), (_, second, _)] = history(mlflow_client, run_id, "a")
    assert (first, at) == (0.1, 5)
    assert second < -1e300
    assert store.last_steps(run_id) == here.last_steps(run_id) == {"a": 2, "b": 2}
    assert [step for *_, step in store.points(run_id, "a")] == [1, 2]
    artifacts = tmp_path / "mlruns" / "artifacts"
    assert [path.read_bytes() for path in artifacts.rglob("model.bin")] == [b"\x00\xff"]
    assert [path.read_text() for path in artifacts.rglob("a.txt")] == ["words"]
    assert store.run_name(run_id) == here.run_name(run_id) == ("mine", True)
    store.set_status(run_id, "FINISHED", 2000)
    assert mlflow_client.get_run(run_id).info.end_time == 2000
    store.delete_run(run_id)
    assert mlflow_client.get_run(run_id).info.lifecycle_stage == "deleted"


def test_the_databases_file_alone_is_complete_when_the_process_has_ended(store, tmp_path):
    run_id = store.create_run(SPEC)
    store.log_points(run_id, [Point("a", 0.5, 5, step) for step in range(3)])
    process = store._process
    store.close()
    wait_for(lambda: process.popen.poll() is not None)  # which close() does for a second
    copied = shutil.copy(tmp_path / "mlruns" / "mlflow.db", tmp_path / "copied.db")
    with contextlib.closing(sqlite3.connect(copied)) as database:
        assert database.execute("SELECT step, value FROM metrics").fetchall() == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_errors_are_those_of_the_store(store):
    run_id = store.create_run(SPEC)
    store.log_params(run_id, {"lr": "0.1"})
    with pytest.raises(StoreRefusedError, match="lr"):
        store.log_params(run_id, {"lr": "0.2"})
    store.delete_run(run_id)
    with pytest.raises(RunGoneError, match="runs restore"):
        store.check_run(run_id)
    with pytest.raises(RunGoneError, match="0000"):
        store.params("0000")


@pytest.mark.usefixtures("forks")
def test_a_store_that_is_away_still_tells_where_the_run_comes_from(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "study.py")])
    store = StoreProcess(Location("http://127.0.0.1:9"), request_timeout_s=1)
    assert store.source_tags()["mlflow.source.name"] == str(tmp_path / "study.py")
    with pytest.raises(StoreDownError, match=r"127\.0\.0\.1"):
        store.check_run("0000")
    store.close()


def wait_for(condition, timeout_s=120.0):
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


@pytest.mark.usefixtures("forks")
def test_a_process_that_was_killed_is_replaced(store):
    run_id = store.create_run(SPEC)
    killed = store._process
    killed.popen.kill()
    wait_for(lambda: killed.gone)
    store.check_run(run_id)
    assert store._process.popen.pid != killed.popen.pid


@pytest.fixture
def process(mlruns):
    """The process, which imports MLflow at a low priority, for long on a busy machine."""
    process = module._Process()
    process.channel = process.open(locate(), 10)
    assert process.ask(process.open(locate(), 10), "close", ()) is None  # it has started
    yield process
    process.end()


@pytest.fixture
def early(monkeypatch, tmp_path):
    """The process, started before anything is tracked, in a folder without runs."""
    monkeypatch.chdir(tmp_path)
    module.start_early(locate().database)
    process = module._shared
    yield process
    module.end_unused()
    assert module._shared is None
    assert process.popen.poll() is not None


def test_one_that_is_started_early_imports_mlflow_and_touches_nothing(early, tmp_path):
    loaded = Path(f"/proc/{early.popen.pid}/maps")
    wait_for(lambda: "/sqlalchemy/" in loaded.read_text(), 60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forks")
def test_the_first_run_takes_the_one_that_was_started_early_with_the_environment_of_now(early, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_RUN_CONTEXT", '{"given": "later"}')
    store = StoreProcess(locate())
    assert store.source_tags()["given"] == "later"
    assert store._process is module._shared is early
    module.end_unused()
    store.create_run(SPEC)  # it is in use
    assert (tmp_path / "mlruns" / "mlflow.db").exists()
    store.close()


@pytest.mark.usefixtures("forks")
def test_one_that_was_started_early_and_killed_is_replaced(early):
    early.popen.kill()
    wait_for(lambda: early.gone)
    store = StoreProcess(locate())
    assert store.create_run(SPEC)
    assert store._process is not early
    store.close()


def test_one_that_was_started_early_ends_with_the_process_that_is_killed(tmp_path):
    code = (
        "import os, signal\nfrom rl8x.tracking import store_process\n"
        "store_process.start_early(None)\nprint(store_process._shared.popen.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path)
    wait_for(lambda: not os.path.exists(f"/proc/{int(done.stdout)}"))


def test_a_call_under_way_when_it_is_killed_fails(process):
    process.popen.send_signal(signal.SIGSTOP)
    threading.Timer(0.3, process.popen.kill).start()
    with pytest.raises(StoreDownError, match=r"is gone \(exit status -9\)"):
        process.ask(process.channel, "close", ())
    wait_for(lambda: process.gone)


def test_a_stopped_process_is_a_store_that_is_down_until_it_goes_on(store, monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 2)
    run_id = store.create_run(SPEC)
    popen = store._process.popen
    popen.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreDownError, match=rf"process ID {popen.pid}\) does not answer: is it stopped\?"):
        store.set_tags(run_id, {"late": "1" * 200_000})  # more than a pipe holds
    with pytest.raises(StoreDownError, match="does not answer"):
        store.check_run(run_id)
    popen.send_signal(signal.SIGCONT)
    wait_for(lambda: not store._process._trouble)
    assert store.run_name(run_id) == ("mine", True)  # and not the answer to the call before
    assert store._process.popen is popen
    assert store._process._waiting == {}


def test_one_that_stays_silent_is_killed(process, monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 2)
    monkeypatch.setattr(module, "KILL_S", 3)
    process.popen.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreDownError, match="does not answer"):
        process.ask(process.channel, "close", ())
    wait_for(lambda: process.gone)
    assert process.popen.poll() == -signal.SIGKILL


def test_one_that_only_waits_for_a_processor_is_not_silent(process, monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 2)
    looks = []
    monkeypatch.setattr(module._Process, "_is_busy", lambda self: looks.append(self._trouble) or len(looks) < 3)
    process.popen.send_signal(signal.SIGSTOP)  # in place of a computer that has no time for it
    wait_for(lambda: process._trouble)
    assert looks == ["", "", ""]


@pytest.mark.parametrize("script", ["while True: pass", "input()"])
def test_what_runs_is_told_from_what_waits_or_is_stopped(process, script):
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as other:
        process.popen, own = other, process.popen
        wait_for(lambda: process._is_busy() == (script != "input()"))
        other.send_signal(signal.SIGSTOP)
        wait_for(lambda: not process._is_busy())
        process.popen = own
        other.kill()


def test_the_end_kills_one_that_is_stopped(process):
    process.popen.send_signal(signal.SIGSTOP)
    process.end()
    assert process.popen.wait(5) == -signal.SIGKILL


def test_the_end_of_a_run_names_a_stopped_process_and_the_spool(mlruns, mlflow_client, monkeypatch, caplog):
    tracker = MLflowTracker()
    tracker.start(params={}, tags={})
    tracker.log_metrics({"a": 1.0}, 1)
    assert tracker.flush(60)
    pid = tracker._writer.sender.store._process.popen.pid
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "SILENT_S", 2)
    tracker.log_metrics({"a": 2.0}, 2)
    tracker.finish("FINISHED")
    reason = f"the process that talks to MLflow (process ID {pid}) does not answer: is it stopped?"
    began, ended = [record.getMessage() for record in caplog.records if record.name.startswith("rl8x")]
    assert f"does not take rows ({reason})" in began
    assert f"({reason}); it is in {tracker.spool_folder}, and `rl8x sync` sends it" in ended
    assert reason in tracker.whereabouts().lines()[0]
    wait_for(lambda: not alive(pid))
    assert sync().num_sent == 1
    assert [point[:2] for point in history(mlflow_client, tracker.run_id, "a")] == [(1, 1.0), (2, 2.0)]
    assert mlflow_client.get_run(tracker.run_id).info.status == "FINISHED"


def test_all_stores_share_one_process_and_the_last_ends_it(store, mlflow_template, tmp_path):
    run_id = store.create_run(SPEC)
    shutil.copyfile(mlflow_template, tmp_path / "other.db")
    other = StoreProcess(Location(f"sqlite:///{tmp_path}/other.db", tmp_path / "other.db"))
    other_id = other.create_run(SPEC)
    process = store._process
    assert other._process is process
    assert (store.find_runs(SPEC), other.find_runs(SPEC)) == ([run_id], [other_id])
    other.close()
    store.check_run(run_id)
    assert process.popen.poll() is None
    store.close()
    wait_for(lambda: process.popen.poll() == 0)


def test_a_store_takes_the_environment_and_arguments_that_are_there_when_it_is_opened(store, monkeypatch, tmp_path):
    assert store.source_tags()["mlflow.user"] != "someone"
    monkeypatch.setenv("LOGNAME", "someone")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "another.py")])
    other = StoreProcess(locate())
    tags = other.source_tags()
    assert (tags["mlflow.user"], tags["mlflow.source.name"]) == ("someone", str(tmp_path / "another.py"))
    assert other._process is store._process
    other.close()


def test_one_that_cannot_be_started_is_a_store_that_is_down(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(StoreDownError, match="No such file"):
        StoreProcess(Location("sqlite:///x.db")).check_run("0000")


def test_it_gives_way_to_the_training(process):
    pid = process.popen.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.nice(0) + 10)
    # In the same session, without which Linux would not compare the two; in a group of its own, so that Ctrl-C in the
    # terminal does not reach it.
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_does_not_outlive_a_run_that_is_killed_nor_bring_mlflow_into_it(mlruns, tmp_path):
    script = """
        import os, sys, time
        from rl8x.tracking import MLflowTracker, sync
        tracker = MLflowTracker()
        tracker.start(params={}, tags={})
        tracker.log_metrics({"a": 1.0}, 1)
        assert tracker.flush(60)
        print("mlflow" in sys.modules, tracker._writer.sender.store._process.popen.pid, flush=True)
        if (forked := os.fork()) > 0:  # the child is there longer
            print(forked, flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    imported, pid = process.stdout.readline().split()
    forked = int(process.stdout.readline())
    assert imported == "False"
    assert alive(pid)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not alive(pid))
    assert alive(forked)
    os.kill(forked, signal.SIGKILL)


def test_a_run_arrives_whole_and_its_process_ends(mlruns, mlflow_client):
    tracker = MLflowTracker(tags={"team": "a"})
    tracker.start(params={"lr": 0.1}, tags={})
    for step in range(20):
        tracker.log_metrics({"a": step / 7}, step)
    tracker.log_text("hello", "note.txt")
    assert tracker.flush(60)
    process = tracker._writer.sender.store._process.popen
    assert process.pid != os.getpid()
    tracker.finish("FINISHED")
    run = mlflow_client.get_run(tracker.run_id)
    assert (run.info.status, run.data.params, run.data.tags["team"]) == ("FINISHED", {"lr": "0.1"}, "a")
    assert run.data.tags["mlflow.source.name"] == sys.argv[0]
    assert [point[:2] for point in history(mlflow_client, tracker.run_id, "a")] == [(i, i / 7) for i in range(20)]
    assert process.wait(10) == 0

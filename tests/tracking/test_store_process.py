import contextlib
import io
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time

import pytest

from rl8x.tracking import MLflowTracker
from rl8x.tracking.location import Location, locate
from rl8x.tracking.store import MLflowStore, Point, RunGoneError, RunSpec, StoreDownError, StoreRefusedError
from rl8x.tracking.store_process import StoreProcess, serve

pytestmark = pytest.mark.store_process
SPEC = RunSpec("a" * 32, "apart", None, "mine", 1000)


@pytest.fixture
def store(mlruns):
    store = StoreProcess(locate())
    yield store
    store.close()


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
    assert sorted(store.logged_steps(run_id, "a")) == [1, 2]
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
    store.close()
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


def test_a_store_that_is_away_still_tells_where_the_run_comes_from(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "study.py")])
    store = StoreProcess(Location("http://127.0.0.1:9"), request_timeout_s=1)
    assert store.source_tags()["mlflow.source.name"] == str(tmp_path / "study.py")
    with pytest.raises(StoreDownError, match=r"127\.0\.0\.1"):
        store.check_run("0000")
    store.close()


def test_a_process_that_was_killed_is_replaced(store):
    run_id = store.create_run(SPEC)
    store._process.send_signal(signal.SIGKILL)
    store._process.wait()
    with pytest.raises(StoreDownError, match=r"is gone .*exit status -9"):
        store.check_run(run_id)
    store.check_run(run_id)


def test_one_that_cannot_be_started_is_a_store_that_is_down(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(StoreDownError, match="No such file"):
        StoreProcess(Location("sqlite:///x.db")).check_run("0000")


def test_it_gives_way_to_the_training(store):
    store.find_runs(SPEC)
    pid = store._process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.nice(0) + 10)
    # In the same session, without which Linux would not compare the two; in a group of its own, so that Ctrl-C in the
    # terminal does not reach it.
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid


def test_closing_ends_the_process(store):
    store.find_runs(SPEC)
    process = store._process
    store.close()
    assert process.poll() == 0


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_does_not_outlive_a_run_that_is_killed_nor_bring_mlflow_into_it(mlruns, tmp_path):
    script = """
        import sys, time
        from rl8x.tracking import MLflowTracker
        tracker = MLflowTracker()
        tracker.start(params={}, tags={})
        tracker.log_metrics({"a": 1.0}, 1)
        assert tracker.flush(60)
        print("mlflow" in sys.modules, tracker._writer._sender.store._process.pid, flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    imported, pid = process.stdout.readline().split()
    assert imported == "False"
    assert alive(pid)
    process.kill()
    process.wait()
    process.stdout.close()
    end = time.monotonic() + 20
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(pid)


def test_a_run_arrives_whole_and_its_process_ends(mlruns, mlflow_client):
    tracker = MLflowTracker(tags={"team": "a"})
    tracker.start(params={"lr": 0.1}, tags={})
    for step in range(20):
        tracker.log_metrics({"a": step / 7}, step)
    tracker.log_text("hello", "note.txt")
    assert tracker.flush(60)
    process = tracker._writer._sender.store._process
    assert process.pid != os.getpid()
    tracker.finish("FINISHED")
    run = mlflow_client.get_run(tracker.run_id)
    assert (run.info.status, run.data.params, run.data.tags["team"]) == ("FINISHED", {"lr": "0.1"}, "a")
    assert run.data.tags["mlflow.source.name"] == sys.argv[0]
    assert [point[:2] for point in history(mlflow_client, tracker.run_id, "a")] == [(i, i / 7) for i in range(20)]
    assert process.wait(10) == 0


class Fake:
    def __init__(self, location, request_timeout_s):
        self.opened = (location, request_timeout_s)
        self.points = []

    def log_points(self, run_id, points):
        self.points += points
        if len(self.points) > 2:
            raise ZeroDivisionError("three")

    def params(self, run_id):
        return {"opened": str(self.opened)}


def test_the_other_end_answers_line_by_line_and_survives_any_error():
    first = {"uri": "u", "database": "/d", "artifact_root": None, "request_timeout_s": 3, "argv": sys.argv}
    calls = [["log_points", "r", [["a", math.nan, 1, 2]]], ["log_points", "r", [["a", 1.0, 1, 2]] * 2], ["params", "r"]]
    requests = io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in [first, *calls, ["nothing"]]))
    answers = io.BytesIO()
    made = []
    serve(requests, answers, lambda *args, **options: made.append(Fake(*args, **options)) or made[0])
    lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert lines[:3] == [
        {"value": None},
        {"value": None},
        {"error": "StoreDownError", "text": "ZeroDivisionError: three"},
    ]
    assert "'u'" in lines[3]["value"]["opened"]
    assert lines[4]["error"] == "StoreDownError"
    [fake] = made
    assert math.isnan(fake.points[0].value)
    assert fake.points[1] == Point("a", 1.0, 1, 2)

import contextlib
import json
import logging
import os
import shutil
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlflow.entities import Metric

from rl8x.tracking.location import locate
from rl8x.tracking.protocol import RunMissingError, StoreDownError, StoreRefusedError
from rl8x.tracking.repeats import Point
from rl8x.tracking.store import MAX_METRICS, MLflowStore, NewRun, short_requests
from tracking.fakes import query

SPEC = NewRun("abc", "e", None, "n", 1234)


@pytest.fixture
def store(mlruns):
    return MLflowStore(locate())


def test_one_call_takes_as_many_points_as_it_says_and_mlflow_1000_at_a_time(store, mlflow_client, monkeypatch):
    run_id, sizes, log_batch = store.create_run(SPEC), [], type(mlflow_client).log_batch

    def watched(client, run_id, metrics, *others):
        sizes.append(len(metrics))
        return log_batch(client, run_id, metrics, *others)

    monkeypatch.setattr(type(mlflow_client), "log_batch", watched)
    names = [f"m{i}" for i in range(1300)]
    for step in (0, 3):  # unknown names, then names of which all but the newest points are past
        points = [Point(name, float(at), at, at) for at in range(step, step + 3) for name in names]
        assert 3 * MAX_METRICS < len(points) <= store.most_points
        store.log_points(run_id, points)
    assert sizes == [1000, 1000, 1000, 900, 1000, 300]
    assert store.last_steps(run_id) == dict.fromkeys(names, 5)
    for name in (names[0], names[-1]):
        assert [(point.step, point.value) for point in store.points(run_id, name)] == [(i, float(i)) for i in range(6)]


_VALUES = st.sampled_from([1.0, 2.0, -3.5, float("nan"), float("inf"), float("-inf")])
_POINTS = st.builds(Point, st.sampled_from("ab"), _VALUES, st.integers(0, 3), st.integers(-1, 3))
_BATCHES = st.lists(st.lists(_POINTS, max_size=12), max_size=3)


def rows_of(database, run_id):
    """Return what the database keeps of a run's metrics, in no order."""
    columns, where = "key, value, timestamp, step, is_nan", f"run_uuid = '{run_id}'"
    tables = ("metrics", "latest_metrics")
    return [set(query(database, f"SELECT {columns} FROM {table} WHERE {where}")) for table in tables]


def test_a_database_has_what_mlflow_alone_would_have_written(store, mlruns, mlflow_client):
    @given(_BATCHES)
    @example([[Point("a", 1.0, 0, 0)], [Point("a", 1.0, 1, 1)] * 2])  # the newest twice
    @settings(max_examples=15, deadline=None)
    def check(batches):
        ours, theirs = store.create_run(SPEC), store.create_run(SPEC)
        for batch in (*batches, *batches[:1]):
            store.log_points(ours, batch)
            mlflow_client.log_batch(theirs, [Metric(*point) for point in batch])
        assert rows_of(mlruns / "mlflow.db", ours) == rows_of(mlruns / "mlflow.db", theirs)

    check()


def test_nothing_is_written_of_a_run_that_is_deleted(store, mlruns):
    run_id = store.create_run(SPEC)
    store.log_points(run_id, [Point("a", 1.0, 1, 1)])
    store.delete_run(run_id)
    with pytest.raises(StoreRefusedError, match="deleted"):
        store.log_points(run_id, [Point("a", 2.0, 2, 2), Point("a", 3.0, 3, 3)])
    assert rows_of(mlruns / "mlflow.db", run_id)[0] == {("a", 1.0, 1, 1, 0)}
    for gone in (run_id, "none"):
        with pytest.raises(StoreDownError):
            store.check_run(gone)


def test_an_error_has_no_password_and_no_cause_that_has_one():
    # The text is cut within the password, and MLflow's own error, which would be shown as the cause, has all of it.
    store = MLflowStore(locate(f"http://me:{'p4ssw0rd' * 10}@127.0.0.1:1"), request_timeout_s=2)
    with pytest.raises(StoreDownError, match=r"http://me:\*\*\*@127\.0\.0\.1:1") as caught:
        store.experiments()
    assert "p4ss" not in "".join(traceback.format_exception(caught.value))


def test_runs_are_found_by_their_journal_and_it_is_known_whether_their_names_are_unique(store, mlflow_client):
    assert store.find_runs(SPEC.journal_id) == []
    run_id = store.create_run(SPEC)
    assert store.run_name(run_id) == ("n", True)
    elsewhere = store.create_run(SPEC._replace(journal_id="other", experiment="other"))
    assert store.find_runs(SPEC.journal_id) == [run_id]
    assert store.run_name(run_id) == ("n", False)
    store.delete_run(elsewhere)
    assert store.run_name(run_id) == ("n", True)
    made_up = store.create_run(SPEC._replace(run_name=None))
    assert store.run_name(made_up) == (mlflow_client.get_run(made_up).info.run_name, True)
    with pytest.raises(StoreDownError):
        store.run_name("none")


@pytest.mark.parametrize("name", ["it's", 'say "hi"', """both ' and \"""", "end\\", "'\\", "a `b` 50%_", "x' OR '1"])
def test_runs_of_any_name_are_found_by_it(store, name):
    run_id = store.create_run(SPEC._replace(run_name=name))
    store.create_run(SPEC._replace(run_name=f"{name}."))
    assert [run.info.run_id for run in store.search_by_name(name)] == [run_id]
    assert store.run_name(run_id) == (name, True)


def test_what_mlflow_refuses(store, mlflow_client):
    run_id = store.create_run(SPEC)
    with pytest.raises(StoreRefusedError, match="Invalid value"):
        store.log_points(run_id, [Point("good", 1.0, 5, 1), Point("bad(", 1.0, 5, 1)])
    assert store.last_steps(run_id) == {}
    store.log_params(run_id, {"lr": "1"})
    with pytest.raises(StoreRefusedError):
        store.log_params(run_id, {"lr": "2"})
    assert store.entity(run_id).data.params == {"lr": "1"}
    mlflow_client.delete_experiment(mlflow_client.get_experiment_by_name("e").experiment_id)
    with pytest.raises(StoreDownError, match="experiment 'e' is deleted"):
        store.create_run(SPEC)


def test_an_error_of_a_database_is_an_outage_told_without_the_query_or_a_traceback(store, mlruns, caplog):
    run_id = store.create_run(SPEC)
    query(mlruns / "mlflow.db", "ALTER TABLE tags RENAME TO others")
    with caplog.at_level(logging.DEBUG), pytest.raises(StoreDownError) as caught:
        store.set_tags(run_id, {"a": "b" * 300})
    assert str(caught.value) == "(sqlite3.OperationalError) no such table: tags"
    assert [record for record in caplog.records if record.exc_info] == []


@contextlib.contextmanager
def served(answer, **options):
    """A store on a server, or on a proxy before it, whose answer to a method (GET, POST) is a code and a text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            code, text = answer(self.command)
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield MLflowStore(locate(f"http://127.0.0.1:{server.server_port}"), **options)
        server.shutdown()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_sick_server_is_found_out_soon(hangs):
    requests, released = [], threading.Event()

    def sick(method):
        requests.append(method)
        if hangs:
            released.wait(20)
        return 500, ""

    with served(sick, request_timeout_s=1) as store:
        begin = time.monotonic()
        with pytest.raises(StoreDownError):
            store.check_run("abc")
        assert time.monotonic() - begin < 15  # it hangs for longer
        released.set()
    assert requests == ["GET"]  # one try: waiting is the writer's business
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


CODE = '{{"error_code": {}, "message": "no"}}'
ANSWERS = {
    "MLflow's refusal": (400, CODE.format('"INVALID_PARAMETER_VALUE"'), StoreRefusedError),
    "a run that is not there": (404, CODE.format('"RESOURCE_DOES_NOT_EXIST"'), RunMissingError),
    "MLflow's bad request": (400, CODE.format('"BAD_REQUEST"'), StoreDownError),
    "a page of a proxy": (400, "<html>Bad Request: INVALID_PARAMETER_VALUE</html>", StoreDownError),
    "a number in JSON": (400, CODE.format(400), StoreDownError),
    "JSON of another kind": (400, '{"error": "INVALID_PARAMETER_VALUE"}', StoreDownError),
    "forbidden": (403, '{"message": "forbidden"}', StoreDownError),
    "not found": (404, "<html>no such page</html>", StoreDownError),
    "too large": (413, "<html>too large</html>", StoreDownError),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_only_mlflows_own_refusal_is_one(what):
    code, text, error = ANSWERS[what]
    with served(lambda method: (code, text)) as store, pytest.raises(error) as caught:
        store.log_points("r", [Point("a", 1.0, 5, 1)])
    assert type(caught.value) is error  # a run that is gone is an outage too, of another kind


@pytest.mark.parametrize("replaced", [True, False])
def test_a_database_that_is_not_the_one_of_before_takes_nothing(replaced, store, mlruns, mlflow_template):
    database, run_id = mlruns / "mlflow.db", store.create_run(SPEC)
    store.log_points(run_id, [Point("a", 1.0, 5, 1)])
    for path in mlruns.glob("mlflow.db*") if replaced else [database]:
        path.unlink()
    if replaced:
        shutil.copyfile(mlflow_template, database)
    for call in (
        lambda: store.log_points(run_id, [Point("a", 2.0, 6, 2)]),
        lambda: store.entity(run_id),
        lambda: store.set_status(run_id, "FINISHED", 5),
        lambda: store.log_text(run_id, "x", "x.txt"),
    ):
        with pytest.raises(StoreDownError, match=r"mlflow\.db was deleted, moved or replaced"):
            call()
    assert ((mlruns / "artifacts").exists(), database.exists()) == (False, replaced)
    later = MLflowStore(locate())
    with pytest.raises(RunMissingError, match=run_id):
        later.check_run(run_id)
    again = later.create_run(SPEC)
    later.log_points(again, [Point("a", 3.0, 7, 3)])
    assert rows_of(database, again)[0] == {("a", 3.0, 7, 3, 0)}
    assert rows_of(database, run_id)[0] == set()


def test_a_database_that_goes_during_a_call_has_not_taken_it(store, mlruns, monkeypatch):
    run_id, log_batch = store.create_run(SPEC), store._client.log_batch
    monkeypatch.setattr(
        store._client, "log_batch", lambda *args, **more: (log_batch(*args, **more), (mlruns / "mlflow.db").unlink())
    )
    with pytest.raises(StoreDownError, match="was deleted, moved or replaced"):
        store.log_points(run_id, [Point("a", 2.0, 6, 2)])


@pytest.mark.parametrize("written", ["", '{"detail": "Not Found"}', "{}"], ids=["nothing", "any object", "its own"])
def test_what_a_proxy_takes_in_place_of_the_server_has_not_arrived(written, monkeypatch):
    monkeypatch.setattr("rl8x.tracking.store._LOOK_AGAIN_S", (0.0,))
    info = {"run_id": "r", "status": "RUNNING", "lifecycle_stage": "active"}
    metric = {"key": "a", "value": 1.0, "timestamp": 4, "step": 0}
    run = json.dumps({"run": {"info": info, "data": {"metrics": [metric]}}})
    with served(lambda method: (200, run if method == "GET" else written)) as store:
        store.log_points("r", [Point("a", 1.0, 4, 0)])  # which the server has
        for call in (
            lambda: store.log_points("r", [Point("a", 1.0, 5, 1)]),
            lambda: store.log_params("r", {"lr": "1"}),
            lambda: store.set_tags("r", {"t": "1"}),
            lambda: store.set_status("r", "FINISHED", 5),
        ):
            with pytest.raises(StoreDownError, match="as if it had been taken"):
                call()


def test_short_requests_keeps_what_the_user_set(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    with short_requests(3), short_requests(9):
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ

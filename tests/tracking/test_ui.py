"""The page of runs: the link and the view of its charts, and how it is served."""

import base64
import contextlib
import http.server
import json
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import webbrowser
import zlib
from unittest import mock

import psutil
import pytest
from tests.ports import free_port

from rl8x.cli.main import main
from rl8x.tracking import TrackingError, open_browser, runs_link, serve_ui, ui, ui_command
from rl8x.tracking.location import Location, locate
from rl8x.tracking.protocol import StoreDownError
from rl8x.tracking.store import MLflowStore
from rl8x.tracking.ui import VIEW_TAG, server_address

METRICS = (
    *("algorithm/steps", "env/steps", "profiling/collect_ms", "losses/policy", "success/rate", "loss"),
    *("eval/long pole/returns/mean", "eval/long pole/returns/std", "eval/returns/mean", "eval/returns/std"),
)


@pytest.fixture
def run_in(mlflow_client):
    """Make a run of ours in an experiment, at a time."""

    def make(experiment, time, tags=(("rl8x.version", "0.1"),)):
        found = mlflow_client.get_experiment_by_name(experiment)
        number = mlflow_client.create_experiment(experiment) if found is None else found.experiment_id
        run = mlflow_client.create_run(number, start_time=time, tags=dict(tags))
        for name in METRICS:
            mlflow_client.log_metric(run.info.run_id, name, 1.0, step=5)
        return number

    return make


def link(**options):
    return runs_link(None, "127.0.0.1", 5001, **options)


def sections(tag):
    envelope = json.loads(tag)
    kind, _, text = envelope["state"].partition(";")
    assert (envelope["name"], kind) == ("rl8x", "deflate")
    state = json.loads(zlib.decompress(base64.b64decode(text)))
    return state, [section["name"] for section in state["compareRunSections"]]


def test_the_link_leads_to_the_experiment_of_our_newest_run_and_its_view(run_in, mlflow_client):
    assert link() == ("http://127.0.0.1:5001/#/experiments?workflowType=machine_learning", False)  # without runs
    run_in("older", 1000)
    number = run_in("newer", 2000)
    run_in("of another program", 3000, tags=())
    assert link() == (
        f"http://127.0.0.1:5001/#/experiments/{number}/runs"
        "?workflowType=machine_learning&compareRunsMode=CHART&viewStateShareKey=rl8x",
        False,
    )
    state, names = sections(mlflow_client.get_experiment(number).tags[VIEW_TAG])
    charts = [chart["metricKey"] for chart in state["compareRunCharts"]]
    expected = ("eval/returns/mean", "episodes/returns/mean", "eval/long pole/returns/mean")
    assert (charts[0], charts[2], charts[-1]) == expected
    shown = ["mean returns", "Model metrics", "success", "losses", "eval/returns", "eval/long pole/returns"]
    assert names == [*shown, "profiling", "env", "algorithm"]
    assert [section["display"] for section in state["compareRunSections"]] == [True] * 6 + [False] * 3
    parts = state["compareRunSections"] + state["compareRunCharts"]
    assert len({part["uuid"] for part in parts}) == len(parts)
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} == {state["compareRunSections"][0]["uuid"]}
    # The list of runs shows what a run was and came to, by columns as MLflow's page has them.
    assert state["selectedColumns"] == ["tags.`rl8x.task`", "tags.`rl8x.algorithm`", "tags.`rl8x.result`"]
    for name in ("older", "of another program"):
        assert VIEW_TAG not in mlflow_client.get_experiment_by_name(name).tags


def test_a_view_of_ours_is_renewed_and_one_of_the_users_is_kept(run_in, mlflow_client, monkeypatch):
    number = run_in("one", 1000)
    with monkeypatch.context() as patch:  # who may only look gets none
        patch.setattr(MLflowStore, "set_experiment_tag", mock.Mock(side_effect=StoreDownError("PERMISSION_DENIED")))
        assert link()[0].endswith(f"/{number}/runs?workflowType=machine_learning&compareRunsMode=CHART")
    link()
    run = mlflow_client.create_run(number, tags={"rl8x.version": "0.1"})
    mlflow_client.log_metric(run.info.run_id, "prices/best", 1.0)
    link()
    assert "prices" in sections(mlflow_client.get_experiment(number).tags[VIEW_TAG])[1]
    mine = json.dumps({"name": "rl8x", "createdAt": 1, "updatedAt": 2, "state": "{}"})  # as MLflow's page writes it
    mlflow_client.set_experiment_tag(number, VIEW_TAG, mine)
    assert link()[0].endswith("viewStateShareKey=rl8x")
    assert mlflow_client.get_experiment(number).tags[VIEW_TAG] == mine


def test_sections_of_constants_and_of_results_are_folded_and_no_constant_is_a_chart(mlflow_client):
    number = mlflow_client.create_experiment("one")
    rows = {"returns/mean": (32, 32), "returns/std": (0, 0), "rewards/mean": (1, 1), "rewards/std": (0, 0.5)}
    rows |= {"eval/rewards/mean": (1, 1), "eval/returns/mean": (9, 500), "episodes/lengths/max": (5, 5)}
    rows |= {f"{group}/eval/returns/mean": (500, 500) for group in ("best", "final")} | {"losses/value": (2, 2)}
    for changed in ({}, {"episodes/lengths/max": (6, 6), "losses/value": (3, 2)}):
        run = mlflow_client.create_run(number, tags={"rl8x.version": "0.1"})
        for name, values in (rows | changed).items():
            for step, value in enumerate(values):
                mlflow_client.log_metric(run.info.run_id, name, value, step=step)
    link()
    state, names = sections(mlflow_client.get_experiment(number).tags[VIEW_TAG])
    shown = [section["name"] for section in state["compareRunSections"] if section["display"]]
    assert shown == ["mean returns", "losses", "episodes/lengths", "rewards"]
    assert names == [*shown, "eval/rewards", "returns", "final/eval/returns", "best/eval/returns"]
    assert "returns/mean" not in [chart["metricKey"] for chart in state["compareRunCharts"]]


@pytest.mark.parametrize(
    ("uri", "host", "address"),
    [
        ("sqlite:///x.db", "0.0.0.0", "http://127.0.0.1:5001"),
        ("sqlite:///x.db", "::1", "http://[::1]:5001"),
        ("sqlite:///x.db", "box", "http://box:5001"),
        ("https://me:secret@server/mlflow/", "127.0.0.1", "https://server/mlflow"),
        ("https://me:s@cret@server/?token=abcd", "127.0.0.1", "https://server"),
    ],
)
def test_the_address(uri, host, address):
    location = locate(uri) if uri.startswith("sqlite") else Location(uri)
    assert server_address(location, host, 5001) == address


def test_the_store_with_any_password_is_in_the_environment_and_not_in_the_command():
    uri = "postgresql://me:p4ssw0rd@host/db"
    words = ["-m", "mlflow", "ui", "--workers", "1", "--host", "0.0.0.0", "--port", "5001"]
    assert ui_command(uri, "0.0.0.0", 5001) == [sys.executable, *words]
    expected = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    assert expected.items() <= ui.ui_environment(uri).items()


PAGE = """
import sys, warnings
from importlib.util import find_spec
from uvicorn.main import main
warnings.warn("starlette.middleware.wsgi is deprecated and will be removed", UserWarning)
options = main.make_context("uvicorn", ["a:b"], auto_envvar_prefix="UVICORN").params
print("ignore::ImportWarning" in sys.warnoptions, options["log_level"], options["app_dir"], find_spec("served"))
"""


def test_after_the_link_only_what_is_wrong_is_printed_and_no_module_of_the_folder_is_run(mlruns, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::ImportWarning")
    environment = ui.ui_environment()
    assert environment["MLFLOW_BACKEND_STORE_URI"] == f"sqlite:///{mlruns}/mlflow.db"
    assert environment["MLFLOW_REGISTRY_STORE_URI"] == environment["MLFLOW_BACKEND_STORE_URI"]  # else MLflow says so
    mlruns.with_name("served.py").touch()
    done = subprocess.run([sys.executable, "-c", PAGE], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"True warning {sysconfig.get_path('purelib')} None\n", "")


def test_what_cannot_be_served():
    with pytest.raises(TrackingError, match="open http://server:5000"):
        ui_command("http://server:5000")
    with pytest.raises(TrackingError, match="port must be between 1 and 65535; got 0"):
        ui_command("sqlite:///x.db", port=0)
    with pytest.raises(TrackingError, match="open databricks"):
        runs_link("databricks")


SERVER = """
import os, signal, socket, subprocess, sys, time
if sys.argv[2:]:  # as MLflow's command, which starts the server and does not end it
    sys.exit(subprocess.Popen([sys.executable, sys.argv[0], sys.argv[1]]).wait())
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    time.sleep(600)
"""
DRIVER = """
import sys
from rl8x.tracking import ui
ui.ui_command = lambda *_: [sys.executable, *sys.argv[1:], "starts another"]
sys.exit(ui.serve_ui("sqlite:///x.db"))
"""


@pytest.mark.long
@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
@pytest.mark.usefixtures("default_signals")
def test_however_it_is_ended_nothing_is_left_on_the_port(tmp_path, sent):
    port = free_port()
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "server.py"), str(port)]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as driver:
        deadline = time.monotonic() + 120
        while True:
            assert driver.poll() is None
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        family = psutil.Process(driver.pid).children(recursive=True)
        assert len(family) == 3  # what watches over the others, MLflow's command, and the server
        driver.send_signal(getattr(signal, sent))
        assert driver.wait(120) == (-signal.SIGKILL if sent == "SIGKILL" else 0)
        assert driver.stderr.read() == ""  # at the end of which all have closed it
    if sent == "SIGKILL":
        psutil.wait_procs(family, timeout=60)
    assert [process for process in family if process.is_running()] == []
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(("display", "starts"), [(":0", True), ("", True), (":0", False)])
def test_a_browser_is_opened_only_where_there_is_a_display_and_one_that_starts(monkeypatch, display, starts):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setenv("WAYLAND_DISPLAY", "")
    opens = mock.Mock(return_value=True, side_effect=None if starts else webbrowser.Error)
    monkeypatch.setattr(webbrowser, "open", opens)
    assert open_browser("http://x/") == (starts and display != "")


def test_the_link_is_opened_once_the_server_answers(mlruns, monkeypatch, tmp_path):
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        link, links = f"http://127.0.0.1:{server.server_port}/#/experiments/1", []
        opened = tmp_path / "opened"
        monkeypatch.setattr(ui, "open_browser", lambda link: links.append(link) or opened.touch())
        waits = f"import os, sys, time\nwhile not os.path.exists({str(opened)!r}): time.sleep(0.05)\nsys.exit(7)"
        monkeypatch.setattr(ui, "ui_command", lambda *_: [sys.executable, "-c", waits])
        assert serve_ui(link=link) == 7
    assert links == [link]


def test_an_address_that_cannot_be_used_is_refused_before_mlflow_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["ui", "--port", str(port)]) == 2
        taken = f"rl8x: error: cannot listen at 127.0.0.1:{port} (Address already in use): choose another by --port\n"
        assert capsys.readouterr().err == taken
        with socket.create_connection(("127.0.0.1", port)), other.accept()[0]:
            pass
    ui._check_address("127.0.0.1", port)  # one that has just been given back is free
    assert main(["ui", "--host", "203.0.113.1"]) == 2  # of nobody: RFC 5737
    assert "cannot listen at 203.0.113.1:5000 (Cannot assign requested address)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

import contextlib
import http.server
import re
import signal
import socket
import subprocess
import sys
import time
import webbrowser

import psutil
import pytest

from rl8x.cli.main import main
from rl8x.tracking import TrackingError, open_browser, runs_link, serve_ui, ui, ui_command


def test_the_command(mlruns):
    command = ui_command(None, "0.0.0.0", 5001)
    assert command[:4] == [sys.executable, "-m", "mlflow", "ui"]
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert options == {
        "--workers": "1",
        "--host": "0.0.0.0",
        "--port": "5001",
    }
    environment = ui.ui_environment()
    assert environment["MLFLOW_BACKEND_STORE_URI"] == f"sqlite:///{mlruns}/mlflow.db"
    assert environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"


def test_nothing_but_what_is_wrong_is_printed_after_the_link(mlruns, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::ImportWarning")
    environment = ui.ui_environment()
    assert environment["MLFLOW_REGISTRY_STORE_URI"] == environment["MLFLOW_BACKEND_STORE_URI"]  # else MLflow says so
    code = (
        "import sys, warnings; from uvicorn.main import main; print(sys.warnoptions)\n"
        "warnings.warn('starlette.middleware.wsgi is deprecated and will be removed', UserWarning)\n"
        "print(main.make_context('uvicorn', ['a:b'], auto_envvar_prefix='UVICORN').params['log_level'])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "ignore::ImportWarning" in done.stdout
    assert done.stdout.splitlines()[-1] == "warning"
    assert done.stderr == ""


def test_a_password_is_in_no_command():
    uri = "postgresql://me:p4ssw0rd@host/db"
    assert "p4ssw0rd" not in " ".join(ui_command(uri))
    assert ui.ui_environment(uri)["MLFLOW_BACKEND_STORE_URI"] == uri


def test_what_cannot_be_served():
    with pytest.raises(TrackingError, match="open http://server:5000"):
        ui_command("http://server:5000")
    with pytest.raises(TrackingError, match="port must be between 1 and 65535; got 0"):
        ui_command("sqlite:///x.db", port=0)
    with pytest.raises(TrackingError, match="open databricks"):
        runs_link("databricks")


def test_serving(mlruns, monkeypatch):
    monkeypatch.setattr(ui, "_check_address", lambda *_: None)
    monkeypatch.setattr(ui, "ui_command", lambda *_: [sys.executable, "-c", "import sys; sys.exit(7)"])
    assert serve_ui() == 7


SERVER = """
import os, signal, socket, subprocess, sys, time
if sys.argv[2:]:  # as MLflow's command, which starts the server and does not end it
    sys.exit(subprocess.Popen([sys.executable, sys.argv[0], sys.argv[1]]).wait())
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    time.sleep(60)
"""
DRIVER = """
import sys
from rl8x.tracking import ui
ui.ui_command = lambda *_: [sys.executable, *sys.argv[1:], "starts another"]
sys.exit(ui.serve_ui("sqlite:///x.db"))
"""


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
@pytest.mark.usefixtures("default_signals")
def test_however_it_is_ended_nothing_is_left_on_the_port(tmp_path, sent):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
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
        assert driver.wait(30) == (-signal.SIGKILL if sent == "SIGKILL" else 0)
        assert driver.stderr.read() == ""  # at the end of which all have closed it
    if sent == "SIGKILL":
        psutil.wait_procs(family, timeout=60)
    assert [process for process in family if process.is_running()] == []
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(("display", "opened"), [(":0", ["http://x/"]), (None, [])])
def test_a_browser_is_opened_only_where_there_is_a_display(monkeypatch, display, opened):
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if display is not None:
        monkeypatch.setenv("DISPLAY", display)
    links = []
    monkeypatch.setattr(webbrowser, "open", lambda link: links.append(link) or True)
    assert open_browser("http://x/") == bool(opened)
    assert links == opened


def test_a_browser_that_does_not_start_is_no_failure(monkeypatch):
    def fail(link):
        raise webbrowser.Error("no browser")

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(webbrowser, "open", fail)
    assert not open_browser("http://x/")


def test_the_link_is_opened_once_the_server_answers(mlruns, monkeypatch, tmp_path):
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        link, links = f"http://127.0.0.1:{server.server_port}/#/experiments/1", []
        opened = tmp_path / "opened"
        monkeypatch.setattr(ui, "open_browser", lambda link: links.append(link) or opened.touch())
        waits = f"import os, time\nwhile not os.path.exists({str(opened)!r}): time.sleep(0.05)"
        monkeypatch.setattr(ui, "ui_command", lambda *_: [sys.executable, "-c", waits])
        assert serve_ui(link=link) == 0
    assert links == [link]


def test_an_address_that_cannot_be_used_is_refused_before_mlflow_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = ["ui", "--port", str(port)]
        assert main(words) == 2
    taken = f"rl8x: error: cannot listen at 127.0.0.1:{port} (Address already in use): choose another by --port\n"
    assert capsys.readouterr().err == taken
    assert main(["ui", "--host", "203.0.113.1"]) == 2  # of nobody: RFC 5737
    assert "cannot listen at 203.0.113.1:5000 (Cannot assign requested address)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_has_just_been_given_back_is_free():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), other.accept()[0]:
            pass
    ui._check_address("127.0.0.1", port)


@pytest.mark.parametrize("words", [["served"], ["uvicorn", "served:app"]])
def test_the_ui_runs_no_module_of_the_working_directory(words, tmp_path):
    (tmp_path / "served.py").write_text("open('imported', 'w')")
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=tmp_path, env=ui.ui_environment(), capture_output=True, text=True, check=False)
    assert re.search("No module named .?served|Could not import module", done.stderr)
    assert not (tmp_path / "imported").exists()

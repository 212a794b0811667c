import subprocess
import sys

import pytest

from rl8x.tracking import TrackingError, serve_ui, ui, ui_command


def test_the_command(mlruns):
    command = ui_command(None, "0.0.0.0", 5001)
    assert command[:4] == [sys.executable, "-m", "mlflow", "ui"]
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert options == {
        "--workers": "1",
        "--host": "0.0.0.0",
        "--port": "5001",
        "--backend-store-uri": f"sqlite:///{mlruns}/mlflow.db",
    }
    assert ui.ui_environment()["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"


def test_what_cannot_be_served():
    with pytest.raises(TrackingError, match="open http://server:5000"):
        ui_command("http://server:5000")
    with pytest.raises(TrackingError, match="port must be between 1 and 65535; got 0"):
        ui_command("sqlite:///x.db", port=0)


def test_serving(mlruns, monkeypatch):
    monkeypatch.setattr(ui, "ui_command", lambda *_: [sys.executable, "-c", "import sys; sys.exit(7)"])
    assert serve_ui() == 7


def test_an_interrupt_ends_the_server(mlruns, monkeypatch):
    class Process:
        waited = 0
        terminated = False

        def __init__(self, command, env):
            Process.last = self

        def wait(self):
            self.waited += 1
            if self.waited == 1:
                raise KeyboardInterrupt

        def terminate(self):
            self.terminated = True

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert serve_ui() == 0
    assert Process.last.terminated
    assert Process.last.waited == 2

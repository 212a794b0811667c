"""MLflow's own server on this machine, started and killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_server(store: str, log: Path, port: int, artifacts: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a server on a store, such as `sqlite:///mlflow.db`, and wait until it answers, ten minutes at most.

    Args:
        store: The tracking URI of what it serves.
        log: Gets what it says.
        port: Where it listens.
        artifacts: Where it keeps artifacts; None leaves that to MLflow.
    """
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", store]
    if artifacts is not None:
        command += ["--artifacts-destination", str(artifacts)]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(log, "ab") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    for _ in range(6000):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return process
        time.sleep(0.1)
    kill_server(process)
    raise RuntimeError(f"the server on port {port} does not answer: see {log}")


def kill_server(process: subprocess.Popen[bytes]) -> None:
    """Kill a server with its workers, which are in a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

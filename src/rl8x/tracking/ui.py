"""Open MLflow's UI on the store that runs are kept in, with as few processes as it takes."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import webbrowser
from urllib.parse import urlsplit

from rl8x.tracking.location import Location, locate
from rl8x.tracking.page import runs_page, server_address
from rl8x.tracking.protocol import TrackingError
from rl8x.tracking.store import MLflowStore, StoreDownError, StoreRefusedError

DEFAULT_PORT = 5000


def ui_command(tracking_uri: str | None = None, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> list[str]:
    """Build the command of a lean `mlflow ui`: 2 processes and half a gigabyte instead of 14 and three.

    It runs under `ui_environment`, which has the address of the store: every user of the machine can read a command.

    Args:
        tracking_uri: The store; default the one that `MLflowTracker` would use.
        host: Address to listen at.
        port: Port to listen at.

    Raises:
        TrackingError: The store is a server, which has a UI of its own, or cannot be used.
    """
    _own_store(tracking_uri)
    if not 0 < port < 65536:
        raise TrackingError(f"port must be between 1 and 65535; got {port}")
    return [sys.executable, "-m", "mlflow", "ui", "--workers", "1", "--host", host, "--port", str(port)]


def ui_environment(tracking_uri: str | None = None) -> dict[str, str]:
    """Return the environment for `ui_command`: the store, and no workers for jobs that rl8x has no use for.

    Plain `mlflow ui` opens `./mlflow.db` whatever `MLFLOW_TRACKING_URI` says. No module of the working directory is
    taken for one of MLflow's: not by Python, and not by uvicorn, which looks there unless it is given another folder,
    such as the one where it is itself. Argument and error are as those of `ui_command`.
    """
    settings = {
        "MLFLOW_BACKEND_STORE_URI": _own_store(tracking_uri).uri,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "PYTHONSAFEPATH": "1",
        "UVICORN_APP_DIR": sysconfig.get_path("purelib"),
    }
    return {**os.environ, **settings}


def _own_store(tracking_uri: str | None) -> Location:
    location = locate(tracking_uri)
    if location.remote:
        raise TrackingError(f"the runs are on a server, which has a UI: open {location.shown}")
    return location


def _check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be listened at, for which MLflow needs many lines, seconds later."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            # As servers do, or a port would count as taken for a minute after its last connection.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        hint = "choose another by --port" if error.errno == errno.EADDRINUSE else "choose another --host or --port"
        raise TrackingError(f"cannot listen at {host}:{port} ({error.strerror}): {hint}") from None


def runs_link(tracking_uri: str | None = None, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> tuple[str, bool]:
    """Prepare MLflow's page on the newest runs, in a store that is made where it is not there.

    Arguments are as those of `ui_command`.

    Returns:
        The link to the runs, and whether a server is there already: the one that keeps them.

    Raises:
        TrackingError: The store or the address cannot be used.
    """
    location = locate(tracking_uri)
    if not location.uri.startswith(("http://", "https://")):
        ui_command(tracking_uri, host, port)
        _check_address(host, port)
    try:
        return runs_page(MLflowStore(location), server_address(location, host, port)), location.remote
    except (StoreDownError, StoreRefusedError) as error:
        raise TrackingError(f"cannot open the store: {error}") from error


def serve_ui(
    tracking_uri: str | None = None, host: str = "127.0.0.1", port: int = DEFAULT_PORT, *, link: str | None = None
) -> int:
    """Serve the UI until it is interrupted; returns its exit status.

    Args:
        tracking_uri: As for `ui_command`.
        host: As for `ui_command`.
        port: As for `ui_command`.
        link: Opened in a browser, where there is one, as soon as the server answers.

    Raises:
        TrackingError: The store cannot be used.
    """
    process = subprocess.Popen(ui_command(tracking_uri, host, port), env=ui_environment(tracking_uri))
    if link is not None:
        threading.Thread(target=_open_when_served, args=(process, link), daemon=True).start()
    try:
        return process.wait()
    except KeyboardInterrupt:  # the terminal has interrupted the server as well
        process.terminate()
        process.wait()
        return 0


def open_browser(link: str) -> bool:
    """Open a link in a browser where there is a display; a browser in the terminal would be in the way."""
    if sys.platform not in ("darwin", "win32") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    with contextlib.suppress(webbrowser.Error, OSError):
        return webbrowser.open(link)
    return False


def _open_when_served(process: subprocess.Popen[bytes], link: str) -> None:
    address = urlsplit(link)
    while process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((str(address.hostname), address.port or 80), 1):
            open_browser(link)
            return
        time.sleep(0.5)

"""Open MLflow's UI for the runs' store, on the charts of the newest runs.

Without such a link, MLflow's UI opens an experiment on its pages for language models, and sorts charts alphabetically,
counters first. The order is a saved view of MLflow: a tag of the experiment, which the link names and the page's menu
of views lists.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import webbrowser
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from rl8x import keys
from rl8x.processes import guarded, own_variables
from rl8x.tracking import private
from rl8x.tracking.location import Location, locate
from rl8x.tracking.protocol import StoreDownError, StoreRefusedError, TrackingError
from rl8x.tracking.store import MLflowStore

DEFAULT_PORT = 5000
VIEW: Final = "rl8x"
VIEW_TAG: Final = f"{private.VIEW_TAG_PREFIX}{VIEW}"
# The most important charts, shown above all groups of metrics.
_FIRST: Final = (*keys.EVALUATED_RETURNS, *keys.TRAINED_RETURNS)
_FIRST_SECTION: Final = "mean returns"
_WITHOUT_GROUP: Final = "Model metrics"  # MLflow's name of the section of metrics whose names have no `/`
# Order of sections, by the first part of their names; "" is any other, such as a callback's metrics.
_SHOWN: Final = ("", "losses", "monitors", "eval", "episodes", "returns", "rewards")
_FOLDED: Final = ("final", "best", "best_step", "coefficients", "profiling", "memory", "env", "algorithm")
# Columns that the list of runs shows next to the names, in the format of MLflow's page.
_COLUMNS: Final = ("tags.`rl8x.task`", "tags.`rl8x.algorithm`", "tags.`rl8x.result`")
_SECTION: Final = {"isReordered": True, "deleted": False, "isGenerated": True}
_QUIET: Final = "ignore:starlette.middleware.wsgi is deprecated"  # a warning that MLflow causes
_COMPARED: Final = 3  # number of newest runs whose histories show which metrics are constant


def ui_command(tracking_uri: str | None = None, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> list[str]:
    """Return the command of a lean `mlflow ui`, with 2 processes and 0.5 GB of memory instead of 14 and 3 GB.

    It needs `ui_environment`, which has the store's address, since every user of the machine can read a command.

    Args:
        tracking_uri: The store; None is the one that `MLflowTracker` would use.
        host: Address to listen at.
        port: Port to listen at, from 1 to 65535.

    Raises:
        TrackingError: The store is a server, which has its own UI, or cannot be used; or the port is invalid.
    """
    _own_store(tracking_uri)
    if not 0 < port < 65536:
        raise TrackingError(f"port must be between 1 and 65535; got {port}")
    return [sys.executable, "-m", "mlflow", "ui", "--workers", "1", "--host", host, "--port", str(port)]


def ui_environment(tracking_uri: str | None = None) -> dict[str, str]:
    """Return the environment for `ui_command`: the store's address, and no job workers, which rl8x does not need.

    Plain `mlflow ui` opens `./mlflow.db` and ignores `MLFLOW_TRACKING_URI`. Python and uvicorn are kept from importing
    modules of the working directory in place of MLflow's; uvicorn searches there unless it is given another folder,
    such as its own. Warnings are not errors.

    Args:
        tracking_uri: The store; None is the one that `MLflowTracker` would use.

    Raises:
        TrackingError: The store is a server, which has its own UI, or cannot be used.
    """
    location = _own_store(tracking_uri)
    settings = {
        "MLFLOW_BACKEND_STORE_URI": location.uri,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "UVICORN_APP_DIR": sysconfig.get_path("purelib"),
        # After the link, only problems are printed.
        "MLFLOW_REGISTRY_STORE_URI": location.uri,
        "UVICORN_LOG_LEVEL": "warning",
    }
    own = own_variables()
    settings["PYTHONWARNINGS"] = ",".join(filter(None, (own.get("PYTHONWARNINGS"), _QUIET)))
    return {**os.environ, **own, **settings}


def _own_store(tracking_uri: str | None) -> Location:
    location = locate(tracking_uri)
    if location.remote:
        raise TrackingError(f"the runs are on a server, which has a UI: open {location.shown}")
    return location


def _check_address(host: str, port: int) -> None:
    """Raise `TrackingError` if a server cannot listen at the address; MLflow says so seconds later, in many lines."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            # As servers do; otherwise a port counts as taken for a minute after its last connection.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        hint = "choose another by --port" if error.errno == errno.EADDRINUSE else "choose another --host or --port"
        raise TrackingError(f"cannot listen at {host}:{port} ({error.strerror}): {hint}") from None


def runs_link(tracking_uri: str | None = None, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> tuple[str, bool]:
    """Prepare MLflow's page of the newest runs, and create the store if it does not exist.

    Args:
        tracking_uri: The store; None is the one that `MLflowTracker` would use.
        host: Address to listen at.
        port: Port to listen at, from 1 to 65535.

    Returns:
        The link to the runs, and whether a server runs already, as the store itself is one.

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
    """Serve the UI until this process is interrupted or terminated.

    Args:
        tracking_uri: The store; None is the one that `MLflowTracker` would use.
        host: Address to listen at.
        port: Port to listen at, from 1 to 65535.
        link: Link to open in a browser, if there is one, as soon as the server answers.

    Returns:
        The server's exit status.

    Raises:
        TrackingError: The store is a server, which has its own UI, or cannot be used; or the port is invalid.
    """
    command = guarded(ui_command(tracking_uri, host, port), ui_environment(tracking_uri))
    with _interrupted_by_signals():
        process = subprocess.Popen(**command, process_group=0)  # only this process handles Ctrl-C
        if link is not None:
            threading.Thread(target=_open_when_served, args=(process, link), daemon=True).start()
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            return 0


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raise `KeyboardInterrupt` if this process is terminated or its terminal is closed."""
    before = {}
    with contextlib.suppress(ValueError):  # not in the main thread
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def open_browser(link: str) -> bool:
    """Open a link in a browser if there is a display; a text browser would block the terminal.

    Args:
        link: The link.

    Returns:
        Whether a browser was opened.
    """
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


def runs_page(store: MLflowStore, base: str) -> str:
    """Return the link to the charts of the newest rl8x run's experiment on a server; save their order as a view."""
    experiments = {str(experiment.experiment_id): experiment for experiment in store.experiments()}
    runs = store.search(list(experiments), "tags.`rl8x.version` != ''", most=10) if experiments else []
    if not runs:
        return f"{base}/#/experiments?{urlencode({'workflowType': 'machine_learning'})}"
    experiment_id = runs[0].info.experiment_id
    query = {"workflowType": "machine_learning", "compareRunsMode": "CHART"}
    runs = [run for run in runs if run.info.experiment_id == experiment_id]
    names = {name for run in runs for name in run.data.metrics}
    state = view(names, _constants(store, runs[:_COMPARED]))
    if _keep_view(store, experiment_id, experiments[experiment_id].tags.get(VIEW_TAG), state):
        query["viewStateShareKey"] = VIEW
    return f"{base}/#/experiments/{experiment_id}/runs?{urlencode(query)}"


def _constants(store: MLflowStore, runs: Sequence[Any]) -> set[str]:
    """Return the metrics with the same value in all rows of all runs, if one of the runs has several rows."""
    values: dict[str, set[float]] = {}
    for run in runs:
        for name, value in run.data.metrics.items():
            values.setdefault(name, set()).add(value)
    several = set()
    for run in runs:
        for name in run.data.metrics.keys() & {name for name, own in values.items() if len(own) == 1}:
            points = store.points(run.info.run_id, name)
            values[name] |= {point.value for point in points}
            several |= {name} if len(points) > 1 else set()
    return {name for name in several if len(values[name]) == 1}


def server_address(location: Location, host: str, port: int) -> str:
    """Return the address of MLflow's page: that of the store if it is a server, else that of `host` and `port`."""
    if location.remote:
        parts = urlsplit(location.uri)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


def _keep_view(store: MLflowStore, experiment_id: str, present: str | None, state: dict[str, Any]) -> bool:
    """Save the view, unless the user has saved another under its name; return whether there is a view."""
    text = f"deflate;{base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()}"
    # MLflow's page writes no `by`, so a view without it is the user's own.
    envelope = json.dumps({"name": VIEW, "createdAt": 0, "updatedAt": 0, "by": VIEW, "state": text})
    if present is not None:
        is_ours = False
        with contextlib.suppress(ValueError, AttributeError):
            is_ours = json.loads(present).get("by") == VIEW
        if present == envelope or not is_ours:
            return True
    try:
        store.set_experiment_tag(experiment_id, VIEW_TAG, envelope)
    except (StoreDownError, StoreRefusedError):  # such as a server with read-only access
        return present is not None
    return True


def view(names: Iterable[str], constants: Collection[str] = ()) -> dict[str, Any]:
    """Return the state of MLflow's page that orders the charts of metrics by importance."""
    names = set(names)
    named = {name for name in names if re.fullmatch(r"eval/.+/(horizon_)?returns/mean", name)}  # evaluations with names
    first = [*_FIRST, *sorted(named)]
    first = [name for name in first if name not in constants] or first
    groups = {_section_of(name) for name in names - set(first)} - {"system"}
    moving = {_section_of(name) for name in names - set(constants) - set(first)}
    folded = {name for name in groups if name.split("/")[0] in _FOLDED or name not in moving}
    sections = sorted(groups, key=lambda name: (name in folded, _rank(name), name.count("/"), name))
    return {
        "selectedColumns": list(_COLUMNS),
        "compareRunCharts": [_line_chart(name) for name in first],
        "compareRunSections": [
            {"uuid": f"rl8x-{name}", "name": name, "display": name not in folded, **_SECTION}
            for name in (_FIRST_SECTION, *sections)
        ],
        "isAccordionReordered": True,
    }


def _rank(section: str) -> int:
    group, order = section.split("/")[0], (*_SHOWN, *_FOLDED)
    return order.index(group if group in order else "")


def _section_of(metric: str) -> str:
    return metric.rpartition("/")[0] or _WITHOUT_GROUP


def _line_chart(metric: str) -> dict[str, Any]:
    """Return a chart with all fields that MLflow's page reads."""
    return {
        "uuid": f"rl8x-{metric}",
        "type": "LINE",
        "metricKey": metric,
        "displayName": metric.removesuffix("/mean"),
        "metricSectionId": f"rl8x-{_FIRST_SECTION}",
        "deleted": False,
        "isGenerated": True,
        "runsCountToCompare": 10,
        "lineSmoothness": 0,
        "xAxisKey": "step",
        "xAxisScaleType": "linear",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "scaleType": "linear",
        "range": {},
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }

"""Settings of MLflow that hold for a whole process: the time-outs of its requests, and what it logs itself."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

_NOISY = ("mlflow.store.db.utils", "mlflow.utils.rest_utils", "urllib3.connectionpool", "mlflow.utils.git_utils")
_quiet_threads: set[int] = set()

_guard = threading.Lock()
_users = 0
_set_here: set[str] = set()


@contextlib.contextmanager
def short_requests(timeout_s: int) -> Iterator[None]:
    """Let MLflow's HTTP calls end after one try of `timeout_s`, in silence, for as long as the context lasts.

    MLflow reads these settings from the environment at each call and offers no argument for them. A setting that the
    user made stays. A call by another thread in the same moment sees ours too; it then fails sooner than it would.
    """
    global _users
    settings = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(timeout_s)}
    settings["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # the URI may have a password in it
    with _guard:
        _users += 1
        _set_here.update(settings.keys() - os.environ.keys())
        os.environ.update({name: value for name, value in settings.items() if name not in os.environ})
    try:
        yield
    finally:
        with _guard:
            _users -= 1
            while not _users and _set_here:
                os.environ.pop(_set_here.pop(), None)


@contextlib.contextmanager
def quiet_thread() -> Iterator[None]:
    """Keep MLflow from logging a traceback for each failure in this thread: rl8x logs one line for each outage."""
    thread = threading.get_ident()
    for name in _NOISY:
        logging.getLogger(name).addFilter(_is_loud)
    _quiet_threads.add(thread)
    try:
        yield
    finally:
        _quiet_threads.discard(thread)


def _is_loud(record: logging.LogRecord) -> bool:
    return record.thread not in _quiet_threads

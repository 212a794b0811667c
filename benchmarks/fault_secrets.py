"""Passwords and tokens in addresses of all kinds, and a search for them through all that a run leaves."""

from __future__ import annotations

import random
import signal
import urllib.parse
from pathlib import Path
from typing import Any

from benchmarks.fault_process import side_by_side
from benchmarks.fault_tools import database_template, scratch
from benchmarks.fault_tries import Timing, Try, UsersError, totals
from benchmarks.servers import free_port

TITLE = "passwords and tokens in addresses of all kinds"
ADDRESSES = (
    "http://user:{}@127.0.0.1:{}",
    "https://user:{}@127.0.0.1:{}/mlflow",
    "http://:{}@127.0.0.1:{}",
    "postgresql://user:{}@127.0.0.1:{}/runs",
    "postgresql+psycopg2://127.0.0.1/runs?user=me&password={}&port={}",
    "mysql+pymysql://user:{}@127.0.0.1:{}/runs",
    "mssql+pyodbc://user:{}@127.0.0.1:{}/runs?driver=x",
)
ODD = ("", "/", "@", ":", "#", "?", "%", " ", "é", "&", "'", "/@:", "p/q@r", "$x")
VARIABLES = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")


def secrets(tries: int, first: int = 0) -> dict[str, Any]:
    """Train where nobody answers at an address with a password in it, sync, resume, and search."""
    with database_template():  # only to have everything imported
        results = side_by_side(tries, _try, first=first, workers=min(2, tries))
    return totals(TITLE, results)


def _try(seed: int) -> dict[str, Any]:
    random.seed(f"secrets {seed}")
    with scratch() as root:
        return _searched(seed, root)


def _searched(seed: int, root: Path) -> dict[str, Any]:
    odd = random.choice(ODD)
    password = f"pw{seed:04}{odd}secret"
    address = random.choice(ADDRESSES)
    # As it has to be written, or, as people do, as it is; where that is another address, it is still no text to tell.
    raw = random.random() < 0.4 and odd not in ("#", "?", " ")
    written = password if raw else urllib.parse.quote(password, safe="")
    uri = address.format(written, free_port())
    how = random.choice(["option", "environment", "variable"])
    env = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"}
    if how == "environment":
        env["MLFLOW_TRACKING_URI"] = uri
    elif how == "variable":
        uri = f"http://127.0.0.1:{free_port()}"
        env |= {"MLFLOW_TRACKING_URI": uri, random.choice(VARIABLES): password, "MLFLOW_TRACKING_USERNAME": "user"}
    searched = [password] if "secret" in password else []
    attempt = Try(root, root / "nowhere.db", env=env, uri=uri if how == "option" else None, secrets=searched)
    timing = Timing.drawn(signals=[None, None, signal.SIGTERM, signal.SIGKILL])
    timing.heals = None
    raises = random.random() < 0.25

    def fail() -> None:
        if raises:
            raise UsersError(f"no answer from {uri}")

    title = f"seed {seed}: {uri!r} by {how}, raises {raises}, {timing}"
    ended = attempt.run(timing, fail, lambda: None)
    attempt.sync()
    attempt.resume()
    attempt.sync(["sync", "mlruns/spool"])
    attempt.command("resume", "nobody")
    if raises:  # a traceback of the user's own error is Python's
        attempt.said = [one for one in attempt.said if one is not ended and "UsersError" not in one.said]
    return attempt.result(title)

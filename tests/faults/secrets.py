"""Passwords and tokens in addresses of all kinds, and a search for them through all that a run leaves."""

import signal
import urllib.parse

from tests.faults.disk import free_port
from tests.faults.tries import Try, UsersError

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


def secrets(attempt: Try) -> int:
    """Train where nobody answers at an address with a password in it, sync and resume; all of it is searched."""
    source = attempt.random
    odd = source.choice(ODD)
    password = f"pw{attempt.seed:04}{odd}secret"
    # As it has to be written, or, as people do, as it is; where that is another address, it is still no text to tell.
    raw = source.random() < 0.4 and odd not in ("#", "?", " ")
    written = password if raw else urllib.parse.quote(password, safe="")
    uri = source.choice(ADDRESSES).format(written, free_port())
    how = source.choice(["option", "environment", "variable"])
    attempt.env = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "1"}
    if how == "option":
        attempt.uri = uri
    elif how == "environment":
        attempt.env["MLFLOW_TRACKING_URI"] = uri
    else:
        uri = f"http://127.0.0.1:{free_port()}"
        attempt.env |= {"MLFLOW_TRACKING_URI": uri, source.choice(VARIABLES): password}
        attempt.env["MLFLOW_TRACKING_USERNAME"] = "user"
    attempt.secrets, raises = [password], source.random() < 0.25
    attempt.title += f": {uri!r} by {how}, raises {raises}"
    timing = attempt.timing(None, None, signal.SIGTERM, signal.SIGKILL, heals=False)

    def fail() -> None:
        if raises:
            raise UsersError(f"no answer from {uri}")

    ended = attempt.train(timing, fail)
    attempt.sync()
    attempt.resume()
    attempt.sync("sync", "mlruns/spool")
    attempt.command("resume", "nobody")
    if raises:  # a traceback of the user's own error is Python's
        attempt.said = [one for one in attempt.said if one is not ended and "UsersError" not in one.said]
    return 1

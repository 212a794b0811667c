"""Faults between a run and MLflow's server: wrong or late answers, servers that are killed; passwords in addresses."""

import contextlib
import mmap
import os
import random
import re
import signal
import socket
import struct
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.faults.tries import ROWS, Try, UsersError
from tests.forks import forked
from tests.ports import free_port

KINDS = ("reset", "reset after", "status", "status after", "truncated", "empty", "wrong", "slow", "slow after")
KINDS += ("half open",)
STATUSES = (400, 401, 403, 404, 413, 429, 500, 502, 503)
# What a call is for, by its path.
CALLS = ("", "", "runs/log-batch", "runs/create|experiments/create", "/get|/search|get-by-name|get-history")
CALLS += ("runs/update", "mlflow-artifacts|artifacts")
HTML = b"<html><head><title>Error</title></head><body><center><h1>Error</h1></center><hr>nginx</body></html>"
JSONS = (b'{"detail": "Not Found"}', b'{"error": {"code": 42}}', b'{"error_code": "BAD", "message": null}', b"[1, 2]")
JSONS += (b"null", b'"quite"', b'{"message": "limit reached"}')
SLOW_S = 2.5  # longer than the runs' time-out
RUNS, RESTARTS = 8, 5  # of a server in a try
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

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def broken_http(attempt: Try) -> int:
    """Train while HTTP is broken, sync while it is, mend it, sync and go on."""
    source = attempt.random
    fault = Fault(source)
    attempt.title += f": {fault.told}"
    timing = attempt.timing(None, None, None, signal.SIGTERM, signal.SIGKILL)
    timing.fault = source.choice([0, timing.fault])
    # The address with its password comes on the command line or by the environment, or the token does.
    password, token = f"pw{attempt.seed:04}secret", f"token{attempt.seed:04}secret"
    how = source.choice(["option", "environment", "token"])
    attempt.secrets = [password, token]
    with contextlib.closing(Server(attempt.database, attempt.root / "server", fault.meets)) as server:
        address = server.uri if how == "token" else server.uri.replace("//", f"//user:{password}@")
        attempt.env = {"MLFLOW_TRACKING_TOKEN": token} if how == "token" else {}
        attempt.uri = address if how == "option" else None
        if how != "option":
            attempt.env["MLFLOW_TRACKING_URI"] = address
        ended = attempt.train(timing, lambda: fault.set(True), lambda: fault.set(False))
        words = attempt.check_words(ended)
        attempt.check_exit(ended, timing)
        attempt.env["MLFLOW_TRACKING_URI"] = address  # without its password no store can be reached
        if source.random() < 0.3:
            fault.set(True)
            attempt.env |= {"MLFLOW_HTTP_REQUEST_TIMEOUT": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
            attempt.sync()
            del attempt.env["MLFLOW_HTTP_REQUEST_TIMEOUT"]
        fault.set(False)
        attempt.sync(*(words.command or ["sync"]))
        attempt.sync_all()
        attempt.check_end("FINISHED" if ended.finished else "KILLED", lost=words.lost)
        if not ended.finished and attempt.has_checkpoints():
            attempt.check_resumed(lost=words.lost)
    return 1


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


def restarts(attempt: Try) -> int:
    """SIGKILL a server at random instants of several runs and start it again."""
    enough, runs = attempt.root / "enough", []
    with contextlib.closing(Server(attempt.database, attempt.root / "server")) as server:
        for number in range(RUNS):
            each = Try(attempt.root / f"run-{number}", "restarts", RUNS * attempt.seed + number, attempt.template)
            each.database, each.experiment = attempt.database, f"run {number}"
            each.env, each.title = {"MLFLOW_TRACKING_URI": server.uri}, f"{attempt.title}, run {number}"

            def at_row(row: int, pause: float = each.random.uniform(0.0, 0.4)) -> None:
                time.sleep(pause)
                while row >= ROWS - 1 and not enough.exists():
                    time.sleep(0.02)

            runs.append((each, each.begin(at_row)))
        for _ in range(RESTARTS):
            time.sleep(attempt.random.uniform(0.2, 2.0))
            server.kill()
            time.sleep(attempt.random.uniform(0.0, 1.5))
            server.start()
        enough.touch()
        for each, run in runs:
            each.said.append(ended := run.ended())
            each.check_words(ended)
            each.check_exit(ended)
            each.sync_all()
            each.check_end("FINISHED")
            each.finish()
            attempt.wrong.update(each.wrong)
            attempt.why += each.why
    return RESTARTS


class Fault:
    """What is wrong, while it is set, with some of the answers: drawn at random."""

    def __init__(self, source: random.Random) -> None:
        self.kind, self.calls, self.chance = source.choice(KINDS), source.choice(CALLS), source.choice([1.0, 1.0, 0.5])
        self.status, self.body = source.choice(STATUSES), source.choice([HTML, *JSONS])
        self.source, self.guard = random.Random(source.random()), threading.Lock()
        self._flag = mmap.mmap(-1, 1)
        self.told = f"{self.kind} {self.status} {self.body[:24]!r} for calls {self.calls!r}, chance {self.chance}"

    def set(self, active: bool) -> None:
        self._flag[0] = active

    def meets(self, application: Application) -> Application:
        """Return a server's application with the fault."""
        from werkzeug.wrappers import Request, Response

        def call(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            with self.guard:
                chosen = self._flag[0] and self.source.random() < self.chance
            if not chosen or not re.search(self.calls, environ["PATH_INFO"]):
                return application(environ, start)
            kind, body, connection = self.kind, self.body, environ["werkzeug.socket"]
            if kind.endswith("after") or kind == "truncated":
                answer = Response.from_app(application, environ, buffered=True)
            else:
                Request(environ).get_data()
            if "slow" in kind or kind == "half open":
                time.sleep(SLOW_S * (4 if kind == "half open" else 1))
            if "reset" in kind or kind == "half open":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
                raise ConnectionError
            if "status" in kind:
                return Response(body, self.status, mimetype="text/html" if body == HTML else "application/json")(
                    environ, start
                )
            if kind == "slow":
                return application(environ, start)
            bodies = {"empty": b"", "wrong": JSONS[0] if body == HTML else body}
            if kind == "truncated":
                bodies[kind] = answer.data[: max(1, len(answer.data) // 2)]
            made = answer if kind == "slow after" else Response(bodies[kind], 200, mimetype="application/json")
            return made(environ, start)

        return call


class Server:
    """MLflow's server of a database, in a process of its own that can be killed and started again.

    It is forked after MLflow's imports, which take its own command half a minute on a busy machine.
    """

    def __init__(
        self, database: Path, folder: Path, within: Callable[[Application], Application] = lambda app: app
    ) -> None:
        self.database, self.folder, self.port, self.within = database, folder, free_port(), within
        self.uri = f"http://127.0.0.1:{self.port}"
        folder.mkdir()
        self.start()

    def start(self) -> None:
        from mlflow.server import app
        from werkzeug.serving import make_server

        def serve() -> None:
            os.environ |= {
                "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{self.database}",
                "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
                "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
                "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(self.folder / "artifacts"),
            }
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            make_server("127.0.0.1", self.port, self.within(app), threaded=True).serve_forever()

        self._pid = forked(serve)
        for _ in range(3000):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=1):
                return
            time.sleep(0.02)
        raise RuntimeError(f"the server does not answer: {(self.folder / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    close = kill

"""Faults between a run and MLflow's server: a proxy that answers wrongly, and servers that are killed and restarted."""

import contextlib
import dataclasses
import http.client
import mmap
import os
import random
import re
import signal
import socket
import socketserver
import struct
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.faults.disk import free_port
from tests.faults.tries import ROWS, Try
from tests.forks import forked

FAULTS = (
    "reset before",
    "reset after",
    "status",
    "status after",
    "truncated",
    "empty",
    "wrong json",
    "slow",
    "slow after",
    "half open",
)
STATUSES = (400, 401, 403, 404, 413, 429, 500, 502, 503)
# What a call is for, by its path; the first is every call.
CALLS = {
    "all": "",
    "log-batch": r"runs/log-batch",
    "create": r"runs/create|experiments/create",
    "get": r"/get|/search|get-by-name|get-history",
    "update": r"runs/update",
    "artifacts": r"mlflow-artifacts|artifacts",
}
HTML = b"<html><head><title>Error</title></head><body><center><h1>Error</h1></center><hr>nginx</body></html>"
JSONS = (
    b'{"detail": "Not Found"}',
    b'{"error": {"code": 42}}',
    b'{"error_code": "BAD", "message": null}',
    b"[1, 2]",
    b"null",
    b'"quite"',
    b'{"message": "limit reached"}',
)
SLOW_S = 2.5  # longer than the runs' time-out
RUNS, RESTARTS = 8, 5  # of a server in a try


def broken_http(attempt: Try) -> int:
    """Train while HTTP is broken, sync while it is, mend it, sync and go on."""
    source = attempt.random
    fault = Fault.drawn(source)
    attempt.title += f": {fault}"
    timing = attempt.timing(None, None, None, signal.SIGTERM, signal.SIGKILL)
    timing.fault = source.choice([0, timing.fault])
    # The address with its password comes on the command line or by the environment, or the token does.
    password, token = f"pw{attempt.seed:04}secret", f"token{attempt.seed:04}secret"
    how = source.choice(["option", "environment", "token"])
    attempt.secrets = [password, token]
    with Server(attempt.database, attempt.root / "server") as server, Proxy(server.port, fault) as proxy:
        address = f"http://{'' if how == 'token' else f'user:{password}@'}127.0.0.1:{proxy.port}"
        attempt.env = {"MLFLOW_TRACKING_TOKEN": token} if how == "token" else {}
        attempt.uri = address if how == "option" else None
        if how != "option":
            attempt.env["MLFLOW_TRACKING_URI"] = address
        ended = attempt.train(timing, proxy.break_it, proxy.mend)
        words = attempt.check_words(ended)
        attempt.check_exit(ended, timing)
        attempt.env["MLFLOW_TRACKING_URI"] = address  # without its password no store can be reached
        if source.random() < 0.3:
            proxy.break_it()
            attempt.env |= {"MLFLOW_HTTP_REQUEST_TIMEOUT": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
            attempt.sync()
            del attempt.env["MLFLOW_HTTP_REQUEST_TIMEOUT"]
        proxy.mend()
        attempt.sync(*(words.command or ["sync"]))
        attempt.sync()
        attempt.check_end("FINISHED" if ended.finished else "KILLED", lost=words.lost)
        if not ended.finished and attempt.has_checkpoints():
            attempt.check_resumed(lost=words.lost)
    return 1


def restarts(attempt: Try) -> int:
    """SIGKILL a server at random instants of several runs and start it again."""
    enough, runs = attempt.root / "enough", []
    with Server(attempt.database, attempt.root / "server") as server:
        for number in range(RUNS):
            each = Try(attempt.root / f"run-{number}", "restarts", RUNS * attempt.seed + number, attempt.template)
            each.database, each.experiment = attempt.database, f"run {number}"
            each.env = {"MLFLOW_TRACKING_URI": server.uri}
            each.title = f"{attempt.title}, run {number}"

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
            each.sync()
            each.check_end("FINISHED")
            each.finish()
            attempt.wrong.update(each.wrong)
            attempt.why += each.why
    return RESTARTS


class Server:
    """MLflow's server of a database, in a process of its own that can be killed and started again.

    It is forked after MLflow's imports, which take its own command half a minute on a busy machine.
    """

    def __init__(self, database: Path, folder: Path) -> None:
        self.database, self.folder, self.port = database, folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        folder.mkdir()
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
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
            make_server("127.0.0.1", self.port, app, threaded=True).serve_forever()

        self._pid = forked(serve)
        for _ in range(3000):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=1):
                return
            time.sleep(0.02)
        raise RuntimeError(f"the server does not answer: {(self.folder / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """Send it SIGKILL."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def __enter__(self) -> "Server":
        """Return it."""
        return self

    def __exit__(self, *args: object) -> None:
        """End its process."""
        self.kill()


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is wrong with answers: one of `FAULTS`, in so many of the calls of `CALLS`; and what it answers."""

    kind: str
    calls: str
    chance: float
    status: int
    body: bytes

    @classmethod
    def drawn(cls, source: random.Random) -> "Fault":
        """Draw one."""
        calls, chance = source.choice(["all", *CALLS]), source.choice([1.0, 1.0, 0.5])
        body = source.choice([HTML, *JSONS])
        return cls(source.choice(FAULTS), calls, chance, source.choice(STATUSES), body)

    def __str__(self) -> str:
        """Write it in a few words."""
        status = f" {self.status} {self.body[:24]!r}" if self.kind.startswith("status") else ""
        return f"{self.kind}{status} for {self.calls}, chance {self.chance}"


class Proxy:
    """A proxy to a port in a process of its own, with a fault while it is broken; what is said of that holds in all."""

    def __init__(self, port: int, fault: Fault) -> None:
        self._flag = mmap.mmap(-1, 1)
        listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(listening.getsockname()[1])

        def serve() -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            server = _Server(("127.0.0.1", 0), _handler(port, fault, self._flag), bind_and_activate=False)
            server.socket.close()
            server.socket = listening
            server.serve_forever(poll_interval=0.5)

        self._pid = forked(serve)
        listening.close()

    def break_it(self) -> None:
        """Have the fault from here on."""
        self._flag[0] = 1

    def mend(self) -> None:
        """Be a proxy like any other."""
        self._flag[0] = 0

    def __enter__(self) -> "Proxy":
        """Return it."""
        return self

    def __exit__(self, *args: object) -> None:
        """End its process."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that break: they are to."""


def _handler(port: int, fault: Fault, flag: mmap.mmap) -> type[BaseHTTPRequestHandler]:
    source, guard = random.Random(port), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_call(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                body = b"".join(iter(self._chunk, b""))
            with guard:
                meets = flag[0] and source.random() < fault.chance and re.search(CALLS[fault.calls], self.path)
            if not meets:
                self._answer(*_asked(port, self, body))
            else:
                self._break(body)

        def _chunk(self) -> bytes:
            size = int(self.rfile.readline().split(b";")[0], 16)
            data = self.rfile.read(size)
            self.rfile.readline()
            return data

        def _break(self, body: bytes) -> None:
            kind, is_json = fault.kind, "application/json"
            answer = _asked(port, self, body) if kind.endswith("after") or kind == "truncated" else (0, "", b"")
            if "slow" in kind or kind == "half open":
                time.sleep(SLOW_S * (4 if kind == "half open" else 1))
            if kind.startswith("reset") or kind == "half open":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True
            elif kind.startswith("status"):
                self._answer(fault.status, "text/html" if fault.body == HTML else is_json, fault.body)
            elif kind == "truncated":
                self._answer(200, is_json, answer[2][: max(1, len(answer[2]) // 2)])
            elif kind in ("empty", "wrong json"):
                wrong = fault.body if fault.body != HTML else JSONS[0]
                self._answer(200, is_json, b"" if kind == "empty" else wrong)
            else:
                self._answer(*(answer if kind == "slow after" else _asked(port, self, body)))

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response_only(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_one_call

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    return Handler


def _asked(port: int, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str, bytes]:
    """Pass a call on to the server; returns status, type and body of its answer."""
    left_out = ("host", "connection", "transfer-encoding", "content-length")
    headers = {name: value for name, value in handler.headers.items() if name.lower() not in left_out}
    headers["Content-Length"] = str(len(body))
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(handler.command, handler.path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read()

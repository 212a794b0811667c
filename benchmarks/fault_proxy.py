"""A proxy in front of MLflow's server that for a while sends wrong answers, cuts connections, delays or times out."""

from __future__ import annotations

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
from http.server import BaseHTTPRequestHandler
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is wrong with answers.

    Attributes:
        kind: One of `FAULTS`.
        calls: A name of `CALLS`: which calls it meets.
        chance: How many of them.
        status: The status of an answer, where it has one of its own.
        body: Its body.
    """

    kind: str
    calls: str
    chance: float
    status: int
    body: bytes

    @classmethod
    def drawn(cls) -> Fault:
        """Draw one."""
        calls = random.choice(["all", *CALLS])
        return cls(
            kind=random.choice(FAULTS),
            calls=calls,
            chance=random.choice([1.0, 1.0, 0.5]),
            status=random.choice(STATUSES),
            body=random.choice([HTML, *JSONS]),
        )

    def __str__(self) -> str:
        """Write it in a few words."""
        status = f" {self.status} {self.body[:24]!r}" if self.kind.startswith("status") else ""
        return f"{self.kind}{status} for {self.calls}, chance {self.chance}"


class Proxy:
    """The proxy, in a process of its own; what `active` says holds in all processes.

    Args:
        port: Where the server listens.
        fault: What is wrong while it is active.
    """

    def __init__(self, port: int, fault: Fault) -> None:
        self._flag = mmap.mmap(-1, 1)
        listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(listening.getsockname()[1])
        self._pid = os.fork()
        if not self._pid:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _serve(listening, port, fault, self._flag)
            finally:
                os._exit(1)
        listening.close()

    def break_it(self) -> None:
        """Have the fault from here on."""
        self._flag[0] = 1

    def mend(self) -> None:
        """Be a proxy like any other."""
        self._flag[0] = 0

    def close(self) -> None:
        """End its process."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that break: they are to."""


def _serve(listening: socket.socket, port: int, fault: Fault, flag: mmap.mmap) -> None:
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
            kind = fault.kind
            answer = _asked(port, self, body) if kind in ("reset after", "status after", "truncated") else None
            if kind.startswith("reset"):
                self._reset()
            elif kind.startswith("status"):
                self._answer(fault.status, _type(fault.body), fault.body)
            elif kind == "truncated":
                assert answer is not None
                self._answer(200, "application/json", answer[2][: max(1, len(answer[2]) // 2)])
            elif kind == "empty":
                self._answer(200, "application/json", b"")
            elif kind == "wrong json":
                self._answer(200, "application/json", fault.body if fault.body != HTML else JSONS[0])
            elif kind == "half open":
                time.sleep(SLOW_S * 4)
                self._reset()
            else:
                if kind == "slow after":
                    answer = _asked(port, self, body)
                time.sleep(SLOW_S)
                self._answer(*(answer or _asked(port, self, body)))

        def _reset(self) -> None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response_only(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_one_call  # noqa: N815

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = _Server(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.serve_forever(poll_interval=0.5)


def _asked(port: int, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str, bytes]:
    """Pass a call on to the server; returns status, type and body of its answer."""
    headers = {name: value for name, value in handler.headers.items() if name.lower() not in ("host", "connection")}
    headers = {name: value for name, value in headers.items() if name.lower() != "transfer-encoding"}
    headers["Content-Length"] = str(len(body))
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(handler.command, handler.path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read()


def _type(body: bytes) -> str:
    return "text/html" if body == HTML else "application/json"

"""MLflow in a process of its own, one for all trackers of this process.

Importing MLflow takes seconds, and a request milliseconds, during which Python runs nothing else in the same process:
they would be taken from the training. So a writer's thread only hands over each call of a store and waits for the
answer. The other process (`rl8x.tracking.store_server`) ends when the last tracker does, or this process.

An answer that nobody waits for any more is dropped. A process that sends no beat was stopped, or hangs, which is
noticed long before a request could count as too slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from rl8x.processes import python_process
from rl8x.tracking.location import Location
from rl8x.tracking.store import MLflowStore, most_points
from rl8x.tracking.store_errors import StoreDownError
from rl8x.tracking.store_server import END_S, encode, result_of

SILENT_S = 5  # without a beat: a store that is down
_CODE = "from rl8x.tracking.store_server import main; main"
KILL_S = 60  # without a beat: killed, so that the next call starts another
_CALLS = frozenset(name for name in vars(MLflowStore) if not name.startswith("_")) | {"source_tags"}


class StoreProcess:
    """Has the calls of `MLflowStore`, made by the process that all trackers share, which the first call starts.

    A process that has ended, cannot be started or is silent is a store that is down: a later call starts another.
    """

    def __init__(self, location: Location, *, request_timeout_s: int = 10) -> None:
        self._opening = (location, request_timeout_s)
        self._process: _Process | None = None
        self._channel = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Make a call of `MLflowStore`, whichever it is."""
        if name not in _CALLS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(self._ask, name)

    @property
    def most_points(self) -> int:
        """How many points `log_points` takes in one call."""
        return most_points(self._opening[0])

    def _ask(self, name: str, *args: Any) -> Any:
        global _shared
        if self._process is None or self._process.gone:
            with _guard:
                if _shared is None or _shared.gone:
                    try:
                        _shared = _Process(self._opening[0].database)
                    except (OSError, RuntimeError) as error:
                        raise StoreDownError(f"the process that talks to MLflow cannot be started: {error}") from error
                self._process = _shared
                self._channel = _shared.open(*self._opening)
        return self._process.ask(self._channel, name, args)

    def close(self) -> None:
        """End this channel, and the process where it was the last."""
        global _shared
        process, self._process = self._process, None
        if process is None:
            return
        with _guard:
            process.channels.discard(self._channel)
            is_last = not process.channels and not _keeps
            if is_last and _shared is process:
                _shared = None
        if is_last:
            process.end()
        else:
            with contextlib.suppress(StoreDownError):
                process.ask(self._channel, "close", (), END_S)


def start_early(database: Path | None) -> None:
    """Start the process before a run needs it, so that MLflow is imported while this process imports torch.

    Nothing on the disk is touched. `database` is as for `_Process`; where it is not there, its tables are made in
    memory. A process that cannot be started now may be when it is needed, or the error is told then.
    """
    global _shared
    with _guard:
        if _shared is None:
            with contextlib.suppress(OSError, RuntimeError):
                _shared = _Process(database)


def keep_process() -> None:
    """Keep the process until this one ends: runs that follow each other then wait for one import of MLflow only."""
    global _keeps
    _keeps = True


def end_unused() -> None:
    """End the process where it was started early and nothing needs it."""
    global _shared
    with _guard:
        process = _shared
        if process is None or process.channels:
            return
        _shared = None
    process.popen.kill()  # at once: it has nothing open, and would first end an import
    process.end()


class _Process:
    """The process, and the two threads that write requests to it and hand its answers out.

    `database` is what the first run will most likely be kept in; None where that is not known, or a server.
    """

    def __init__(self, database: Path | None = None) -> None:
        self.gone = False
        self.popen = _start(database)
        self._stdin, self._stdout = cast("IO[bytes]", self.popen.stdin), cast("IO[bytes]", self.popen.stdout)
        self.channels: set[int] = set()
        self._numbers = itertools.count(1)
        self._guard = threading.Lock()
        self._trouble = ""
        self._waiting: dict[int, queue.SimpleQueue[list[Any] | StoreDownError]] = {}
        # Writing to a stopped process blocks, which a thread may, but a caller must not.
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for work in (self._send, self._receive):
            threading.Thread(target=work, name="rl8x-store", daemon=True).start()

    def open(self, location: Location, request_timeout_s: int) -> int:
        """Open a channel. The address of the store, with any password in it, goes through the pipe."""
        channel = next(self._numbers)
        self.channels.add(channel)
        # MLflow takes the run's source from the arguments, and credentials from the environment, as they are now.
        opening = (dataclasses.astuple(location), request_timeout_s, sys.argv, dict(os.environ))
        self._requests.put(encode((channel, 0, "open", opening)))
        return channel

    def ask(self, channel: int, name: str, args: tuple[Any, ...], timeout_s: float | None = None) -> Any:
        """Make a call and return its answer, or raise it; `StoreDownError` also where the process is gone or silent."""
        number = next(self._numbers)
        request = encode((channel, number, name, args))
        with self._guard:
            if self._trouble:
                raise StoreDownError(self._trouble)
            box = self._waiting[number] = queue.SimpleQueue()
        self._requests.put(request)
        try:
            answer = box.get(timeout=timeout_s)  # without a time-out: `_receive` answers in the end
        except queue.Empty:
            raise StoreDownError("no answer in time") from None
        finally:
            self._waiting.pop(number, None)
        if isinstance(answer, StoreDownError):
            raise answer
        return result_of(name, *answer)

    def end(self) -> None:
        """End the process: by closing its requests, or by a kill where it does not read them."""
        if self._trouble:
            self.popen.kill()
        self._requests.put(None)
        try:
            self.popen.wait(END_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()

    def leave_to_parent(self) -> None:
        """Close this process's copies of the pipes, in a child that was forked from the process that owns them."""
        self.gone = True
        self._stdin.close()
        self._stdout.close()
        self.popen.returncode = 0  # not this process's to wait for

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # it is gone, as `_receive` finds out too
            while (request := self._requests.get()) is not None:
                rest = memoryview(request)
                while rest:
                    rest = rest[self._stdin.write(rest) :]
        with contextlib.suppress(OSError):
            self._stdin.close()

    def _receive(self) -> None:
        poll = select.poll()
        poll.register(self._stdout, select.POLLIN)
        parts: list[bytes] = []  # of an answer that has not come whole
        # Counted in waits without a beat, not by the clock, which also runs while this process is stopped.
        silent_s = 0
        while True:
            if not poll.poll(1000):
                if silent_s >= SILENT_S - 1 and self._is_busy():
                    continue
                silent_s += 1
                if silent_s == SILENT_S:
                    pid = self.popen.pid
                    self._fail(f"the process that talks to MLflow (process ID {pid}) does not answer: is it stopped?")
                elif silent_s == KILL_S:
                    self.popen.kill()
                continue
            more = os.read(self._stdout.fileno(), 1 << 16)
            if not more:
                break
            silent_s, self._trouble = 0, ""
            whole, newline, rest = more.rpartition(b"\n")
            if newline:
                self._hand_out(b"".join((*parts, whole)))
                parts = []
            parts.append(rest)
        status = self.popen.wait()
        self._fail(f"the process that talks to MLflow is gone (exit status {status})")
        self.gone = True
        self._requests.put(None)
        self._stdout.close()

    def _is_busy(self) -> bool:
        """Return whether the process would run if it could, or reads a disk: its low priority may keep it for long."""
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{self.popen.pid}/task").glob("*/stat"):
                if file.read_text().rpartition(")")[2].split()[0] in "RD":
                    return True
        return False

    def _hand_out(self, lines: bytes) -> None:
        """Give each answer, a line, to the call that waits for it; beats are empty lines."""
        for line in filter(None, lines.split(b"\n")):
            number, *answer = json.loads(line)
            box = self._waiting.pop(number, None)
            if box is not None:
                box.put(answer)

    def _fail(self, reason: str) -> None:
        """Answer all calls that wait, and all that come until there is a beat again, with `StoreDownError`."""
        with self._guard:
            self._trouble = reason
            boxes, self._waiting = list(self._waiting.values()), {}
        for box in boxes:
            box.put(StoreDownError(reason))


_guard = threading.Lock()
_shared: _Process | None = None
_keeps = False


def _leave_to_parent() -> None:
    """Close what a forked child has of the process: with its pipes held open, it would outlive the child's parent."""
    global _guard, _shared
    _guard = threading.Lock()
    if _shared is not None:
        _shared.leave_to_parent()
    _shared = None


os.register_at_fork(after_in_child=_leave_to_parent)


def _start(database: Path | None) -> subprocess.Popen[bytes]:
    words = f"{os.getpid()}, {database and str(database)!a}"
    return subprocess.Popen(
        # MLflow writes paths as text: in UTF-8, whatever the locale.
        **python_process("-X", "utf8", "-c", f"{_CODE}({words})"),
        bufsize=0,  # nothing that a fork would copy and write twice
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # A Ctrl-C in the terminal is the training's business. No session of its own: Linux shares processors between
        # sessions first, whatever the niceness inside each.
        process_group=0,
    )

"""MLflow in a process of its own, one for all trackers of this process.

Importing MLflow takes seconds, and a request milliseconds, during which Python runs nothing else in the same process:
they would be taken from the training. So a writer's thread only hands over each call of a `Store`, and waits for the
answer; what is at the other end does nothing but that, and ends when the last tracker does, or this process.

Each tracker is a channel, with a thread of its own at the other end, so that a slow server holds up no other run. An
answer has the number of its request; one that nobody waits for any more is dropped. The other end also sends a beat
every second: one that was stopped, or hangs, is noticed as silent, long before a request could count as too slow.
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
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rl8x.tracking.database import merge_log
from rl8x.tracking.location import Location
from rl8x.tracking.secrets import hide
from rl8x.tracking.store import (
    MLflowStore,
    Point,
    RunGoneError,
    RunMissingError,
    RunName,
    RunSpec,
    RunStatus,
    Store,
    StoreDownError,
    StoreRefusedError,
    quiet_thread,
    source_tags,
)

SILENT_S = 5  # without a beat: a store that is down
KILL_S = 60  # without a beat: killed, so that the next call starts another
_END_S = 1.0  # how long to wait for a process, or a channel, that was told to end
# Where there are no more processors than training uses, it gets a tenth of one and the training the rest.
_NICENESS = 10
_BEAT = b"\n"
_CALLS = frozenset(name for name in vars(Store) if not name.startswith("_")) | {"source_tags"}

if TYPE_CHECKING:
    _Calls = MLflowStore  # what answers at the other end: the same calls, of the same types
else:
    _Calls = object


class StoreProcess(_Calls):
    """A `Store` whose calls are made by the process that all trackers share, which the first call starts.

    A process that has ended, cannot be started or is silent is a store that is down: a later call starts another.

    Args:
        location: As for `MLflowStore`.
        request_timeout_s: As for `MLflowStore`.
    """

    def __init__(self, location: Location, *, request_timeout_s: int = 10) -> None:
        self._opening = (location, request_timeout_s)
        self._process: _Process | None = None
        self._channel = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Make a call of `Store`, whichever it is."""
        if name not in _CALLS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(self._ask, name)

    if TYPE_CHECKING:

        def source_tags(self) -> dict[str, str]:
            """Return the tags that say where the run comes from; the store need not be there."""

    def _ask(self, name: str, *args: Any) -> Any:
        global _shared
        if self._process is None or self._process.gone:
            with _guard:
                if _shared is None or _shared.gone:
                    try:
                        _shared = _Process()
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
            is_last = not process.channels
            if is_last and _shared is process:
                _shared = None
        if is_last:
            process.end()
        else:
            with contextlib.suppress(StoreDownError):
                process.ask(self._channel, "close", (), _END_S)


class _Process:
    """The process, and the two threads that write requests to it and hand its answers out."""

    def __init__(self) -> None:
        self.gone = False
        self.popen = _start()
        self.channels: set[int] = set()
        self._numbers = itertools.count(1)
        self._guard = threading.Lock()
        self._trouble = ""
        self._waiting: dict[int, queue.SimpleQueue[list[Any] | StoreDownError]] = {}
        # A write blocks where the process is stopped: a thread of its own may wait for that, a caller may not.
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for work in (self._send, self._receive):
            threading.Thread(target=work, name="rl8x-store", daemon=True).start()

    def open(self, location: Location, request_timeout_s: int) -> int:
        """Open a channel. Where the store is, and any password in it, goes through the pipe."""
        channel = next(self._numbers)
        self.channels.add(channel)
        # MLflow takes the run's source from the arguments, and credentials from the environment, as they are now.
        opening = (dataclasses.asdict(location), request_timeout_s, sys.argv, dict(os.environ))
        self._requests.put(_line((channel, 0, "open", opening)))
        return channel

    def ask(self, channel: int, name: str, args: tuple[Any, ...], timeout_s: float | None = None) -> Any:
        """Make a call and wait for its answer.

        Raises:
            StoreDownError: The process is gone or silent, or the store is down.
            StoreRefusedError: As the store says.
        """
        number = next(self._numbers)
        request = _line((channel, number, name, args))
        box: queue.SimpleQueue[list[Any] | StoreDownError] = queue.SimpleQueue()
        with self._guard:
            if self._trouble:
                raise StoreDownError(self._trouble)
            self._waiting[number] = box
        self._requests.put(request)
        try:
            answer = box.get(timeout=timeout_s)  # without a time-out: `_receive` answers in the end
        except queue.Empty:
            raise StoreDownError("no answer in time") from None
        finally:
            self._waiting.pop(number, None)
        if isinstance(answer, StoreDownError):
            raise answer
        error, value = answer
        if error is not None:
            raise _ERRORS[error](value)
        return _RESULTS[name](*value) if name in _RESULTS else value

    def end(self) -> None:
        """End the process: by a word, unless it does not listen."""
        if self._trouble:
            self.popen.kill()
        self._requests.put(None)
        try:
            self.popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()

    def forget(self) -> None:
        """Leave the process to the one that started it, in a child that was forked from that one."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.gone = True
        self.popen.stdin.close()
        self.popen.stdout.close()
        self.popen.returncode = 0  # not this process's to wait for

    def _send(self) -> None:
        stdin = self.popen.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # it is gone, as `_receive` finds out too
            while (request := self._requests.get()) is not None:
                rest = memoryview(request)
                while rest:
                    rest = rest[stdin.write(rest) :]
        with contextlib.suppress(OSError):
            stdin.close()

    def _receive(self) -> None:
        stdout = self.popen.stdout
        assert stdout is not None
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        data = b""
        # Counted in waits that ended without a beat: the clock also runs where this process itself was stopped.
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
            more = os.read(stdout.fileno(), 1 << 16)
            if not more:
                break
            silent_s, self._trouble = 0, ""
            data = self._hand_out(data + more)
        status = self.popen.wait()
        self._fail(f"the process that talks to MLflow is gone (exit status {status})")
        self.gone = True
        self._requests.put(None)
        stdout.close()

    def _is_busy(self) -> bool:
        """Say whether the process would run if it could, or reads a disk: its low priority may keep it for long."""
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{self.popen.pid}/task").glob("*/stat"):
                if file.read_text().rpartition(")")[2].split()[0] in "RD":
                    return True
        return False

    def _hand_out(self, data: bytes) -> bytes:
        """Give each whole answer to the one who waits for it; returns what is left."""
        *lines, rest = data.split(b"\n")
        for line in filter(None, lines):
            number, *answer = json.loads(line)
            box = self._waiting.pop(number, None)
            if box is not None:
                box.put(answer)
        return rest

    def _fail(self, reason: str) -> None:
        """Answer everyone who waits, and all who ask until there is a beat again."""
        with self._guard:
            self._trouble = reason
            boxes, self._waiting = list(self._waiting.values()), {}
        for box in boxes:
            box.put(StoreDownError(reason))


_guard = threading.Lock()
_shared: _Process | None = None


def _forget() -> None:
    """Give up what a forked child has of the process: with its ends held open, it would outlive its parent."""
    global _guard, _shared
    _guard = threading.Lock()
    if _shared is not None:
        _shared.forget()
    _shared = None


os.register_at_fork(after_in_child=_forget)


def _start() -> subprocess.Popen[bytes]:
    # It finds the same packages, and nothing of the working directory that this process would not have found.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-c", f"from rl8x.tracking.store_process import main; main({os.getpid()})"],
        bufsize=0,  # nothing that a fork would copy and write twice
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        # A Ctrl-C in the terminal is the training's business. No session of its own: Linux shares processors between
        # sessions first, whatever the niceness inside each.
        process_group=0,
    )


# What goes through the pipes: a line of JSON for each request and each answer.

_ERRORS = {error.__name__: error for error in (StoreDownError, StoreRefusedError, RunGoneError, RunMissingError)}
_RESULTS: dict[str, Callable[..., Any]] = {"run_name": RunName, "status": RunStatus}


def _line(message: Any) -> bytes:
    return json.dumps(message, default=os.fspath).encode() + b"\n"


def _typed(name: str, args: list[Any]) -> list[Any]:
    """Return the arguments of a call as they were before JSON made plain lists and texts of them."""
    match name:
        case "find_runs" | "create_run":
            return [RunSpec(*args[0])]
        case "log_points":
            return [args[0], [Point(*point) for point in args[1]]]
        case "log_artifact":
            return [args[0], Path(args[1]), args[2]]
    return args


def _location(data: dict[str, Any]) -> Location:
    paths = {name: None if data[name] is None else Path(data[name]) for name in ("database", "artifact_root")}
    return Location(**{**data, **paths})


# The other end.

_Answer = Callable[[int, Any], None]
_importing = threading.Lock()  # modules that import each other are seen half made by a second thread


def serve(requests: IO[bytes], answer: _Answer, connect: Callable[..., Store] = MLflowStore) -> None:
    """Answer calls until they end.

    Args:
        requests: A line for each: channel, number, name and arguments; "open" makes a channel.
        answer: Takes a request's number and a value or exception; any thread calls it.
        connect: Makes the store of a channel, at the first call that needs it.
    """
    channels: dict[int, queue.SimpleQueue[tuple[int, str, list[Any]]]] = {}
    threads: list[threading.Thread] = []
    environment: Mapping[str, str] | None = None
    for line in requests:
        if not line.endswith(b"\n"):  # cut, as the one who asks was killed
            break
        channel, number, name, args = json.loads(line)
        if name != "open":
            channels[channel].put((number, name, args))
            continue
        data, timeout_s, sys.argv, wanted = args
        location = _location(data)
        _adopt(wanted, wanted if environment is None else environment)
        environment = wanted
        channels[channel] = queue.SimpleQueue()
        make = functools.partial(connect, location, request_timeout_s=timeout_s)
        work = (channels[channel], answer, location, make)
        threads.append(threading.Thread(target=_serve_channel, args=work, daemon=True))
        threads[-1].start()
    for inbox in channels.values():
        inbox.put((0, "close", []))
    end = time.monotonic() + _END_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _adopt(wanted: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Change the environment as the other process has changed its own since another channel was opened."""
    for name in before.keys() - wanted.keys():
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in wanted.items() if before.get(name) != value})


def _serve_channel(
    inbox: queue.SimpleQueue[tuple[int, str, list[Any]]],
    answer: _Answer,
    location: Location,
    connect: Callable[[], Store],
) -> None:
    store: Store | None = None
    with quiet_thread():
        while True:
            number, name, args = inbox.get()
            try:
                if name == "close":
                    if store is not None and location.database is not None:
                        merge_log(location.database)  # which the end of this process, being sudden, would not do
                    answer(number, None)
                    return
                if name == "source_tags":
                    with _importing:
                        answer(number, source_tags())
                    continue
                if store is None:
                    with _importing, contextlib.suppress(Exception):  # it is raised again where it is needed
                        import mlflow.entities  # noqa: F401
                    store = connect()
                answer(number, getattr(store, name)(*_typed(name, args)))
            except (StoreDownError, StoreRefusedError) as error:
                answer(number, type(error)(hide(str(error))))
            except Exception as error:  # whatever it is, the training process shall hear of it and go on
                answer(number, StoreDownError(hide(f"{type(error).__name__}: {error}")))


def main(parent: int) -> None:
    """Serve on the standard streams; what MLflow prints goes nowhere.

    Args:
        parent: The process that asks. This one ends with it, also where its pipes stay open in other hands.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    guard = threading.Lock()

    def write(line: bytes) -> None:
        with guard:
            answers.write(line)
            answers.flush()

    def answer(number: int, value: Any) -> None:
        failed = isinstance(value, Exception)
        write(_line((number, type(value).__name__, str(value)) if failed else (number, None, value)))

    def beat() -> None:
        while os.getppid() == parent:
            write(_BEAT)
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=beat, daemon=True).start()
    os.nice(_NICENESS)
    serve(sys.stdin.buffer, answer)
    os._exit(0)  # at once: MLflow's own threads are not waited for

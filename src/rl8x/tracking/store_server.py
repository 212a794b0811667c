"""The process that talks to MLflow: it answers the calls that `rl8x.tracking.store_process` sends through a pipe.

Each channel (the store of one tracker) has a thread of its own, so that a slow server holds up no other run. An answer
has the number of its request. A beat every second lets the other end notice that this process was stopped or hangs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from rl8x.importing import importing_much
from rl8x.output import described
from rl8x.processes import OWN
from rl8x.tracking.database import merge_log, prepare_tables
from rl8x.tracking.location import Location
from rl8x.tracking.secrets import hide
from rl8x.tracking.store import MLflowStore, NewRun, quiet_thread, source_tags
from rl8x.tracking.store_errors import RunGoneError, RunMissingError, StoreDownError, StoreRefusedError

END_S = 1.0  # how long to wait for a process, or a channel, that was asked to end
BEAT = b"\n"
# Where there are no more processors than training uses, it gets a tenth of one and the training the rest.
_NICENESS = 10

_Answer = Callable[[int, Any], None]
_Inbox = queue.SimpleQueue[tuple[int, str, list[Any]]]
_importing = threading.Lock()  # modules that import each other are seen half made by a second thread


# A request is a line of JSON (channel, number, name, arguments), and so is an answer (number, name of an error, value).

_ERRORS = {error.__name__: error for error in (StoreDownError, StoreRefusedError, RunGoneError, RunMissingError)}


def encode(message: tuple[Any, ...]) -> bytes:
    """Write a request or an answer as one line, and a path as text."""
    return json.dumps(message, default=os.fspath).encode() + b"\n"


def result_of(name: str, error: str | None, value: Any) -> Any:
    """Return what a call of `MLflowStore` returned, or raise what it raised, from its answer."""
    if error is not None:
        raise _ERRORS[error](value)
    return tuple(value) if name in ("run_name", "status") else value


def serve(requests: IO[bytes], answer: _Answer, connect: Callable[..., MLflowStore] = MLflowStore) -> None:
    """Answer calls until they end.

    Args:
        requests: A line of `encode` for each: channel, number, name and arguments; "open" makes a channel.
        answer: Takes a request's number and a value or exception; any thread calls it.
        connect: Makes the store of a channel, at the first call that needs it.
    """
    channels: dict[int, _Inbox] = {}
    threads: list[threading.Thread] = []
    environment: Mapping[str, str] = dict(os.environ)
    for line in requests:
        if not line.endswith(b"\n"):  # cut, as the process that asks was killed
            break
        channel, number, name, args = json.loads(line)
        if name != "open":
            inbox = channels.pop(channel) if name == "close" else channels[channel]
            inbox.put((number, name, args))
            continue
        (uri, database, artifacts, guarded), timeout_s, sys.argv, wanted = args
        location = Location(uri, database and Path(database), artifacts and Path(artifacts), guarded)
        _adopt(wanted, environment)
        environment = wanted
        channels[channel] = queue.SimpleQueue()
        make = functools.partial(connect, location, request_timeout_s=timeout_s)
        work = (channels[channel], answer, location, make)
        threads = [thread for thread in threads if thread.is_alive()]  # a study has a channel for each training
        threads.append(threading.Thread(target=_serve_channel, args=work, daemon=True))
        threads[-1].start()
    for inbox in channels.values():
        inbox.put((0, "close", []))
    end = time.monotonic() + END_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _adopt(wanted: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Change the environment as the other process has changed its own since this one, or another channel, was begun."""
    for name in before.keys() - wanted.keys() - {*OWN}:
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in wanted.items() if before.get(name) != value and name not in OWN})


def _prepare(database: Path | None) -> None:
    """Import MLflow, and make a new database's tables in memory, before the first channel needs them."""
    with _importing, quiet_thread(), contextlib.suppress(Exception), importing_much():  # raised again where needed
        import mlflow.entities
        import mlflow.tracking.context.registry  # noqa: F401

        if database is not None:
            prepare_tables(database)


def _serve_channel(inbox: _Inbox, answer: _Answer, location: Location, connect: Callable[[], MLflowStore]) -> None:
    store: MLflowStore | None = None
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
                typed = [NewRun(*args[0])] if name in ("find_runs", "create_run") else args
                answer(number, getattr(store, name)(*typed))
            except (StoreDownError, StoreRefusedError) as error:
                answer(number, type(error)(hide(str(error))))
            except Exception as error:  # whatever it is, the training process gets it as an outage and goes on
                answer(number, StoreDownError(hide(described(error))))


def main(parent: int, database: str | None) -> None:
    """Serve the process `parent` on the standard streams; what MLflow prints goes nowhere.

    This process ends with that one, also where its pipes stay open in other hands.

    Args:
        parent: Its process ID.
        database: What the first run will most likely be kept in; None where that is not known, or a server.
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
        write(encode((number, type(value).__name__, str(value)) if failed else (number, None, value)))

    def beat() -> None:
        while os.getppid() == parent:
            write(BEAT)
            time.sleep(1.0)
        os._exit(0)

    threading.Thread(target=beat, daemon=True).start()
    os.nice(_NICENESS)
    threading.Thread(target=_prepare, args=(database and Path(database),), daemon=True).start()
    serve(sys.stdin.buffer, answer)
    os._exit(0)  # at once: MLflow's own threads are not waited for

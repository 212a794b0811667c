"""MLflow in a process of its own.

Importing MLflow takes seconds, and a request milliseconds, during which Python runs nothing else in the same process:
they would be taken from the training. So the writer's thread only writes a line of JSON for each call of a `Store`, and
waits for a line with the answer; what is at the other end does nothing but that, and ends when the lines end.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rl8x.tracking.database import merge_log
from rl8x.tracking.location import Location
from rl8x.tracking.store import (
    MLflowStore,
    Point,
    RunGoneError,
    RunName,
    RunSpec,
    RunStatus,
    Store,
    StoreDownError,
    StoreRefusedError,
    quiet_thread,
    source_tags,
)

_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (StoreDownError, StoreRefusedError, RunGoneError)
}
# Where there are no more processors than training uses, it gets a tenth of one and the training the rest.
_NICENESS = 10
_END_S = 1.0  # how long to wait for a process that was told to end


class StoreProcess:
    """A `Store` whose calls are made by a process of its own, which the first call starts.

    A process that has ended, or cannot be started, is a store that is down: the next call starts another.

    Args:
        location: As for `MLflowStore`.
        request_timeout_s: As for `MLflowStore`.
    """

    def __init__(self, location: Location, *, request_timeout_s: int = 10) -> None:
        self._location = location
        self._request_timeout_s = request_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            if self._process is None:
                self._process = _start(self._location, self._request_timeout_s)
            answer = _exchange(self._process, [name, *args])
        except (OSError, ValueError) as error:
            status = None if self._process is None else self._process.poll()
            self.close()
            ended = "" if status is None else f", exit status {status}"
            raise StoreDownError(f"the process that talks to MLflow is gone ({error}{ended})") from error
        if "error" in answer:
            raise _ERRORS[answer["error"]](answer["text"])
        return answer["value"]

    def source_tags(self) -> dict[str, str]:
        """Return the tags that say where the run comes from; the store need not be there."""
        return dict(self._ask("source_tags"))

    def find_runs(self, spec: RunSpec) -> list[str]:
        """List the runs that were made for a spool, the oldest first."""
        return list(self._ask("find_runs", spec))

    def create_run(self, spec: RunSpec) -> str:
        """Make a run and return its ID."""
        return str(self._ask("create_run", spec))

    def delete_run(self, run_id: str) -> None:
        """Delete a run."""
        self._ask("delete_run", run_id)

    def check_run(self, run_id: str) -> None:
        """Raise `RunGoneError` unless the run is there and active."""
        self._ask("check_run", run_id)

    def run_name(self, run_id: str) -> RunName:
        """Read a run's name."""
        return RunName(*self._ask("run_name", run_id))

    def status(self, run_id: str) -> RunStatus:
        """Read a run's status."""
        return RunStatus(*self._ask("status", run_id))

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Log at most 1000 points: all or none."""
        self._ask("log_points", run_id, points)

    def params(self, run_id: str) -> dict[str, str]:
        """Read a run's params."""
        return dict(self._ask("params", run_id))

    def log_params(self, run_id: str, params: Mapping[str, str]) -> None:
        """Log at most 100 new params."""
        self._ask("log_params", run_id, params)

    def tags(self, run_id: str) -> dict[str, str]:
        """Read a run's tags."""
        return dict(self._ask("tags", run_id))

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Set at most 100 tags."""
        self._ask("set_tags", run_id, tags)

    def log_artifact(self, run_id: str, path: Path, to: str | None) -> None:
        """Copy a file or folder to the run's artifacts."""
        self._ask("log_artifact", run_id, str(path.absolute()), to)

    def log_text(self, run_id: str, text: str, name: str) -> None:
        """Write a text to the run's artifacts."""
        self._ask("log_text", run_id, text, name)

    def set_status(self, run_id: str, status: str, end_time: int | None) -> None:
        """Set a run's status."""
        self._ask("set_status", run_id, status, end_time)

    def last_steps(self, run_id: str) -> dict[str, int]:
        """Read the last step of each metric that a run has."""
        return dict(self._ask("last_steps", run_id))

    def logged_steps(self, run_id: str, name: str) -> list[int]:
        """Read the steps at which a run has a metric, one for each point."""
        return list(self._ask("logged_steps", run_id, name))


def _start(location: Location, request_timeout_s: int) -> subprocess.Popen[bytes]:
    """Start the other end; where the store is, and any password in it, goes through the pipe."""
    # It finds the same packages, and nothing of the working directory that this process would not have found.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", "from rl8x.tracking.store_process import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        # A Ctrl-C in the terminal is the training's business. No session of its own: Linux shares processors between
        # sessions first, whatever the niceness inside each.
        process_group=0,
    )
    root = location.artifact_root
    database = location.database
    first = {
        "uri": location.uri,
        "database": None if database is None else str(database),
        "artifact_root": None if root is None else str(root),
        "request_timeout_s": request_timeout_s,
        "argv": sys.argv,
    }
    _exchange(process, first)
    return process


def _exchange(process: subprocess.Popen[bytes], message: Any) -> dict[str, Any]:
    """Write a line and read the answer.

    Raises:
        OSError: The other end is gone.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise BrokenPipeError("no answer")
    answer: dict[str, Any] = json.loads(line)
    return answer


# The other end.

_CALLS: dict[str, Callable[..., Any]] = {
    "find_runs": lambda store, spec: store.find_runs(RunSpec(*spec)),
    "create_run": lambda store, spec: store.create_run(RunSpec(*spec)),
    "log_points": lambda store, run_id, points: store.log_points(run_id, [Point(*point) for point in points]),
    "log_artifact": lambda store, run_id, path, to: store.log_artifact(run_id, Path(path), to),
}
_AS_THEY_ARE = (
    "delete_run",
    "check_run",
    "run_name",
    "status",
    "params",
    "log_params",
    "tags",
    "set_tags",
    "log_text",
    "set_status",
    "last_steps",
    "logged_steps",
)


def serve(requests: IO[bytes], answers: IO[bytes], connect: Callable[..., Store] = MLflowStore) -> None:
    """Answer calls until they end.

    Args:
        requests: A line of JSON each: first where the store is, then calls, the name first.
        answers: Gets a line of JSON for each.
        connect: Makes the store, at the first call that needs it.
    """
    store: Store | None = None
    first = json.loads(requests.readline())
    sys.argv = first["argv"]  # MLflow takes the run's source from it
    paths = [None if first[name] is None else Path(first[name]) for name in ("database", "artifact_root")]
    location = Location(first["uri"], *paths)

    def call(name: str, *args: Any) -> Any:
        nonlocal store
        if name == "source_tags":
            return source_tags()
        if store is None:
            store = connect(location, request_timeout_s=first["request_timeout_s"])
        return getattr(store, name)(*args) if name in _AS_THEY_ARE else _CALLS[name](store, *args)

    answer: dict[str, Any] = {"value": None}
    while True:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
        line = requests.readline()
        if not line:
            if store is not None and location.database is not None:
                merge_log(location.database)  # which the end of this process, being sudden, would not do
            return
        try:
            answer = {"value": call(*json.loads(line))}
        except Exception as error:  # whatever it is, the training process shall hear of it and go on
            known = type(error).__name__ in _ERRORS
            text = str(error) if known else f"{type(error).__name__}: {error}"
            answer = {"error": type(error).__name__ if known else StoreDownError.__name__, "text": text}


def main() -> None:
    """Serve on the standard streams; what MLflow prints goes nowhere."""
    os.nice(_NICENESS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with quiet_thread(), contextlib.suppress(BrokenPipeError):
        serve(sys.stdin.buffer, answers)
    os._exit(0)  # at once: MLflow's own threads are not waited for

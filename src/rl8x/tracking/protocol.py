"""The `Tracker` protocol, all that the trainer asks of a tracker, with its errors, names, values and steps.

Names, values and steps are checked where they are logged: one bad name spoils a whole request. Beside it the trackers
that keep nothing, and that keep a run in lists, for scripts that want the numbers and for tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
import posixpath
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from rl8x.output import described
from rl8x.tracking.repeats import JournalRepeats, LoggedRow
from rl8x.tracking.secrets import logger

_log = logger(__name__)
Status = Literal["FINISHED", "FAILED", "KILLED"]
PARENT_TAG: Final = "mlflow.parentRunId"
_TABLES_TAG: Final = "mlflow.loggedArtifacts"
STATUSES: tuple[Status, ...] = ("FINISHED", "FAILED", "KILLED")


class TrackingError(ValueError):
    """A tracking store, run or spool cannot be used as asked; the message says what to do."""


class StoreDownError(Exception):
    """The store cannot be reached, does not answer or does not work now; the same call may succeed later."""


class StoreRefusedError(Exception):
    """The store answered and will never take this call."""


class RunMissingError(StoreDownError):
    """The store never had the run, or no longer has it."""


def in_words(error: BaseException) -> str:
    """Return what an error of tracking says, and of any other error its type as well."""
    ours = isinstance(error, TrackingError | StoreDownError | StoreRefusedError)
    return str(error) if ours else described(error)


def check_status(status: str) -> None:
    """Raise `ValueError` where a final status is none of FINISHED, FAILED, KILLED."""
    if status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}; got {status!r}")


def status_of(error: BaseException) -> Status:
    """Return how a run ended that an exception has ended; `sys.exit()` and `sys.exit(0)` end it as they should."""
    if isinstance(error, SystemExit):
        return "FINISHED" if error.code is None or (isinstance(error.code, int) and error.code == 0) else "KILLED"
    return "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"


@runtime_checkable
class Tracker(Protocol):
    """Keeps one run; `start()` after `finish()` begins another run, or with `resume` goes on with an old one."""

    @property
    def run_id(self) -> str | None:
        """The ID of the run in its store; None while there is none (yet)."""

    @property
    def resume_handle(self) -> str | None:
        """The value for `start(resume=...)` that goes on with the run, also before the store has given a `run_id`."""

    @property
    def location(self) -> str:
        """Where the run is kept, in words for a user."""

    def start(
        self,
        *,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        resume: str | None = None,
        repeats: bool = True,
        keeps_status: bool = False,
    ) -> None:
        """Begin a run, or go on with one.

        Args:
            params: Hyperparameters, by name.
            tags: Tags of the run, by name.
            resume: `resume_handle` of the run to go on with.
            repeats: Whether rows may repeat some that the run has, as after a kill; these are then not logged twice.
                False if the process that logged them continues: all rows are new.
            keeps_status: Whether the run is over and something is added to it, so that its status stays as it is.
        """

    def log_params(self, params: Mapping[str, object]) -> None:
        """Add hyperparameters.

        Args:
            params: Their values by name.
        """

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; a tag set before is replaced.

        Args:
            tags: Texts by name.
        """

    def describe(self, text: str, folder: str | None = None) -> None:
        """Describe the run; replaces the description before, but none that the user wrote.

        Args:
            text: Markdown.
            folder: What its commands call the run until its name is known to find it, such as the folder of its
                checkpoints; None if nothing.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row of metrics.

        Args:
            metrics: Numbers by name.
            step: Where the clock is.
        """

    def log_artifact(self, path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Keep a copy of a file or folder, as it is now.

        Args:
            path: The file or folder.
            artifact_path: The folder of the run's artifacts to keep it in; None is the topmost.

        Raises:
            FileNotFoundError: If it is not there.
        """

    def log_text(self, text: str, artifact_file: str) -> None:
        """Keep a text as an artifact.

        Args:
            text: The text.
            artifact_file: The artifact's name, with `/` between folders.
        """

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all that was logged has arrived.

        Args:
            timeout_s: Seconds to wait at most.

        Returns:
            Whether it has.
        """

    def finish(self, status: Status) -> None:
        """End the run.

        Args:
            status: `"FINISHED"`, `"FAILED"` or `"KILLED"`.

        Raises:
            ValueError: If it is none of these.
        """


class NullTracker:
    """A `Tracker` that keeps nothing."""

    run_id: str | None = None
    resume_handle: str | None = None
    location: str = "nowhere (tracking is off)"

    def start(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    log_params = set_tags = describe = log_metrics = log_artifact = log_text = log_model = finish = start

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Return True: there is nothing to wait for."""
        return True


def parent_tag(run_id: str) -> dict[str, str]:
    """Return the tag that makes a run a child of another on MLflow's page.

    Args:
        run_id: The ID of the parent.
    """
    return {PARENT_TAG: run_id}


def log_table(tracker: Tracker, path: str | os.PathLike[str]) -> None:
    """Keep a table as an artifact in the form of `mlflow.log_table`; other than that, it replaces one of its name.

    Args:
        tracker: What keeps the run; its one table is this.
        path: A JSON file, `{"columns": [...], "data": [[...], ...]}`, as pandas' `to_json(orient="split")` writes it.

    Raises:
        FileNotFoundError: If it is not there.
    """
    tracker.log_artifact(path)
    tracker.set_tags({_TABLES_TAG: json.dumps([{"path": Path(path).name, "type": "table"}])})


_ValueT = TypeVar("_ValueT")

MAX_NAME_LENGTH = 250
MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 8000
_ILLEGAL = re.compile(r"[^/\w.\- :]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def readable(text: str) -> str:
    """Escape what no store takes: parts that are not UTF-8, as arguments in Latin-1 leave them, and null bytes."""
    with contextlib.suppress(UnicodeEncodeError):
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def legal_name(name: str) -> str:
    """Turn any text into a name that MLflow takes: letters, digits, `_ - . : /` and space, at most 250 characters."""
    if not isinstance(name, str):
        raise TypeError(f"a name must be a str; got {type(name).__name__} {name!r}")
    parts = [part if part.strip(".") else "_" * len(part) for part in _ILLEGAL.sub("_", name).split("/") if part]
    legal = "/".join(parts)
    if not legal:
        raise ValueError(f"a name must have at least one character that is not '/'; got {name!r}")
    if len(legal) > MAX_NAME_LENGTH:
        legal = f"{legal[: MAX_NAME_LENGTH - 9]}-{digest(readable(name))[:8]}"
    return legal


def digest(text: str) -> str:
    """Return sixteen letters that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fitted(name: str, text: str) -> tuple[str, str | None]:
    """Cut a param to what a store takes; returns it and the artifact that is to have the whole text, if it is cut."""
    if len(text) <= MAX_PARAM_LENGTH:
        return text, None
    file = f"params/{name.replace(':', '_')}.txt"
    if len(file.encode()) > 250:  # of a file's name, in bytes; param names may be longer
        file = f"params/{digest(name)}.txt"
    note = f" ... (the whole value is the artifact {file})"
    return text[: MAX_PARAM_LENGTH - len(note)] + note, file


class NameTable:
    """Remembers which legal name each given name got, and numbers those that would become one: `a_`, `a_-2`."""

    def __init__(self, kind: str = "", before: Mapping[str, str] = MappingProxyType({})) -> None:
        self._kind = kind
        self._legal = dict(before)
        self._given = {legal: name for name, legal in before.items()}

    @property
    def state(self) -> dict[str, str]:
        """The names that another process could take otherwise: all that are not legal, and that one of them is like."""
        changed = {name: legal for name, legal in self._legal.items() if legal != name}
        return changed | {other: other for other in map(legal_name, changed) if other in self._legal}

    def legal(self, named: Mapping[str, _ValueT]) -> Mapping[str, _ValueT]:
        """Return values under the legal ones of their names, whatever order they come in; raises as `legal_name`."""
        new = [name for name in named if name not in self._legal]
        for name in sorted(new, key=lambda name: (legal_name(name) != name, name)):
            self.add(name)
        return {self._legal[name]: value for name, value in named.items()}

    def add(self, name: str) -> str:
        """Return the legal name of `name`, which no other name has."""
        if name in self._legal:
            return self._legal[name]
        first = legal = legal_name(name)
        number = 1
        while self._given.setdefault(legal, name) != name:
            number += 1
            legal = f"{first[: MAX_NAME_LENGTH - len(f'-{number}')]}-{number}"
        self._legal[name] = legal
        if number > 1:
            _log.warning("tracking: %r is logged as %r, since %r is called %r", name, legal, self._given[first], first)
        elif legal != name and self._kind:
            _log.warning("tracking: the %s %r is logged as %r, which MLflow takes", self._kind, name, legal)
        return legal


def metric_value(name: str, value: object) -> float:
    """Turn a number (or a tensor or array of one) into a float, or raise `TypeError`; NaN and infinities stay."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"metric {name!r} must be one number; got {type(value).__name__} {value!r:.80}") from error


def metric_step(step: object, quantity: str = "step") -> int:
    """Turn a step, or a time in milliseconds, into an int; raises `TypeError`, and `ValueError` beyond 64 bits."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{quantity} must be an integer; got {type(step).__name__} {step!r:.80}") from error
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{quantity} must fit into 64 bits; got {number!s:.80}")
    return number


def artifact_name(name: str) -> str:
    """Return an artifact's name as a store has it; `TrackingError` for what is no relative path inside its folder."""
    text = _SURROGATE.sub(lambda surrogate: f"_u{ord(surrogate[0]):x}", str(name))
    path = posixpath.normpath(text) if text.strip() else "."
    odd = path == "." or text.startswith(("/", "~")) or "\\" in text or "\0" in text
    if odd or ":" in text.split("/")[0] or ".." in text.split("/"):
        raise TrackingError(f"an artifact's name must be a relative path without '..', ':' or '\\'; got {text!r}")
    return path


class Row(NamedTuple):
    """One call of `log_metrics`.

    Attributes:
        step: Where the clock was.
        metrics: Numbers by name.
    """

    step: int
    metrics: dict[str, float]


class MemoryTracker:
    """A `Tracker` that keeps one run in memory.

    `rows`, `params`, `tags`, `description`, `texts`, `artifacts` (names), `models` (what is said of each, by name) and
    `status` (None before `start()`, then "RUNNING", then what `finish` was given) can be read at any time.
    """

    location: str = "memory"

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.run_id: str | None = None
        self.rows: list[Row] = []
        self.params: dict[str, object] = {}
        self.tags: dict[str, str] = {}
        self.description: str | None = None
        self.texts: dict[str, str] = {}
        self.artifacts: list[str] = []
        self.models: dict[str, dict[str, object]] = {}
        self.status: str | None = None
        self._repeats: JournalRepeats | None = None  # of the rows that were there at a resume
        self._num_known = 0
        self._open = self._keeps_status = False

    @property
    def resume_handle(self) -> str | None:
        """The ID of the run."""
        return self.run_id

    def start(
        self,
        *,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        resume: str | None = None,
        repeats: bool = True,
        keeps_status: bool = False,
    ) -> None:
        """Begin a run anew, or go on with the one that is here; `TrackingError` where `resume` is another one."""
        if resume is None:
            self._clear()
            self.run_id = uuid.uuid4().hex
        elif resume != self.run_id:
            raise TrackingError(f"this MemoryTracker has run {self.run_id!r}; it cannot go on with {resume!r}")
        if repeats:
            known: list[LoggedRow] = [(row.step, 0, row.metrics) for row in self.rows]
            self._repeats, self._num_known = JournalRepeats(1, known.copy), len(known)
        self._open, self._keeps_status = True, keeps_status
        if not keeps_status:
            self.status = "RUNNING"
        self.log_params(params)
        self.set_tags(tags)

    def log_params(self, params: Mapping[str, object]) -> None:
        """Add hyperparameters."""
        self.params.update(params)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        self.tags.update({name: str(value) for name, value in tags.items()})

    def describe(self, text: str, folder: str | None = None) -> None:
        """Keep the description."""
        self.description = text

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep one row, without what a resumed run had at this step; other values than it had take the place of those.

        Raises:
            RuntimeError: If no run goes on.
            TypeError: If a value is not a number, or the step not a whole number.
        """
        if not self._open:
            raise RuntimeError("log_metrics() needs a running run; call start() first")
        at = metric_step(step)
        given = {name: metric_value(name, value) for name, value in metrics.items()}
        rows: list[LoggedRow] = [(at, 0, given)]
        if self._repeats is not None:
            rows = self._repeats.new_rows(rows[0])
            left = self._repeats.left
            if left is not None:
                kept = [row for row in self.rows[: self._num_known] if row.step < left.step]
                self.rows[: self._num_known], self._num_known = kept, len(kept)
        self.rows += [Row(when, values) for when, _, values in rows if values]

    def log_artifact(self, path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Keep the name that the file would have."""
        if not Path(path).exists():
            raise FileNotFoundError(f"no such file to log as an artifact: {os.fspath(path)}")
        name = Path(path).name
        self.artifacts.append(artifact_name(name if artifact_path is None else f"{artifact_path}/{name}"))

    def log_model(
        self, path: str | os.PathLike[str], description: Mapping[str, object], *, name: str, **about: object
    ) -> None:
        """Keep what is said of a model.

        Args:
            path: Its file, which is not kept.
            description: What it is.
            name: What it is called.
            about: What else is said of it, such as `step` and `metrics`.
        """
        self.models[name] = {**description, **about}

    def log_text(self, text: str, artifact_file: str) -> None:
        """Keep a text."""
        name = artifact_name(artifact_file)
        self.texts[name] = text
        self.artifacts.append(name)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Return True: all is here."""
        return True

    def finish(self, status: Status) -> None:
        """End the run; raises `ValueError` where `status` is none of FINISHED, FAILED, KILLED."""
        check_status(status)
        self._open = False
        if not self._keeps_status:
            self.status = status

    def history(self, name: str) -> list[tuple[int, float]]:
        """List (step, value) pairs of one metric, in the order in which they were logged.

        Args:
            name: The metric.
        """
        return [(row.step, row.metrics[name]) for row in self.rows if name in row.metrics]

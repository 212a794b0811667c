"""The `Tracker` protocol that the trainer uses, its errors, and checks of names, values and steps.

Names, values and steps are checked when they are logged, since one illegal name makes a whole request fail. This file
also has `NullTracker`, which keeps nothing, and `MemoryTracker`, which keeps a run in lists, for scripts and tests.
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
    """A tracking store, run or journal cannot be used as asked; the message says what to do."""


class StoreDownError(Exception):
    """The store cannot be reached, does not answer or does not work now; the same call may succeed later."""


class StoreRefusedError(Exception):
    """The store answered and will never take this call."""


class RunMissingError(StoreDownError):
    """The store never had the run, or no longer has it."""


def in_words(error: BaseException) -> str:
    """Return the text of a tracking error, or the type and text of any other error."""
    ours = isinstance(error, TrackingError | StoreDownError | StoreRefusedError)
    return str(error) if ours else described(error)


def check_status(status: str) -> None:
    """Raise `ValueError` if a final status is not FINISHED, FAILED or KILLED."""
    if status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}; got {status!r}")


def status_of(error: BaseException) -> Status:
    """Return the status of a run that an exception ended; FINISHED for `sys.exit()` and `sys.exit(0)`."""
    if isinstance(error, SystemExit):
        return "FINISHED" if error.code is None or (isinstance(error.code, int) and error.code == 0) else "KILLED"
    return "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"


@runtime_checkable
class Tracker(Protocol):
    """Tracks one run; `start()` after `finish()` begins another run, or with `resume` continues an old one."""

    @property
    def run_id(self) -> str | None:
        """The ID of the run in its store; None while there is none (yet)."""

    @property
    def resume_handle(self) -> str | None:
        """The value for `start(resume=...)` to resume the run, available even before the store gives a `run_id`."""

    @property
    def location(self) -> str:
        """The place of the run, in words for a user."""

    def start(
        self,
        *,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        resume: str | None = None,
        repeats: bool = True,
        keeps_status: bool = False,
    ) -> None:
        """Begin a run, or resume one.

        Args:
            params: Hyperparameters, by name.
            tags: Tags of the run, by name.
            resume: `resume_handle` of the run to resume.
            repeats: Whether rows may repeat some that the run has, as after a kill; these are then not logged twice.
                False if the process that logged them continues: all rows are new.
            keeps_status: Whether to keep the status of a run that is over and only gets additions.
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
        """Describe the run; replaces an earlier description, but never one that the user wrote.

        Args:
            text: Markdown.
            folder: The argument for the run in the commands of `text`, such as the folder of its checkpoints. The run's
                name replaces it once that is known to be unique; None if there is none.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log one row of metrics.

        Args:
            metrics: Numbers by name.
            step: The clock's current value.
        """

    def log_artifact(self, path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Log a copy of the current file or folder as an artifact.

        Args:
            path: The file or folder.
            artifact_path: The target folder among the run's artifacts; None is the top folder.

        Raises:
            FileNotFoundError: If the file or folder does not exist.
        """

    def log_text(self, text: str, artifact_file: str) -> None:
        """Log a text as an artifact.

        Args:
            text: The text.
            artifact_file: The artifact's name, with `/` between folders.
        """

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything that was logged has arrived.

        Args:
            timeout_s: Longest time to wait, in seconds.

        Returns:
            Whether everything has arrived.
        """

    def finish(self, status: Status) -> None:
        """End the run.

        Args:
            status: `"FINISHED"`, `"FAILED"` or `"KILLED"`.

        Raises:
            ValueError: If the status is none of these.
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
        """Return True, as there is nothing to wait for."""
        return True


def parent_tag(run_id: str) -> dict[str, str]:
    """Return the tag that makes a run a child of another on MLflow's page.

    Args:
        run_id: The ID of the parent.
    """
    return {PARENT_TAG: run_id}


def log_table(tracker: Tracker, path: str | os.PathLike[str]) -> None:
    """Log a table as an artifact in the format of `mlflow.log_table`, but replace a table of the same name.

    Args:
        tracker: The run's tracker; MLflow's tag of the run's tables then lists only this one.
        path: A JSON file, `{"columns": [...], "data": [[...], ...]}`, as pandas' `to_json(orient="split")` writes it.

    Raises:
        FileNotFoundError: If the file does not exist.
    """
    tracker.log_artifact(path)
    tracker.set_tags({_TABLES_TAG: json.dumps([{"path": Path(path).name, "type": "table"}])})


_ValueT = TypeVar("_ValueT")

HAS_A_RUN: Final = (
    "this tracker has a run already: give each trainer a tracker of its own, or end the run first, by the trainer's "
    "close() or the tracker's finish()"
)
MAX_NAME_LENGTH = 250
MAX_PARAM_LENGTH = 6000
MAX_TAG_LENGTH = 8000
_ILLEGAL = re.compile(r"[^/\w.\- :]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def readable(text: str) -> str:
    """Escape text that no store accepts: null bytes, and parts that are not UTF-8, such as arguments in Latin-1."""
    with contextlib.suppress(UnicodeEncodeError):
        text = text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def legal_name(name: str) -> str:
    """Turn any text into a name that MLflow accepts: letters, digits, `_ - . : /` and space, at most 250 characters."""
    if not isinstance(name, str):
        raise TypeError(f"a name must be a str; got {type(name).__name__} {name!r}")
    parts = [part if part.strip(".") else "_" * len(part) for part in _ILLEGAL.sub("_", name).split("/") if part]
    legal = re.sub(r"^\.\.", "_.", "/".join(parts))
    if not legal:
        raise ValueError(f"a name must have at least one character that is not '/'; got {name!r}")
    if len(legal) > MAX_NAME_LENGTH:
        legal = f"{legal[: MAX_NAME_LENGTH - 9]}-{digest(readable(name))[:8]}"
    return legal


def digest(text: str) -> str:
    """Return the first 16 hexadecimal digits of a text's SHA-256 hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fitted(name: str, text: str) -> tuple[str, str | None]:
    """Cut a param to MLflow's limit; return it and the name of the artifact for the whole text, None if uncut."""
    if len(text) <= MAX_PARAM_LENGTH:
        return text, None
    file = f"params/{name.replace(':', '_')}.txt"
    if len(file.encode()) > 250:  # limit of file names in bytes; param names may be longer
        file = f"params/{digest(name)}.txt"
    note = f" ... (the whole value is the artifact {file})"
    return text[: MAX_PARAM_LENGTH - len(note)] + note, file


class NameTable:
    """Maps given names to legal names, and numbers those that would collide: `a_`, `a_-2`."""

    def __init__(self, kind: str = "", before: Mapping[str, str] = MappingProxyType({})) -> None:
        self._kind = kind
        self._legal = dict(before)
        self._given = {legal: name for name, legal in before.items()}

    @property
    def state(self) -> dict[str, str]:
        """The mapping that another process needs to reuse the names: changed ones, and those that they collide with."""
        changed = {name: legal for name, legal in self._legal.items() if legal != name}
        return changed | {other: other for other in map(legal_name, changed) if other in self._legal}

    def legal(self, named: Mapping[str, _ValueT]) -> Mapping[str, _ValueT]:
        """Return values by legal name, independent of the order of `named`; raises as `legal_name` does."""
        new = [name for name in named if name not in self._legal]
        for name in sorted(new, key=lambda name: (legal_name(name) != name, name)):
            self.add(name)
        return {self._legal[name]: value for name, value in named.items()}

    def add(self, name: str) -> str:
        """Return a legal name for `name` that no other name has."""
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
    """Convert a number, or a tensor or array of one, to float, or raise `TypeError`; NaN and infinities stay."""
    try:
        return float(value.item() if hasattr(value, "item") else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"metric {name!r} must be one number; got {type(value).__name__} {value!r:.80}") from error


def metric_step(step: object, quantity: str = "step") -> int:
    """Turn a step, or a time in milliseconds, into an int; raise `TypeError`, or `ValueError` beyond 64 bits."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(f"{quantity} must be an integer; got {type(step).__name__} {step!r:.80}") from error
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{quantity} must fit into 64 bits; got {number!s:.80}")
    return number


def artifact_name(name: str) -> str:
    """Return a normalized artifact name; raise `TrackingError` if it is not a relative path inside the folder."""
    text = _SURROGATE.sub(lambda surrogate: f"_u{ord(surrogate[0]):x}", str(name))
    path = posixpath.normpath(text) if text.strip() else "."
    odd = path == "." or text.startswith(("/", "~", "..")) or "\\" in text or "\0" in text
    if odd or ":" in text.split("/")[0] or ".." in text.split("/"):
        raise TrackingError(f"an artifact's name must be a relative path without '..', ':' or '\\'; got {text!r}")
    return path


class Row(NamedTuple):
    """One call of `log_metrics`.

    Attributes:
        step: The clock's value.
        metrics: Numbers by name.
    """

    step: int
    metrics: dict[str, float]


class MemoryTracker:
    """A `Tracker` that keeps one run in memory.

    `rows`, `params`, `tags`, `description`, `texts`, `artifacts` (names), `models` (descriptions by name) and `status`
    (None before `start()`, then "RUNNING", then the argument of `finish`) can be read at any time.
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
        self._repeats: JournalRepeats | None = None  # for the rows that existed at a resume
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
        """Begin a new run, or resume the one in memory.

        Raises:
            RuntimeError: A run has been started and not finished.
            TrackingError: `resume` names another run.
        """
        if resume is None:
            if self._open:
                raise RuntimeError(HAS_A_RUN)
            self._clear()
            self.run_id = uuid.uuid4().hex
        elif resume != self.run_id:
            raise TrackingError(f"this MemoryTracker has run {self.run_id!r}; it cannot go on with {resume!r}")
        if repeats:
            known: list[LoggedRow] = [(row.step, 0, row.metrics) for row in self.rows]
            self._repeats, self._num_known = JournalRepeats(0, known.copy), len(known)
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
        """Keep one row, without points that repeat after a resume; if it differs, drop old rows from its step on.

        Raises:
            RuntimeError: If no run is active.
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
        """Keep the name of the artifact, not its content."""
        if not os.fspath(path) or not Path(path).exists():
            raise FileNotFoundError(f"no such file to log as an artifact: {os.fspath(path)!r}")
        name = Path(path).absolute().name
        self.artifacts.append(artifact_name(name if artifact_path is None else f"{artifact_path}/{name}"))

    def log_model(
        self, path: str | os.PathLike[str], description: Mapping[str, object], *, name: str, **about: object
    ) -> None:
        """Keep the description of a model.

        Args:
            path: The model's file, which is not kept.
            description: The model's description.
            name: The model's name.
            about: Additional entries of the description, such as `step` and `metrics`.
        """
        self.models[name] = {**description, **about}

    def log_text(self, text: str, artifact_file: str) -> None:
        """Keep a text."""
        name = artifact_name(artifact_file)
        self.texts[name] = text
        self.artifacts.append(name)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Return True, as everything is in memory."""
        return True

    def finish(self, status: Status) -> None:
        """End the run; raise `ValueError` if `status` is not FINISHED, FAILED or KILLED."""
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

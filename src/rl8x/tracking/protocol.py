"""The `Tracker` protocol, all that the trainer asks of a tracker; errors; and the tracker that keeps nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, Protocol, runtime_checkable

from rl8x.output import described

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


class RunGoneError(StoreDownError):
    """The run is deleted or not there; it may be restored."""


class RunMissingError(RunGoneError):
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
    """Keeps the params, metrics, tags and artifacts of one run.

    `start()` comes first; `start()` after `finish()` begins another run, or with `resume` goes on with an old one.
    """

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

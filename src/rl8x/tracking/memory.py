"""A tracker that keeps a run in lists: for scripts that want the numbers, and for tests."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rl8x.tracking.names import artifact_name, metric_step, metric_value
from rl8x.tracking.protocol import Status, TrackingError, check_status
from rl8x.tracking.repeats import are_of_one_course


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
    `status` (None before `start()`, then "RUNNING", then what `finish` was given) can be read at any time. `start()`
    without `resume` begins anew.
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
        self._known: dict[tuple[int, str], list[float]] = {}  # what was there at a resume, and has not come again
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
        """Begin a run, or go on with the one that is here; see `Tracker.start`.

        Raises:
            TrackingError: If another run is to be gone on with.
        """
        if resume is None:
            self._clear()
            self.run_id = uuid.uuid4().hex
        elif resume != self.run_id:
            raise TrackingError(f"this MemoryTracker has run {self.run_id!r}; it cannot go on with {resume!r}")
        if repeats:
            self._known, self._num_known = {}, len(self.rows)
            for row in self.rows:
                for name, value in row.metrics.items():
                    self._known.setdefault((row.step, name), []).append(value)
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
        """Keep one row, without what a resumed run already had at this step, as often as it had it.

        A resumed run that comes to other values than it had leaves behind those from this step on.

        Raises:
            RuntimeError: If no run goes on.
            TypeError: If a value is not a number, a name not a string, or the step not a whole number.
        """
        if not self._open:
            raise RuntimeError("log_metrics() needs a running run; call start() first")
        at = metric_step(step)
        row = given = {name: metric_value(name, value) for name, value in metrics.items()}
        known = {name: self._known.get((at, name), []) for name in given}
        same = {name: [old for old in known[name] if are_of_one_course(name, old, given[name])] for name in given}
        if any(known[name] and not same[name] for name in given):
            self._leave_behind(at)
        else:
            row = {name: value for name, value in given.items() if not known[name]}
            for name in given.keys() - row.keys():
                known[name].remove((same[name] or known[name])[0])
        if row:
            self.rows.append(Row(at, row))

    def _leave_behind(self, step: int) -> None:
        """Drop what the run had from a step on when it was resumed."""
        kept = []
        for row in self.rows[: self._num_known]:
            # What has come again at this very step is of both courses.
            again = row.step == step
            metrics = {name: v for name, v in row.metrics.items() if again and not self._known.get((step, name))}
            kept += [row] if row.step < step else [Row(step, metrics)] if metrics else []
        self.rows[: self._num_known], self._num_known = kept, len(kept)
        self._known = {key: values for key, values in self._known.items() if key[0] < step}

    def log_artifact(self, path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Keep the name that the file would have.

        Raises:
            FileNotFoundError: If there is no such file.
        """
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
        """List the values of one metric, in the order in which they were logged.

        Args:
            name: The metric.

        Returns:
            (step, value) pairs.
        """
        return [(row.step, row.metrics[name]) for row in self.rows if name in row.metrics]

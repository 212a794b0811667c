"""When checkpoints are written, which are kept, and the thread that writes them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from rl8x.checkpoint import files
from rl8x.checkpoint.errors import CheckpointError
from rl8x.checkpoint.tree import encode
from rl8x.disk import sync_folder
from rl8x.tracking.locks import FileLock
from rl8x.tracking.secrets import logger

_log = logger(__name__)

# How long a run that is resumed waits for the process before it, which may be saving because it was told to go.
_BUSY_WAIT_S: Final = 10.0


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """When to save and what to keep. A run is also saved at its end and on a signal.

    Args:
        directory: The run's own folder of checkpoints; None is one beside the tracked run, in `mlruns/checkpoints`. A
            relative path is taken from the working directory of now, whatever that is later.
        every_steps: Save whenever the trainer's steps are a multiple of this; None does not.
        every_minutes: Save when so many minutes have passed since the last; None does not.
        keep: How many of the last checkpoints to keep.
        best: A metric, such as "eval/returns/mean": whenever it is better than ever, the run is saved, and the best
            checkpoint is kept beside the last ones.
        mode: Whether the largest ("max") or the smallest ("min") value of `best` is best.

    Raises:
        TypeError: If the directory is no path.
        ValueError: If a number is not positive, or the mode is none.
    """

    directory: str | os.PathLike[str] | None = None
    every_steps: int | None = None
    every_minutes: float | None = 5.0
    keep: int = 3
    best: str | None = None
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.directory is not None:
            if not isinstance(self.directory, str | os.PathLike):
                raise TypeError(f"Checkpoints: `directory` must be a path or None; got {self.directory!r}.")
            object.__setattr__(self, "directory", Path(self.directory).absolute())
        for name in ("every_steps", "keep"):
            value = getattr(self, name)
            if (value is not None or name == "keep") and (type(value) is not int or value < 1):
                raise ValueError(f"Checkpoints: `{name}` must be a whole number, at least 1; got {value!r}.")
        minutes = self.every_minutes
        if minutes is not None and not (isinstance(minutes, int | float) and 0 < minutes < math.inf):
            raise ValueError(f"Checkpoints: `every_minutes` must be a positive number or None; got {minutes!r}.")
        if self.mode not in ("max", "min"):
            raise ValueError(f"Checkpoints: `mode` must be 'max' or 'min'; got {self.mode!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Return the options without the directory, which a checkpoint knows from where it is."""
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "directory"
        }


class Saver:
    """Writes the checkpoints of one run into one folder, which it has to itself.

    Args:
        options: When to save and what to keep.
        directory: The run's folder of checkpoints.
        before_write: Called in the thread before each checkpoint is written.
    """

    def __init__(self, options: Checkpoints, directory: Path, before_write: Callable[[], None] = lambda: None) -> None:
        self._before_write = before_write
        self.options = options
        self.directory = directory
        self.best: dict[str, Any] | None = None
        self._best_path: Path | None = None
        self._lock = FileLock(directory / "lock")
        self._thread: threading.Thread | None = None
        self._written: Path | None = None
        self._last_save = time.monotonic()

    def open(self, key: str) -> None:
        """Take the folder, and clean up what a killed process left there.

        Args:
            key: The run's own key: another run's folder is refused.

        Raises:
            CheckpointError: If another process has it, or another run, or it cannot be made.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not self._lock.acquire(_BUSY_WAIT_S):
                raise CheckpointError(f"{self.directory} is in use by {self._lock.owner()}; wait for it or end it")
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot hold checkpoints: {error.strerror}") from None
        try:
            self._look_around(key)
        except CheckpointError:
            self._lock.release()
            raise
        files.tidy(self.directory)
        for folder in self.directory.parents[:2]:  # which may be new, too
            sync_folder(folder)
        self._last_save = time.monotonic()

    def _look_around(self, key: str) -> None:
        for path in files.listed(self.directory):
            with contextlib.suppress(CheckpointError):
                about = files.describe(path)
                if about.get("run", {}).get("key") != key:
                    break
                if about.get("is_best"):
                    self._best_path = path
        else:
            return
        raise CheckpointError(
            f"{self.directory} has checkpoints of another run: resume that by Trainer.resume({str(self.directory)!r}), "
            "or give this run a directory of its own"
        )

    def due(self, steps: int) -> bool:
        """Whether a checkpoint is to be written after so many steps of the trainer."""
        every, minutes = self.options.every_steps, self.options.every_minutes
        if every is not None and steps % every == 0:
            return True
        return minutes is not None and time.monotonic() - self._last_save >= minutes * 60

    def improved(self, stats: Mapping[str, float], fresh: frozenset[str], steps: int) -> bool:
        """Look at a row; whether the metric to save the best of was measured and is better than ever."""
        metric, mode = self.options.best, self.options.mode
        if metric is None or metric not in fresh or not math.isfinite(stats[metric]):
            return False
        value, best = stats[metric], self.best
        comparable = best is not None and (best["metric"], best["mode"]) == (metric, mode)
        if best is not None and comparable and (value <= best["value"] if mode == "max" else value >= best["value"]):
            return False
        self.best = {"metric": metric, "mode": mode, "value": value, "steps": steps}
        return True

    def save(self, steps: int, about: Mapping[str, Any], state: Any, *, is_best: bool = False) -> None:
        """Copy a state now and write it in a thread; waits for the checkpoint before, if that is still being written.

        Args:
            steps: The trainer's steps.
            about: What the checkpoint is.
            state: All that the run's future depends on; it may change once this returns.
            is_best: Whether this is the best so far.
        """
        self.wait()
        try:
            encoded, tensors = encode(state)
        except TypeError as error:
            _log.warning("rl8x: no checkpoint at step %d: %s", steps, error)
            return
        about = {**about, "is_best": is_best}
        arguments = (steps, about, encoded, tensors)
        self._thread = threading.Thread(target=self._write, args=arguments, name="rl8x-checkpoint")
        self._thread.start()
        self._last_save = time.monotonic()

    def _write(self, steps: int, about: dict[str, Any], encoded: Any, tensors: dict[str, Any]) -> None:
        try:
            self._before_write()
            path = files.write(self.directory, steps, about, encoded, tensors)
        except (OSError, ValueError, TypeError) as error:
            _log.warning("rl8x: no checkpoint at step %d, those before are kept: %s", steps, error)
            return
        self._written = path
        if about["is_best"]:
            self._best_path = path
        kept = {*files.listed(self.directory)[-self.options.keep :], self._best_path}
        for old in files.listed(self.directory):
            if old not in kept:
                files.remove(old)

    def wait(self) -> Path | None:
        """Wait until nothing is being written; returns the last checkpoint that was."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._written

    def close(self) -> Path | None:
        """Wait, and give the folder back."""
        try:
            return self.wait()
        finally:
            self._lock.release()

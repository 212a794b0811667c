"""The progress of a study: a line for each training that begins or ends, and a bar on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from rl8x.output import Unfailing, short
from rl8x.studies.definition import Training
from rl8x.trainers.progress import PROGRESS_CHOICES, counter_name

_SECONDS_PER_LOOK: Final = 0.5


class StudyProgress:
    """Shows the progress of a study; where nothing can be shown, the study runs without.

    Args:
        mode: "auto" and "bar" have a bar where standard error is a terminal; "lines", "none".
        folder: The study's, in which trainings say that they have begun.

    Raises:
        ValueError: If there is no such mode.
    """

    def __init__(self, mode: str, folder: Path) -> None:
        if mode not in PROGRESS_CHOICES:
            raise ValueError(f"`progress` must be one of {', '.join(map(repr, PROGRESS_CHOICES))}; got {mode!r}.")
        self._stream = Unfailing(sys.stderr)
        self._quiet, self._folder = mode == "none", folder
        self._has_bar = mode in ("auto", "bar") and self._stream.isatty()
        self._bar: Any = None
        self._trainings: dict[str, Training] = {}
        self._waiting: dict[str, float] = {}
        self._begun: dict[str, float] = {}
        self._guard = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._count = self._total = 0

    def begin(self, trainings: Mapping[str, Training], left: Mapping[str, Training]) -> None:
        """Begin a round of trainings, given by their keys; `left` are those that are not done yet."""
        with self._guard:
            self._trainings |= dict(trainings)
            self._total += len(trainings)
            self._count += len(trainings) - len(left)
            self._waiting = dict.fromkeys(left, time.time())
        if len(left) < len(trainings):
            self.say(f"{len(trainings) - len(left)} of {len(trainings)} trainings are done already")
        if self._has_bar and self._bar is None:
            self._bar = tqdm(
                total=self._total, initial=self._count, unit="training", dynamic_ncols=True, file=self._stream
            )
        elif self._bar is not None:
            self._bar.total = self._total
            self._bar.refresh()
        if self._thread is None and not self._quiet:
            self._thread = threading.Thread(target=self._watch, name="rl8x-study", daemon=True)
            self._thread.start()

    def noting(
        self, work: Callable[[Mapping[str, Any]], dict[str, Any]]
    ) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
        """Wrap a function that runs a job in this process, so that it is announced."""

        def noted(job: Mapping[str, Any]) -> dict[str, Any]:
            self._note(job["key"])
            return work(job)

        return noted

    def _watch(self) -> None:
        while not self._end.wait(_SECONDS_PER_LOOK):
            with self._guard:
                waiting = dict(self._waiting)
            for key, since in waiting.items():
                try:
                    has_begun = (self._folder / key / "lock").stat().st_mtime >= since - 1.0
                except OSError:
                    continue
                if has_begun:
                    self._note(key)

    def _note(self, key: str) -> None:
        with self._guard:
            if self._waiting.pop(key, None) is None:
                return
            self._begun[key] = time.time()
        self.say(f"{self._trainings[key].label}: begins")

    def end(self, training: Training, done: Mapping[str, Any]) -> None:
        """Say what a training came to."""
        self._note(training.key)
        self._count += 1
        seconds = time.time() - self._begun[training.key]
        if "error" in done:
            text = f"failed: {done['error']}"
        else:
            result = done["result"]
            means = result["means"]
            shown = [f"return {means['test/returns/mean']:.4g} in all cells"]
            shown += [
                f"{name} {means[f'test/returns/{name}']:.4g}"
                for name in ("inside", "outside")
                if f"test/returns/{name}" in means
            ]
            steps = f"{short(result['at'])} {counter_name(result['clock'])}"
            text = f"{', '.join(shown)}, {steps}, {seconds:.0f} s" + ", pruned" * result["pruned"]
        self.say(f"{training.label}: {text} ({self._count}/{self._total})")
        if self._bar is not None:
            self._bar.update()

    def say(self, message: str) -> None:
        """Print a line without tearing the bar."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.write(f"rl8x: {message}", file=self._stream)
        else:
            print(f"rl8x: {message}", file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._end.set()
        if self._bar is not None:
            self._bar.close()

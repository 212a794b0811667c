"""The rows that `step()`, `eval()` and `run()` return, the timer of a step, and the summary of a run's returns."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping
from typing import Any, Final

import torch

from rl8x import keys

MAX_POINTS: Final = 512
_RETURNS: Final = (keys.EVALUATED_RETURNS, keys.TRAINED_RETURNS)


class TrainStats(dict[str, float]):
    """One row of metrics by name: the step's own, and those of the latest evaluation.

    Args:
        values: The metrics by name.
        fresh: Names that this step measured; None is all of them.
        earlier: Names that an evaluation before the step measured, and that are in no row yet.

    Attributes:
        fresh: Names that were measured by this step or by an evaluation right after it, and `earlier`. The others come
            from older evaluations.
        earlier: Those of `fresh` that were measured before the step, with the policy before it.
        stop_reason: Why `run()` stopped, or a loop is to; None while it goes on.
    """

    def __init__(
        self,
        values: Mapping[str, float],
        fresh: frozenset[str] | None = None,
        earlier: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(values)
        self.earlier = frozenset() if fresh is None else earlier - fresh
        self.fresh = frozenset(values) if fresh is None else fresh | earlier
        self.stop_reason: str | None = None

    def add(self, values: Mapping[str, float]) -> None:
        """Add what was measured after the step.

        Args:
            values: Metrics by name.
        """
        self.update(values)
        self.fresh |= values.keys()
        self.earlier -= values.keys()


class EvalStats(dict[str, float]):
    """The metrics of one evaluation, under `eval/`, or under `eval/<name>/` if it has a name."""


class Timer:
    """Measures the duration of a block; on CUDA by events, because the host runs ahead of the device."""

    def __init__(self, device: torch.device) -> None:
        num_events = 2 if device.type == "cuda" else 0
        self._events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(num_events)]  # type: ignore[no-untyped-call]
        self._begin = self._end = 0.0

    def __enter__(self) -> Timer:
        self._begin = time.perf_counter()
        if self._events:
            self._events[0].record()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._events:
            self._events[1].record()
        self._end = time.perf_counter()

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds between entering and leaving the block; waits for the device, as the copy of a row does."""
        if self._events:
            self._events[1].synchronize()
            return float(self._events[0].elapsed_time(self._events[1]))
        return (self._end - self._begin) * 1e3


@dataclasses.dataclass
class Course:
    """One metric's last and best value, and at most `MAX_POINTS` of its points: every k-th, k a power of two."""

    last: float = math.nan
    last_step: int = 0
    best: float = -math.inf
    best_step: int = 0
    count: int = 0
    every: int = 1
    kept: list[list[float]] = dataclasses.field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Take a finite value at a step of the clock."""
        self.last, self.last_step = value, step
        if value > self.best:
            self.best, self.best_step = value, step
        if self.count % self.every == 0:
            self.kept.append([step, value])
        self.count += 1
        if len(self.kept) > MAX_POINTS:
            self.kept = self.kept[::2]
            self.every *= 2

    @property
    def points(self) -> list[list[float]]:
        """Steps and values, the last among them."""
        end = [self.last_step, self.last]
        return self.kept if self.kept[-1:] == [end] else [*self.kept, end]


class Results:
    """The courses of a run's mean returns so far, of evaluations and of training.

    Of each the first metric that was measured is shown: returns of whole episodes say more than sums over horizons.
    """

    def __init__(self) -> None:
        self._courses: dict[str, Course] = {}

    def take(self, row: Mapping[str, float], step: int) -> None:
        """Take the returns in a row, if they are finite."""
        for name in itertools.chain(*_RETURNS):
            value = row.get(name, math.nan)
            if math.isfinite(value):
                self._courses.setdefault(name, Course()).add(step, float(value))

    @property
    def courses(self) -> dict[str, Course]:
        """The courses that are shown, evaluations first."""
        measured = [[name for name in kind if name in self._courses] for kind in _RETURNS]
        return {names[0]: self._courses[names[0]] for names in measured if names}

    @property
    def headline(self) -> tuple[str, Course] | None:
        """The metric that a run is judged by, and its course; None if no return was measured."""
        return next(iter(self.courses.items()), None)

    @property
    def row(self) -> dict[str, float]:
        """The metrics `final/NAME`, `best/NAME` and `best_step/NAME` of each."""
        return {
            f"{what}/{name}": value
            for name, course in self.courses.items()
            for what, value in (("final", course.last), ("best", course.best), ("best_step", course.best_step))
        }

    def __str__(self) -> str:
        if self.headline is None:
            return ""
        name, course = self.headline
        return f"{course.last:.4g}, best {course.best:.4g} ({name.removesuffix('/mean')})"

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured as plain data."""
        return {name: dataclasses.asdict(course) for name, course in self._courses.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._courses = {name: Course(**course) for name, course in state.items()}

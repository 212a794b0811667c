"""The results of a run: the last and the best of its mean returns, and their course."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rl8x import keys

MAX_POINTS: Final = 512


class Course:
    """One metric's last and best value, and at most `MAX_POINTS` of its points: every k-th, with a power of two for k.

    Attributes:
        last: The last value.
        best: The largest value.
        best_step: The clock at the first of these.
    """

    def __init__(self) -> None:
        self.last, self.best, self.best_step = math.nan, -math.inf, 0
        self._last_step = self._count = 0
        self._every = 1
        self._points: list[list[float]] = []

    def add(self, step: int, value: float) -> None:
        """Take a finite value at a step of the clock."""
        self.last, self._last_step = value, step
        if value > self.best:
            self.best, self.best_step = value, step
        if self._count % self._every == 0:
            self._points.append([step, value])
        self._count += 1
        if len(self._points) > MAX_POINTS:
            self._points = self._points[::2]
            self._every *= 2

    @property
    def points(self) -> list[list[float]]:
        """Steps and values, the last among them."""
        end = [self._last_step, self.last]
        return self._points if self._points[-1:] == [end] else [*self._points, end]

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {name.removeprefix("_"): value for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        for name in vars(self):
            setattr(self, name, state[name.removeprefix("_")])


class Results:
    """The courses of a run's mean returns, of evaluations and of training, as far as it has come.

    What is kept goes by metric. Of evaluations and of training each there is the first that was measured of
    `keys.EVALUATED_RETURNS` and `keys.TRAINED_RETURNS`, since sums over horizons say little where whole episodes do.
    """

    def __init__(self) -> None:
        self._courses: dict[str, Course] = {}

    def take(self, row: Mapping[str, float], step: int) -> None:
        """Take what a row has of them; what is not finite is no result."""
        for name in (*keys.EVALUATED_RETURNS, *keys.TRAINED_RETURNS):
            value = row.get(name, math.nan)
            if math.isfinite(value):
                self._courses.setdefault(name, Course()).add(step, float(value))

    @property
    def courses(self) -> dict[str, Course]:
        """The courses that are shown, evaluations first."""
        return dict(self._shown())

    def _shown(self) -> Iterator[tuple[str, Course]]:
        for kind in (keys.EVALUATED_RETURNS, keys.TRAINED_RETURNS):
            name = next((name for name in kind if name in self._courses), None)
            if name is not None:
                yield name, self._courses[name]

    @property
    def headline(self) -> tuple[str, Course] | None:
        """The metric that a run is judged by, and its course; None where no return was measured."""
        return next(self._shown(), None)

    @property
    def row(self) -> dict[str, float]:
        """The metrics `final/NAME`, `best/NAME` and `best_step/NAME` of each."""
        metrics: dict[str, float] = {}
        for name, course in self._shown():
            metrics |= {
                f"final/{name}": course.last,
                f"best/{name}": course.best,
                f"best_step/{name}": course.best_step,
            }
        return metrics

    def __str__(self) -> str:
        if self.headline is None:
            return ""
        name, course = self.headline
        return f"{name.removesuffix('/mean')} {course.last:.4g}, best {course.best:.4g}"

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured as plain data."""
        return {name: course.state_dict() for name, course in self._courses.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self._courses = {name: Course() for name in state}
        for name, course in self._courses.items():
            course.load_state_dict(state[name])

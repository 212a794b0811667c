"""Conditions on the values of metrics."""

from __future__ import annotations

import math
import numbers
import operator
from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from rl8x import keys
from rl8x.conditions.base import Condition, EvaluationName, Stats, Verdict


def _checked_name(name: object, owner: str) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"{owner}: `name` must be a metric's name, such as 'returns/mean'; got {name!r}.")
    return name


def _checked_number(value: object, owner: str, argument: str) -> float:
    """Return a number as Python's own, which run files and checkpoints can hold; NumPy's are numbers too."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{owner}: `{argument}` must be a finite number; got {value!r}.")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def checked_count(value: object, owner: str, argument: str) -> int:
    """Return a whole number of at least 1, or raise naming the argument of `owner`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{owner}: `{argument}` must be a whole number of at least 1; got {value!r}.")
    return int(value)


class _OnMetric(Condition):
    """A condition on one metric, `name`."""

    def __init__(self, name: str) -> None:
        self.name = _checked_name(name, type(self).__name__)

    @property
    def metric_names(self) -> set[str]:
        """The one metric."""
        return {self.name}


class _Bound(_OnMetric):
    """A condition on how a metric compares with a number."""

    holds: ClassVar[staticmethod[[float, float], bool]]

    def __init__(self, name: str, bound: float) -> None:
        super().__init__(name)
        self.bound = _checked_number(bound, type(self).__name__, "bound")

    def judge(self, stats: Stats) -> Verdict:
        """Compare the row's value; NaN compares with nothing."""
        value = stats.get(self.name)
        return None if value is None or math.isnan(value) else bool(self.holds(value, self.bound))

    def on_evaluation(self, evaluation_name: EvaluationName) -> Condition | None:
        """Return the same bound on the evaluation's equivalent of the metric; None if there is none."""
        name = evaluation_name(self.name)
        return None if name is None else type(self)(name, self.bound)


class HitsLowerBound(_Bound):
    """Met while the metric is at or below the bound; NaN gives no verdict.

    Args:
        name: The metric, such as `"losses/vf"`.
        bound: The bound, in the metric's unit; finite.

    Raises:
        TypeError: If the name is not a string.
        ValueError: If the bound is not a finite number.
    """

    holds = staticmethod(operator.le)


class HitsUpperBound(_Bound):
    """Met while the metric is at or above the bound; NaN gives no verdict.

    The value of the row decides, not the best so far: a score that was high once does not count later.

    Args:
        name: The metric, such as `"eval/returns/mean"`.
        bound: The bound, in the metric's unit; finite.

    Raises:
        TypeError: If the name is not a string.
        ValueError: If the bound is not a finite number.
    """

    holds = staticmethod(operator.ge)


class _Patient(_OnMetric):
    """A condition that is met when something held for `patience` fresh values in a row; meanwhile the verdict stays.

    A value that is not finite may complete the count, but does not tell that something goes on: it is no verdict then.
    """

    def __init__(self, name: str, patience: int = 5) -> None:
        super().__init__(name)
        self.patience = checked_count(patience, type(self).__name__, "patience")
        self.start()

    def start(self) -> None:
        """Clear the count and the value that the next one is compared with."""
        self.count = 0
        self.reference: float | None = None

    def judge(self, stats: Stats) -> Verdict:
        """Count the row's value if it is fresh."""
        value = stats.get(self.name)
        if value is None:
            return None
        fresh = getattr(stats, "fresh", None)
        if fresh is None or not self.name.startswith(keys.EVAL_PREFIX) or self.name in fresh:
            self.count = self.count + 1 if self.holds(float(value)) else 0
        if self.count >= self.patience:
            return True
        return False if math.isfinite(value) else None

    @abstractmethod
    def holds(self, value: float) -> bool:
        """Compare a value with the reference, and renew that.

        Args:
            value: The fresh value of the metric.

        Returns:
            Whether the value counts.
        """


class Plateau(_Patient):
    """Met when `patience` values in a row were each within `rtol` of the one before.

        |value_t - value_{t-1}| <= rtol * |value_{t-1}|

    Args:
        name: The metric.
        patience: How often in a row, at least 1. The first value compares with nothing.
        rtol: Relative tolerance, at least 0.

    Raises:
        TypeError: If the name is not a string.
        ValueError: If a number is out of its range.
    """

    def __init__(self, name: str, patience: int = 5, rtol: float = 1e-3) -> None:
        super().__init__(name, patience)
        self.rtol = _checked_number(rtol, "Plateau", "rtol")
        if self.rtol < 0:
            raise ValueError(f"Plateau: `rtol` must be at least 0; got {rtol!r}.")

    def holds(self, value: float) -> bool:
        """Compare with the value before; one that is not finite compares with nothing, before or after."""
        previous, self.reference = self.reference, value if math.isfinite(value) else None
        if previous is None or self.reference is None:
            return False
        return abs(value - previous) <= self.rtol * abs(previous)


class _StopsImproving(_Patient):
    """Met when the metric was no better than its best value so far `patience` times in a row."""

    better: ClassVar[staticmethod[[float, float], bool]]

    def holds(self, value: float) -> bool:
        """Compare with the best value so far."""
        if not math.isfinite(value) or (self.reference is not None and not self.better(value, self.reference)):
            return True
        self.reference = value
        return False


class StopsDecreasing(_StopsImproving):
    """Met when the metric did not fall below its lowest value so far `patience` times in a row.

    The first finite value is the lowest so far; one that is not finite never counts as lower.

    Args:
        name: The metric.
        patience: How often in a row, at least 1.

    Raises:
        TypeError: If the name is not a string.
        ValueError: If `patience` is not a whole number of at least 1.
    """

    better = staticmethod(operator.lt)


class StopsIncreasing(_StopsImproving):
    """Met when the metric did not rise above its highest value so far `patience` times in a row.

    The first finite value is the highest so far; one that is not finite never counts as higher.

    Args:
        name: The metric.
        patience: How often in a row, at least 1.

    Raises:
        TypeError: If the name is not a string.
        ValueError: If `patience` is not a whole number of at least 1.
    """

    better = staticmethod(operator.gt)


class NonFinite(Condition):
    """Met when one of the named metrics, or without names any of the row, is NaN or infinite.

    Args:
        names: The metrics, at least one; None is all of a row.

    Raises:
        TypeError: If a name is not a string.
        ValueError: If there is none.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        if isinstance(names, str):
            names = [names]
        self.names = None if names is None else [_checked_name(name, "NonFinite") for name in names]
        if self.names == []:
            raise ValueError("NonFinite: `names` must be at least one metric, or None for all; got an empty list.")

    def judge(self, stats: Stats) -> Verdict:
        """Look at the watched values that the row has; without all of them nobody knows that all are finite."""
        watched = self._watched(stats)
        if any(not math.isfinite(stats[name]) for name in watched):
            return True
        return False if watched and len(watched) == len(self.names or watched) else None

    def _watched(self, stats: Stats) -> list[str]:
        return [name for name in (stats if self.names is None else self.names) if name in stats]

    @property
    def metric_names(self) -> set[str]:
        """The names given; empty if all are watched."""
        return set(self.names or ())

    def on_evaluation(self, evaluation_name: EvaluationName) -> Condition | None:
        """The same condition: it watches what an evaluation measures too."""
        return NonFinite(self.names)

    def reason(self, stats: Stats) -> str:
        """Name the metrics that are not finite."""
        culprits = [f"{name} = {stats[name]}" for name in self._watched(stats) if not math.isfinite(stats[name])]
        more = f" and {len(culprits) - 5} more" if len(culprits) > 5 else ""
        return f"{self!r}: {', '.join(culprits[:5])}{more}"

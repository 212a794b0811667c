"""The conditions of rl8x: on metrics, on the clock, and conditions that a fresh evaluation must confirm.

Run files name each public class of this module in snake case: `WallTime` is `wall_time`.
"""

from __future__ import annotations

import math
import operator
import re
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from rl8x import keys
from rl8x.conditions.base import And, Condition, ConditionLike, Not, Or, Stats, Verdict, as_condition, parts
from rl8x.distributed import ranks
from rl8x.output import shown
from rl8x.plain import checked_number, own_values

_SECONDS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([dhms])\s*", re.ASCII)
_GIVE_BY: Final = "`by` is a condition on eval/* metrics, such as by=HitsUpperBound('eval/returns/mean', 100)."


def _metric(condition: Condition, name: Any) -> str:
    if not isinstance(name, str) or not name:
        owner = type(condition).__name__
        raise TypeError(f"{owner}: `name` must be a metric's name, such as 'returns/mean'; got {shown(name)}.")
    return name


class _OnMetric(Condition):
    """A condition on one metric, `name`."""

    def __init__(self, name: str) -> None:
        self.name = _metric(self, name)

    @property
    def metric_names(self) -> set[str]:
        return {self.name}


class _Bound(_OnMetric):
    """A condition that compares a metric with a number."""

    holds: ClassVar[staticmethod[[float, float], bool]]

    def __init__(self, name: str, bound: float) -> None:
        super().__init__(name)
        self.bound: float = checked_number(bound, "bound", type(self).__name__)

    def judge(self, stats: Stats) -> Verdict:
        value = stats.get(self.name)
        return None if value is None or math.isnan(value) else bool(self.holds(value, self.bound))


class HitsLowerBound(_Bound):
    """Met while the metric is at or below the bound; NaN gives no verdict.

    Args:
        name: The metric, such as `"losses/vf"`.
        bound: The bound, in the metric's unit; finite.
    """

    holds = staticmethod(operator.le)


class HitsUpperBound(_Bound):
    """Met while the metric is at or above the bound; NaN gives no verdict.

    The row's value decides, not the best so far: a score that was high once does not count later.

    Args:
        name: The metric, such as `"eval/returns/mean"`.
        bound: The bound, in the metric's unit; finite.
    """

    holds = staticmethod(operator.ge)


class _Patient(_OnMetric):
    """A condition that is met when `_holds` was true for `patience` fresh values in a row, after the first `after`."""

    def __init__(self, name: str, patience: int = 5, rtol: float = 0.0, atol: float = 0.0, after: int = 0) -> None:
        super().__init__(name)
        kind = type(self).__name__
        self.patience: int = checked_number(patience, "patience", kind, least=1, whole=True)
        self.rtol: float = checked_number(rtol, "rtol", kind, least=0)
        self.atol: float = checked_number(atol, "atol", kind, least=0)
        self.after: int = checked_number(after, "after", kind, least=0, whole=True)
        self.start()

    def start(self) -> None:
        """Forget all values."""
        self.seen = self.count = 0

    def judge(self, stats: Stats) -> Verdict:
        value = stats.get(self.name)
        if value is None:
            return None
        fresh = getattr(stats, "fresh", None)
        if fresh is None or not self.name.startswith(keys.EVAL_PREFIX) or self.name in fresh:
            self.seen += 1
            if self.seen > self.after:
                self.count = self.count + 1 if self._holds(float(value)) else 0
        if self.seen <= self.after:
            return None
        return self._is_met() or (False if math.isfinite(value) else None)

    def _is_met(self) -> bool:
        return self.count >= self.patience

    def _margin(self, reference: float) -> float:
        """Return the largest difference from a reference that still counts as equal."""
        return max(self.atol, self.rtol * abs(reference))

    @abstractmethod
    def _holds(self, value: float) -> bool:
        """Return whether a fresh value counts, compared with earlier ones."""


class Plateau(_Patient):
    """Met when means over `patience` values stay the same: noise averages out, and a slow rise is seen.

        |mean of the last `patience` values - mean of the `patience` before| <= max(atol, rtol * |mean before|)

    must hold for `patience` values in a row, at the earliest after 3 * `patience` - 1 values. `patience` + 1 exactly
    equal values, as repeated evaluations give, meet it at once. A value that is not finite restarts the windows.

    Args:
        name: The metric.
        patience: Length of both windows, and how often in a row the means must agree; at least 1.
        rtol: Tolerance relative to the earlier mean, at least 0.
        atol: Absolute tolerance, in the metric's unit, at least 0; for metrics around 0.
        after: How many of the metric's first values are left out, at least 0.
    """

    def __init__(self, name: str, patience: int = 5, rtol: float = 1e-3, atol: float = 0.0, after: int = 0) -> None:
        super().__init__(name, patience, rtol, atol, after)

    def start(self) -> None:
        """Forget all values."""
        super().start()
        self.values: list[float] = []

    def _is_met(self) -> bool:
        last = self.values[-self.patience - 1 :]
        return super()._is_met() or (len(last) > self.patience and len(set(last)) == 1)

    def _holds(self, value: float) -> bool:
        """Compare the means of the last two windows, once there are two; a value that is not finite empties them."""
        size = self.patience
        self.values = [*self.values[1 - 2 * size :], value] if math.isfinite(value) else []
        if len(self.values) < 2 * size:
            return False
        # By `fsum`, which does not depend on the order of the values
        before, now = (math.fsum(window) / size for window in (self.values[:size], self.values[size:]))
        return abs(now - before) <= self._margin(before)


class StopsIncreasing(_Patient):
    """Met when the metric did not rise above its highest value so far `patience` times in a row: no improvement.

        value > highest + max(atol, rtol * |highest|)

    makes a value the new highest. The first finite value is the first highest one, and a value that is not finite never
    counts as higher.

    Args:
        name: The metric.
        patience: How often in a row, at least 1.
        rtol: Least rise that counts, as a fraction of the highest value, at least 0.
        atol: The same in the metric's unit (elsewhere called `min_delta`), at least 0.
        after: How many of the metric's first values are left out, at least 0.
    """

    sign: ClassVar = 1

    def start(self) -> None:
        """Forget all values."""
        super().start()
        self.reference: float | None = None

    def _holds(self, value: float) -> bool:
        """Compare with the best value so far; a value that is better by more than the margin replaces it."""
        best = self.reference
        if not math.isfinite(value) or (best is not None and self.sign * (value - best) <= self._margin(best)):
            return True
        self.reference = value
        return False


class StopsDecreasing(StopsIncreasing):
    """Met when the metric did not fall below its lowest value so far `patience` times in a row.

        value < lowest - max(atol, rtol * |lowest|)

    makes a value the new lowest. The arguments are those of `StopsIncreasing`, with lower in place of higher.
    """

    sign: ClassVar = -1


def _seconds(duration: float | str) -> float:
    seconds = math.nan
    if isinstance(duration, str):
        text = duration.strip().lower()
        if text and not _DURATION.sub("", text):
            seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        seconds = float(duration)
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"WallTime needs positive seconds or a text such as '90s', '1h30m', '2d'; got {shown(duration)}."
        )
    return seconds


class WallTime(Condition):
    """Met when the run has taken this long; a resumed run goes on counting, unless it is given another duration.

    It is checked at each row, and while a run waits for programs: a run ends with the first step that ends later.

    Args:
        duration: Seconds, > 0, or a text such as "90s", "1h30m", "1.5h" or "2d".

    Attributes:
        seconds: The same in seconds.

    Raises:
        ValueError: If it is neither, or not positive.
    """

    def __init__(self, duration: float | str) -> None:
        self.duration = own_values(duration)
        self.seconds = _seconds(self.duration)
        self._began: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the start, including those before a resume."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def start(self) -> None:
        """Start counting."""
        self._began = time.monotonic()

    def judge(self, stats: Stats) -> Verdict:
        """Compare rank 0's clock with the duration, whatever the row."""
        if self._began is None:
            self.start()
        return bool(ranks().first("the clock", self.elapsed >= self.seconds))

    def own_state(self) -> dict[str, Any]:
        """The seconds elapsed."""
        return {"elapsed": self.elapsed}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on counting from the saved seconds."""
        self._began = time.monotonic() - float(state["elapsed"])

    def reason(self, stats: Stats) -> str:
        """Return the condition and how long the run took."""
        return f"{self!r}: {self.elapsed:.0f} s"


class NonFinite(Condition):
    """Met when one of the named metrics, or without names any metric of the row, is NaN or infinite.

    Args:
        names: The metrics, at least one; None is all of a row.

    Raises:
        TypeError: If a name is not a string.
        ValueError: If the list is empty.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
            names = [names]
        self.names = None if names is None else [_metric(self, name) for name in names]
        if self.names == []:
            raise ValueError("NonFinite: `names` must be at least one metric, or None for all; got an empty list.")

    def judge(self, stats: Stats) -> Verdict:
        """Check the watched values of the row; None if they are finite but some are missing."""
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

    def reason(self, stats: Stats) -> str:
        """Return the condition and the metrics that are not finite."""
        culprits = [f"{name} = {stats[name]}" for name in self._watched(stats) if not math.isfinite(stats[name])]
        more = f" and {len(culprits) - 5} more" if len(culprits) > 5 else ""
        return f"{self!r}: {', '.join(culprits[:5])}{more}"


class Confirmed(Condition):
    """Met when a condition is met and then confirmed by each of `evaluations` fresh evaluations of the current policy.

    Train statistics are noisy and lag behind the policy. Whenever `condition` is met, the trainer evaluates up to
    `evaluations` times, until one does not confirm it. If the trainer cannot evaluate at this step, the next row that
    meets `condition` is tried. The measured metrics are added to the row, also for other conditions.

    Args:
        condition: The condition on the rows, usually on train metrics.
        evaluations: How many evaluations must confirm it, at least 1.
        by: The condition on the evaluation's `eval/*` metrics and the rest of the row. None: `condition` itself, on the
            corresponding evaluation metrics, such as `eval/returns/mean` for `episodes/returns/mean`. Conditions that
            count rows, and plain callables, have no such form: give `by`.

    Raises:
        TypeError: If an argument is not a condition.
        ValueError: If `evaluations` is less than 1, or an evaluation cannot decide the condition and `by` is None, or
            `by` reads metrics of training alone.
    """

    condition_arguments = ("condition", "by")
    evaluates = True

    def __init__(self, condition: ConditionLike, evaluations: int = 1, by: ConditionLike | None = None) -> None:
        self.condition = as_condition(condition)
        self.evaluations: int = checked_number(evaluations, "evaluations", "Confirmed", least=1, whole=True)
        self.by = None if by is None else as_condition(by)
        if self.by is None:
            of_rows = all(
                isinstance(part, And | Or | Not | _Bound | NonFinite | WallTime) for part in parts(self.condition)
            )
            if not of_rows or not any(
                is_collected(name) or _is_evaluated(name) for name in self.condition.metric_names
            ):
                raise ValueError(f"Confirmed: an evaluation cannot decide {self.condition!r}; give `by`. {_GIVE_BY}")
        elif self.by.metric_names and not any(map(_is_evaluated, self.by.metric_names)):
            raise ValueError(f"Confirmed: no evaluation measures what by={self.by!r} reads. {_GIVE_BY}")
        self._trainer: weakref.ref[Any] | None = None  # the trainer may be gone before the condition
        self._evaluated: Mapping[str, str] = {}  # without `by`: what evaluations call the metrics of `condition`
        self._measured: Mapping[str, float] = {}

    @property
    def awaited_names(self) -> set[str]:
        """The awaited names of `condition`; the metrics that `by` reads are measured when it is judged."""
        return self.condition.awaited_names

    def bind(self, trainer: Any) -> None:
        """Store the trainer; raise if its evaluations do not measure the metrics that the condition reads."""
        super().bind(trainer)
        self._trainer = weakref.ref(trainer)
        if self.by is not None:
            return
        names = {name: trainer.evaluation_name(name) for name in self.condition.metric_names}
        if odd := sorted(name for name, evaluated in names.items() if evaluated is None):
            other = [name for name in keys.TRAINED_RETURNS if trainer.evaluation_name(name)]
            raise ValueError(
                f"{self!r}: no evaluation of this trainer measures what {' and '.join(odd)} is in a row of training. "
                f"Watch {' or '.join(other)}, or give `by`. {_GIVE_BY}"
            )
        self._evaluated = names

    def judge(self, stats: Stats) -> Verdict:
        """Judge the condition, and evaluate if it is met; None if no evaluation can be made at this step."""
        verdict = self.condition.judge(stats)
        # A callable may be met on one rank only, but all ranks have to evaluate.
        if not ranks().any("what is to be confirmed", bool(verdict)):
            return verdict
        trainer = None if self._trainer is None else self._trainer()
        if trainer is None:
            raise RuntimeError("Confirmed evaluates through a trainer: pass it to run(), or call bind(trainer) first.")
        for _ in range(self.evaluations):
            measured = trainer.evaluate_now()
            if measured is None:
                return None
            self._measured = measured
            confirmed = self._judge_measured(stats)
            if not ranks().all("what was measured", bool(confirmed)):
                return False if ranks().any("what was refuted", confirmed is not None and not confirmed) else None
        return True

    def _judge_measured(self, stats: Stats) -> Verdict:
        """Judge the row with the last evaluation's metrics, which all count as new: a plain dict has no `fresh`."""
        row = {**stats, **self._measured}
        if self.by is not None:
            return self.by.judge(row)
        others = {name: value for name, value in row.items() if name not in self._evaluated}
        return self.condition.judge(others | {name: row[new] for name, new in self._evaluated.items() if new in row})

    def own_state(self) -> dict[str, Any]:
        """Return no state, as its measurements belong to one row."""
        return {}

    def reason(self, stats: Stats) -> str:
        """Return why the condition is met, with the metrics of the last evaluation."""
        row = {**stats, **self._measured}
        names = sorted({*self.metric_names, *self._evaluated.values()} & row.keys())
        return f"{self!r}: {', '.join(f'{name} = {row[name]:g}' for name in names)}"


def is_collected(name: str) -> bool:
    """Whether a metric of a training row comes from collecting, so that evaluations may have an equivalent."""
    return name in keys.COLLECT_METRICS or name.startswith((keys.INFO_PREFIX, keys.AGENTS_PREFIX))


def _is_evaluated(name: str) -> bool:
    return name.startswith(keys.EVAL_PREFIX)

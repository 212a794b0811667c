"""Schedules of hyperparameters by the clock: transitions, or updates for algorithms without an environment."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

KINDS: Final = ("step", "interp")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A value as a function of the number of transitions, or of updates if an algorithm learns from a data set.

    Args:
        points: (transitions, value) pairs; the first at 0, transitions increasing.
        kind: `"step"` holds each value until the next point; `"interp"` interpolates linearly between points. Both hold
            the last value for good.
        name: Name of the hyperparameter, for error messages.

    Raises:
        ValueError: If the kind is unknown, or the points are not such pairs of finite numbers.
    """

    points: tuple[tuple[int, float], ...]
    kind: str = "step"
    name: dataclasses.InitVar[str] = "schedule"

    def __post_init__(self, name: str) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"`{name}`: the kind must be 'step' or 'interp'; got {self.kind!r}.")
        object.__setattr__(self, "points", _checked_points(self.points, name))

    @classmethod
    def make(cls, spec: object, *, kind: str = "step", name: str = "schedule") -> Schedule:
        """Create a schedule from a number or a list of pairs.

        Args:
            spec: A number, a list of (transitions, value) pairs, the result of `to_dict`, or a schedule (returned).
            kind: As in the class, for a list of pairs.
            name: As in the class.

        Raises:
            ValueError: If the points are not in order, do not begin at 0, or are not finite numbers; or the kind is
                unknown.
            TypeError: If `spec` is none of these forms.
        """
        if isinstance(spec, Schedule):
            return spec
        if _is_number(spec):
            return cls(((0, spec),), kind, name)
        if isinstance(spec, Mapping):
            if spec.get("kind") == "adaptive":
                raise ValueError(
                    f"`{name}`: only PPO's lr_schedule can be of kind 'adaptive', which goes by its KL divergence. Use "
                    "a list of points here."
                )
            if set(spec) != {"kind", "points"}:
                raise ValueError(
                    f"`{name}` as a mapping has the keys kind, points; got {', '.join(map(str, spec)) or 'none'}."
                )
            return cls.make(spec["points"], kind=spec["kind"], name=name)
        if _is_list(spec):
            return cls(tuple(spec), kind, name)
        raise TypeError(f"`{name}` must be a number or a list of (transitions, value) pairs; got {spec!r}.")

    def __call__(self, clock: float) -> float:
        """Return the value at an algorithm's clock: the number of transitions (of all copies), or of updates."""
        after = bisect_right(self.points, clock, key=lambda point: point[0])
        if after == 0:
            return self.points[0][1]
        begin, value = self.points[after - 1]
        if self.kind == "step" or after == len(self.points):
            return value
        end, goal = self.points[after]
        share = (clock - begin) / (end - begin)
        return value * (1.0 - share) + goal * share

    def bounded(self, low: float, high: float, name: str) -> Schedule:
        """Return the schedule itself if all its values are in a range.

        Args:
            low: The smallest legal value.
            high: The largest legal value; may be infinite.
            name: Name of the schedule in the error.

        Raises:
            ValueError: If a value lies outside.
        """
        for _, value in self.points:
            if not low <= value <= high:
                limit = f" and at most {high:g}" if high < math.inf else ""
                raise ValueError(f"`{name}` must stay at least {low:g}{limit}; got {value!r}.")
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can represent and `make` accepts."""
        return {"kind": self.kind, "points": [list(point) for point in self.points]}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked_points(points: Sequence[Any], name: str) -> tuple[tuple[int, float], ...]:
    """Return the pairs as a tuple of tuples, after checking them."""
    listed = points if _is_list(points) else []
    pairs = [tuple(point) for point in listed if _is_list(point) and len(point) == 2]
    legal = len(pairs) == len(listed) > 0 and all(_is_number(x) and math.isfinite(x) for pair in pairs for x in pair)
    times = [time for time, _ in pairs] if legal else [-1]
    if times[0] != 0 or any(time != int(time) for time in times) or times != sorted(set(times)):
        raise ValueError(
            f"`{name}` must be a list of (transitions, value) pairs, as in [[0, 1e-3], [1000000, 1e-4]], finite "
            f"numbers all, with whole transitions that begin at 0 and increase; got {points!r}."
        )
    return tuple((int(time), float(value)) for time, value in pairs)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)

"""Detect rows that repeat after a resume, and points that a resume supersedes.

A run that resumes from a checkpoint repeats the rows that came after it, which are not logged twice. The process that
appends to the journal knows old rows from the journal (`JournalRepeats`); if there is no journal, as on another
machine, the sending process knows them from the server (`ServerRepeats`).

If a row differs from the old one at its step, training has diverged from the old course, and all points from that step
on that were logged before the resume are superseded ("left behind"). MLflow's client cannot delete points, so a tag of
the run marks them, and every reader of a history leaves them out. In a local database they are also renamed to
`left/NAME`, so that MLflow's page draws the current and the superseded course as two curves.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

LEFT_TAG: Final = "rl8x.left_behind"
LEFT: Final = "left/"
# Prefixes that no resume supersedes: renamed points, and machine samples, whose steps are seconds since the start.
NOT_OF_A_COURSE: Final = (LEFT, "system/")
# Metrics that are bit-identical on the same course, unlike times and memory.
_TELLING: Final = ("losses/", "returns/", "episodes/returns/", "eval/returns/", "eval/horizon_returns/")
_MOST: Final = 100  # entries in the tag, which has room for 8000 characters

LoggedRow: TypeAlias = tuple[int, int, dict[str, float]]
"""A row: step, time in milliseconds since 1970, values by name."""


class Point(NamedTuple):
    """One value of one metric; the timestamp is in milliseconds since 1970."""

    name: str
    value: float
    timestamp: int
    step: int


class LeftBehind(NamedTuple):
    """The superseded points: those at `step` or later that are older than `before`, in milliseconds since 1970."""

    step: int
    before: int

    def has(self, name: str, step: int, timestamp: int) -> bool:
        """Whether a point is superseded."""
        return step >= self.step and timestamp < self.before and not name.startswith(NOT_OF_A_COURSE)

    def __str__(self) -> str:
        when = datetime.datetime.fromtimestamp(self.before / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return (
            f"Went back on {when}: points from step {self.step:,} on that are older are of a course that was left, "
            f"`{LEFT}...` in a local database."
        )


def left_behind(tags: Mapping[str, str]) -> list[LeftBehind]:
    """Read the superseded points from a run's tags."""
    try:
        return [LeftBehind(int(step), int(before)) for step, before in json.loads(tags.get(LEFT_TAG, "[]"))]
    except (ValueError, TypeError, OverflowError):  # a user may have changed the tag
        return []


def left_tag(left: Sequence[LeftBehind]) -> dict[str, str]:
    """Return the tag that marks superseded points."""
    return {LEFT_TAG: json.dumps(left[-_MOST:])}


def _is_of_course(name: str, value: float, other: float) -> bool:
    """Whether two values of a metric at one step can be of the same course, which repeats bit by bit."""
    return not name.startswith(_TELLING) or value == other or (math.isnan(value) and math.isnan(other))


class Repeats:
    """Compares new rows with the points that a run had when it was resumed, each of which matches once."""

    def __init__(self, since: int | None) -> None:
        self.since = since
        self.left: LeftBehind | None = None
        # Repeated points of the last step: they become new if a later row of this step differs.
        self._repeated: list[LoggedRow] = []

    def new_rows(self, row: LoggedRow) -> list[LoggedRow]:
        """Return the rows to log for a new row; sets `left` if the row differs from the old one at its step."""
        step, time_ms, values = row
        if self.left is not None and step >= self.left.step:
            return [row]
        known = {name: olds for name, olds in self._known_at(step, values).items() if olds}
        same = {name: [old for old in known[name] if _is_of_course(name, values[name], old)] for name in known}
        if self.since is not None and time_ms < self.since:  # a thinned row of before the resume, sent at the end
            known = {name: known[name] for name in known if same[name]}
        elif self.since is not None and not all(same.values()):
            self.left = LeftBehind(step, self.since)
            return [*(other for other in self._repeated if other[0] >= step), row]
        if not known:
            return [row]
        for name in known:
            known[name].remove((same[name] or known[name])[0])
        repeated = {name: values[name] for name in known}
        self._repeated = [*(other for other in self._repeated if other[0] == step), (step, time_ms, repeated)]
        new = {name: value for name, value in values.items() if name not in known}
        return [(step, time_ms, new)] if new else []

    def _known_at(self, step: int, values: Mapping[str, float]) -> Mapping[str, list[float]]:
        """Return the old values of metrics at a step that have not repeated yet; the caller removes values it uses."""
        raise NotImplementedError


class JournalRepeats(Repeats):
    """Compares with the rows of the run's journal, read from the first repeated step on."""

    def __init__(self, since: int, rows: Callable[[], Iterable[LoggedRow]]) -> None:
        super().__init__(since)
        self._rows = rows
        self._first: float = math.inf
        self._known: dict[int, dict[str, list[float]]] = {}

    def _known_at(self, step: int, values: Mapping[str, float]) -> Mapping[str, list[float]]:
        if step < self._first:
            before, self._first = self._first, step
            for at, _, row in self._rows():
                if step <= at < before:
                    known = self._known.setdefault(at, {})
                    for name, value in row.items():
                        known.setdefault(name, []).append(value)
        known = self._known.get(step, {})
        return {name: known[name] for name in values if name in known}


class ServerRepeats(Repeats):
    """Compares with each metric's last step on the server, and with the histories of bit-identical metrics.

    If the server `has_newer` points, from after the resume, the histories of all metrics are read to tell them apart.
    """

    def __init__(
        self,
        since: int | None,
        last: Mapping[str, int],
        history: Callable[[str], Iterable[Point]],
        tags: Mapping[str, str],
        *,
        has_newer: bool = False,
    ) -> None:
        super().__init__(since)
        self._last, self._has_newer = last, has_newer
        self._history = history
        self._before = left_behind(tags)
        self.left = next((left for left in self._before if left.before == since), None)
        self._histories: dict[str, dict[int, list[float]]] = {}

    def _known_at(self, step: int, values: Mapping[str, float]) -> Mapping[str, list[float]]:
        maybe = [name for name in values if step <= self._last.get(name, step - 1)]
        seen = {name: self._read(name).get(step, []) for name in maybe if self._has_newer or name.startswith(_TELLING)}
        if seen and not any(seen.values()):
            return {}  # such as another evaluation at a step that the server has
        return {name: seen.get(name, [values[name]]) for name in maybe}

    def _read(self, name: str) -> dict[int, list[float]]:
        if name not in self._histories:
            steps: dict[int, list[float]] = {}
            for point in self._history(name):
                is_left = any(left.has(name, point.step, point.timestamp) for left in self._before)
                if not is_left and (self.since is None or point.timestamp < self.since):
                    steps.setdefault(point.step, []).append(point.value)
            self._histories[name] = steps  # only now, as the store may go away meanwhile
        return self._histories[name]


def read_rows(ops: Iterable[Mapping[str, Any]]) -> list[LoggedRow]:
    """Return the valid rows among ops, without superseded points."""
    rows, left = [], []
    for op in ops:
        try:
            if op["op"] == "left":
                left.append(LeftBehind(int(op["s"]), int(op["t"])))
            elif op["op"] == "m":
                rows.append((int(op["s"]), int(op["t"]), {str(name): float(op["m"][name]) for name in op["m"]}))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    for step, time_ms, row in rows if left else ():
        for name in [name for name in row if any(each.has(name, step, time_ms) for each in left)]:
            del row[name]
    return rows

"""What a run had when it was resumed, so that nothing of it is logged twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rl8x.tracking.store import MLflowStore, Point


class KnownPoints:
    """What a run had when it was resumed, each point once: a run that goes on from a checkpoint repeats what followed.

    A point beyond those that the run had, such as a further evaluation at the same step, is new.

    Args:
        run_id: The run.
        last_steps: The last step of each metric that it has.
    """

    def __init__(self, run_id: str, last_steps: Mapping[str, int]) -> None:
        self._run_id = run_id
        self._last = last_steps
        self._left: dict[str, Counter[int]] = {}
        self._taken: list[Point] = []  # known points of rows that have not been acknowledged

    def new(self, points: Sequence[Point], store: MLflowStore) -> list[Point]:
        """Return those points that the run did not have; each of the others counts as repeated from now on.

        A metric's history is read only where it may matter. Where one cannot be read, no point counts as repeated.
        """
        for point in points:
            if self._may_repeat(point) and point.name not in self._left:
                self._left[point.name] = Counter(store.logged_steps(self._run_id, point.name))
        new = []
        for point in points:
            if self._may_repeat(point) and self._left[point.name][point.step] > 0:
                self._left[point.name][point.step] -= 1
                self._taken.append(point)
            else:
                new.append(point)
        return new

    def _may_repeat(self, point: Point) -> bool:
        return point.step <= self._last.get(point.name, point.step - 1)

    def confirm(self) -> None:
        """Note that the rows which were compared have been acknowledged: they will not be compared again."""
        self._taken = []

    def put_back(self) -> None:
        """Put back what was taken for rows that have not been acknowledged, and are read again."""
        for point in self._taken:
            self._left[point.name][point.step] += 1
        self._taken = []

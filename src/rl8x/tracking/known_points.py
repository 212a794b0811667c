"""What a run had when it was resumed, so that nothing of it is logged twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rl8x.tracking.store import Point, Store


class KnownPoints:
    """What a run had when it was resumed, each point once: a run that goes on from a checkpoint repeats what followed.

    A point beyond those that the run had, such as a further evaluation at the same step, is new.

    Args:
        run_id: The run.
        last_steps: The last step of each metric that it has.
    """

    def __init__(self, run_id: str, last_steps: Mapping[str, int]) -> None:
        self.run_id = run_id
        self._last = last_steps
        self._left: dict[str, Counter[int]] = {}
        self._unsent: list[Point] = []

    def take(self, point: Point, store: Store) -> bool:
        """Say whether the run had this point, which counts as repeated then.

        A metric's history is read only where it may matter.
        """
        if point.name not in self._last or point.step > self._last[point.name]:
            return False
        if point.name not in self._left:
            self._left[point.name] = Counter(store.logged_steps(self.run_id, point.name))
        known = self._left[point.name][point.step] > 0
        if known:
            self._left[point.name][point.step] -= 1
            self._unsent.append(point)
        return known

    def new(self, points: Sequence[Point], store: Store) -> list[Point]:
        """Return those points that the run did not have; where one cannot be looked up, none counts as repeated."""
        begin = len(self._unsent)
        try:
            return [point for point in points if not self.take(point, store)]
        except Exception:
            for point in self._unsent[begin:]:
                self._left[point.name][point.step] += 1
            del self._unsent[begin:]
            raise

    def confirm(self) -> None:
        """Note that the rows which were compared have been acknowledged: they will not be compared again."""
        self._unsent = []

    def forget_unsent(self) -> None:
        """Put back what was taken for rows that have not been acknowledged, and are read again."""
        for point in self._unsent:
            self._left[point.name][point.step] += 1
        self._unsent = []

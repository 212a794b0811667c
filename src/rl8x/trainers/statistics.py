"""What `step()`, `eval()` and `run()` return."""

from __future__ import annotations

from collections.abc import Mapping


class TrainStats(dict[str, float]):
    """One row of metrics, with the latest evaluation's beside the step's own.

    Attributes:
        fresh: Names that this step or an evaluation right after it measured; the others are older evaluations'.
        stop_reason: Why `run()` stopped; None while it goes on.
    """

    def __init__(self, values: Mapping[str, float], fresh: frozenset[str] | None = None) -> None:
        super().__init__(values)
        self.fresh = frozenset(values) if fresh is None else fresh
        self.stop_reason: str | None = None

    def add(self, values: Mapping[str, float]) -> None:
        """Take in what was measured after the row."""
        self.update(values)
        self.fresh |= values.keys()


class EvalStats(dict[str, float]):
    """The metrics of one evaluation, under `eval/`, or `eval/<name>/` where it was given a name."""

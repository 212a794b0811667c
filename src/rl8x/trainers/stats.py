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


class EvalStats(dict[str, float]):
    """The metrics of one evaluation, under the names that they are tracked by (`eval/...`)."""

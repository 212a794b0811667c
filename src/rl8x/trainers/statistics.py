"""The rows of statistics that `step()`, `eval()` and `run()` return, and the timer of their parts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch


class TrainStats(dict[str, float]):
    """One row of metrics by name, with the latest evaluation's beside the step's own.

    Args:
        values: The metrics by name.
        fresh: What this step measured; None is all of them.
        earlier: What an evaluation measured that no row before has shown.

    Attributes:
        fresh: Names that this step or an evaluation right after it measured, and `earlier`; the others are older
            evaluations'.
        earlier: Those of `fresh` that were measured before the step, by the policy of then.
        stop_reason: Why `run()` stopped; None while it goes on.
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
        """Take in what was measured after the row.

        Args:
            values: Metrics by name.
        """
        self.update(values)
        self.fresh |= values.keys()
        self.earlier -= values.keys()


class EvalStats(dict[str, float]):
    """The metrics of one evaluation, under `eval/`, or `eval/<name>/` where it was given a name."""


class Timer:
    """Measures a block; on CUDA by events, because the host returns long before the device is done.

    `elapsed_ms` may be read once the device has been waited for anyway: after the step's one host copy.
    """

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
        """Milliseconds between entering and leaving the block, on the device's clock where it has one."""
        if self._events:
            self._events[1].synchronize()
            return float(self._events[0].elapsed_time(self._events[1]))
        return (self._end - self._begin) * 1e3

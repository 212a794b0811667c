"""Times of what runs on the device, read without waiting for it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch


class Timer:
    """Measures a block; on CUDA by events, because the host returns long before the device is done.

    `elapsed_ms` may be read once the device has been waited for anyway: after the step's one host copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[Any, Any] | None = None
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._events = (begin, end)
        self._begin = self._end = 0.0

    def __enter__(self) -> Timer:
        self._begin = time.perf_counter()
        if self._events is not None:
            self._events[0].record()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._events is not None:
            self._events[1].record()
        self._end = time.perf_counter()

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds between entering and leaving the block, on the device's clock where it has one."""
        if self._events is not None:
            self._events[1].synchronize()
            return float(self._events[0].elapsed_time(self._events[1]))
        return (self._end - self._begin) * 1e3

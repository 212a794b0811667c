"""Threads that share the chunks of an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_T = TypeVar("_T")


class Workers:
    """Threads that each do a job at the same time; PyTorch's operations let the others go on meanwhile.

    Args:
        count: How many, the calling thread included.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def share(self, jobs: Sequence[Callable[[], _T]]) -> list[_T]:
        """Do jobs, at most `count`, side by side, the first in the calling thread; return their results in order."""
        if len(jobs) > 1 and self._pool is None:
            # A thread's number of threads is its own.
            self._pool = ThreadPoolExecutor(self.count - 1, "rl8x-worker", torch.set_num_threads, (1,))
        others = [self._pool.submit(job) for job in jobs[1:]] if self._pool is not None else []
        return [jobs[0](), *(other.result() for other in others)]

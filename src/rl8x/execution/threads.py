"""CPU threads: how many run an operation, and worker threads that process the chunks of an update."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import torch

_T = TypeVar("_T")

# Rows times weights up to which one thread is faster than two: 512 rows of two perceptrons of 64 units a layer.
_SHARED_WORK: Final = 6_000_000
# The same for workers in eager execution, which compete for the GIL: 2,500 such rows.
_SHARED_WORK_EAGER: Final = 24_000_000

# MKL selects its kernels at its first call. If two threads make that call at once, one may get sines from a less
# precise kernel, with errors of 1e-5: seen in one of twelve processes (torch 2.13, two Xeon cores). This call is made
# at import, by one thread.
torch.ones(1).sin()

_GENERATORS: Final = threading.RLock()


@contextlib.contextmanager
def kept_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore torch's own generators, the CPU's and the device's, at the end.

    All threads of a process have the same ones: another that wants this too waits, or each would draw of the other's.
    """
    on_cuda = device is not None and device.type == "cuda"
    with _GENERATORS, torch.random.fork_rng(devices=[device] if on_cuda else []):
        yield


class flushed_denormals:  # noqa: N801 - a function in all but its two halves
    """Flush denormal numbers to 0 in this thread's CPU operations, as compiled programs do.

    Adam's moments of weights without gradient become denormal within a thousand updates. Each operation on one then
    costs a hundred cycles, a fifth of the time of SAC's eager updates.
    """

    def __init__(self, device: torch.device) -> None:
        self.sets = device.type == "cpu" and sys.float_info.min / 2.0 > 0.0  # else the user has already set it

    def __enter__(self) -> None:
        if self.sets:
            torch.set_flush_denormal(True)

    def __exit__(self, *exception: object) -> None:
        if self.sets:
            torch.set_flush_denormal(False)


class Workers:
    """`count` threads that run jobs in parallel, the calling one included; PyTorch's operations release the GIL."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def share(self, jobs: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run at most `count` jobs in parallel, the first in the calling thread, and return their results in order."""
        if len(jobs) > 1 and self._pool is None:
            # The number of intra-op threads is set per thread.
            self._pool = ThreadPoolExecutor(self.count - 1, "rl8x-worker", torch.set_num_threads, (1,))
        others = [self._pool.submit(job) for job in jobs[1:]] if self._pool is not None else []
        return [jobs[0](), *(other.result() for other in others)]


class Threads:
    """Chooses the number of CPU threads for programs by their amount of work; no effect on accelerators.

    Args:
        device: The device of the programs.
        eager: Says whether they run eagerly now.
    """

    def __init__(self, device: torch.device, eager: Callable[[], bool]) -> None:
        self._on_cpu = device.type == "cpu"
        self._eager = eager
        self._workers: dict[int, Workers] = {}

    def for_work(self, work: int) -> contextlib.AbstractContextManager[None]:
        """Use one thread within the context if the work, in rows times weights, is too small for several."""
        return self._threads(1) if work <= _SHARED_WORK else contextlib.nullcontext()

    @contextlib.contextmanager
    def workers_for(self, work: int) -> Iterator[Workers]:
        """Yield one worker for each thread if the work is large enough, else one.

        Intra-op threads synchronise after every operation, and read rows from each other's caches. A worker keeps its
        rows from the first operation to the last, and runs each operation on one thread.
        """
        shares = work > (_SHARED_WORK_EAGER if self._eager() else _SHARED_WORK)
        count = torch.get_num_threads() if self._on_cpu and shares else 1
        with self._threads(1):
            yield self._workers.setdefault(count, Workers(count))

    def _threads(self, count: int) -> contextlib.AbstractContextManager[None]:
        before = torch.get_num_threads()
        return _threads(count, before) if self._on_cpu and count != before else contextlib.nullcontext()


@contextlib.contextmanager
def _threads(count: int, before: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

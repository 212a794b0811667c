"""Settings of glibc's allocator that keep freed memory in the process for reuse."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Final

# glibc's names for what is set here (malloc.h).
_M_MXFAST: Final = 1
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_MAX: Final = -4


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory for reuse, instead of returning it to the system; glibc only.

    Every pass over a minibatch frees and allocates the same few megabytes. If they are returned to the system each
    time, every page is mapped and zeroed again, which costs more than the arithmetic on it: 32% of PPO on one thread
    (Zen 5).
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # No fast bins: they would be consolidated at every large allocation, of which there are many.
        mallopt(_M_MXFAST, 0)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 * 2**20)


def give_back_freed_memory() -> None:
    """Collect garbage, and return freed memory to the system."""
    gc.collect()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

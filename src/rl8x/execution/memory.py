"""Allocator settings by which memory that tensors have freed is kept for the next ones."""

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
    """Have the C library keep the memory that tensors free, for the next ones, instead of giving it back at once.

    Every pass over a minibatch frees and takes the same few megabytes. Given back to the system and taken again, each
    page is zeroed and mapped anew, which costs more than the arithmetic on it: 32% of PPO on one thread (Zen 5). Does
    nothing where the library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Small blocks set aside for later are gathered whenever a larger one is asked for, which is all the time.
        mallopt(_M_MXFAST, 0)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 * 2**20)


def give_back_freed_memory() -> None:
    """Give the system back what is kept, so that it shows as available; what nothing refers to any more too."""
    gc.collect()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

"""Memory: settings of glibc's allocator that keep what is freed for reuse, and tensors that take none."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# glibc's names for what is set here (malloc.h).
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_MAX: Final = -4


def keep_freed_memory() -> None:
    """Make the allocator keep freed memory for reuse, instead of returning it to the system; glibc only.

    Every eager pass over a minibatch frees and allocates the same few megabytes. If they are returned to the system
    each time, every page is mapped and zeroed again: without this eager PPO on 4096 x 32 steps takes 1.1 to 1.2 times
    as long (CPU time of one thread, Xeon, glibc 2.36). Compiled programs keep their own memory, and gain nothing.
    """
    mallopt = _of_glibc("mallopt")
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_M_TOP_PAD, 64 * 2**20)


def give_back_freed_memory() -> None:
    """Collect garbage, and return freed memory to the system."""
    gc.collect()
    _of_glibc("malloc_trim")(0)


def _of_glibc(name: str) -> Callable[..., object]:
    """Return a function of glibc's; elsewhere one that does nothing."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
    return function or (lambda *_: None)


_FACTORIES: Final = frozenset((torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye))
_SMALL: Final = 2**12


class Unallocated(TorchFunctionMode):
    """Within it tensors have a shape, but neither numbers nor memory; small ones have both, since some are read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make a tensor of more than a few thousand numbers on no device, and leave it there."""
        kwargs = kwargs or {}
        if func in _FACTORIES:
            shaped = func(*args, **{**kwargs, "device": "meta"})
            return shaped if shaped.numel() > _SMALL else func(*args, **kwargs)
        in_place = func.__name__.endswith("_") and not func.__name__.endswith("__")
        stays = func is Tensor.to or (in_place and func is not Tensor.requires_grad_)
        if stays and args and isinstance(args[0], Tensor) and args[0].is_meta:
            return args[0]  # torch would import its compiler to say as much
        if func is Tensor.clone and args[0].numel() > _SMALL:  # in copies of models that are given
            return torch.empty_like(args[0], device="meta")
        return func(*args, **kwargs)

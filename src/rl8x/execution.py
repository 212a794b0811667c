"""How programs run: the one place that compiles.

Algorithms hand over functions of tensors. Eager execution calls them as they are and is the reference. Compiled
execution traces each once for every set of shapes and has torch.compile turn the trace into fused loops. Tracing first
leaves nothing of Python in what is compiled: no module, no dict, no attribute that would have to be checked at every
call, which at small batches costs more than the arithmetic.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Mode = Literal["auto", "eager", "compile"]
Precision = Literal["fp32", "tf32", "bf16"]
MODES: Final = ("auto", "eager", "compile")
PRECISIONS: Final = ("fp32", "tf32", "bf16")

# glibc's names for what `keep_freed_memory` sets (malloc.h).
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_MAX: Final = -4


class Execution:
    """How the programs of one algorithm run.

    Args:
        mode: `"eager"`, `"compile"`, or `"auto"`, which is eager: compiling costs 10 to 40 s, which only long runs earn
            back.
        precision: `"fp32"`; `"tf32"`: products in TF32 on CUDA; `"bf16"`: products in bfloat16, all else in float32.
        device: Where the programs run.

    Raises:
        ValueError: If the precision is not to be had on the device.
    """

    def __init__(self, mode: Mode, precision: Precision, device: torch.device) -> None:
        if precision == "tf32" and device.type != "cuda":
            raise ValueError(f"precision='tf32' needs a CUDA device; got {device}. Use 'fp32' or 'bf16'.")
        self.mode: Literal["eager", "compile"] = "compile" if mode == "compile" else "eager"
        self.precision = precision
        self.device = device
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        if device.type == "cpu":
            keep_freed_memory()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a policy's products run in the chosen precision."""
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def program(self, function: Callable[..., Sequence[Tensor]]) -> Callable[..., Sequence[Tensor]]:
        """Make a program of a function of tensors.

        Args:
            function: Takes tensors and returns a sequence of tensors. It may write to its arguments, in place, and to
                nothing else; what else it reads must stay the same tensors, though their values may change.
        """
        return function if self.mode == "eager" else CompiledProgram(function)


class CompiledProgram:
    """A function of tensors, compiled once for every set of shapes.

    Args:
        function: As `Execution.program` takes it.
        compiles: Whether what is recorded is compiled, or run as it is, for comparison.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], *, compiles: bool = True) -> None:
        self.function = function
        self.compiles = compiles
        self._compiled: dict[Hashable, Callable[..., Sequence[Tensor]]] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the program."""
        key = tuple(tensor.shape for tensor in tensors)
        compiled = self._compiled.get(key)
        if compiled is None:
            record = self.trace(tensors)
            compiled = self._compiled[key] = self._compile(record) if self.compiles else record
        with torch.no_grad():
            return compiled(*tensors)

    def trace(self, tensors: Sequence[Tensor]) -> torch.fx.GraphModule:
        """Record what the function does with tensors of these shapes, without touching them."""
        copies = [tensor.detach().clone() for tensor in tensors]
        graph: torch.fx.GraphModule = make_fx(self.function)(*copies)
        return graph

    @staticmethod
    def _compile(record: torch.fx.GraphModule) -> Callable[..., Sequence[Tensor]]:
        compiled: Callable[..., Sequence[Tensor]] = torch.compile(record, dynamic=False, fullgraph=True)
        return compiled


def keep_freed_memory() -> None:
    """Have the C library keep the memory that tensors free, for the next ones, instead of giving it back at once.

    Every pass over a minibatch frees and takes the same few megabytes. Given back to the system and taken again, each
    page is zeroed and mapped anew, which costs more than the arithmetic on it. Does nothing where the library is not
    glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 * 2**20)

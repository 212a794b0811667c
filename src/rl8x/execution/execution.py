"""How programs run: the one place that compiles.

Algorithms hand over functions of tensors. Eager execution calls them as they are and is the reference. Compiled
execution traces each once for every set of shapes and has torch.compile turn the trace into fused loops. Tracing first
leaves nothing of Python in what is compiled: no module, no dict, no attribute that would have to be checked at every
call, which at small batches costs more than the arithmetic.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from rl8x.execution.captured import CapturedLoop, CapturedProgram
from rl8x.execution.compiled import CompiledLoop, CompiledProgram
from rl8x.execution.loops import Loop
from rl8x.execution.memory import keep_freed_memory
from rl8x.execution.programs import Program, ProgramError
from rl8x.execution.threads import Threads

Mode = Literal["auto", "eager", "compile", "graph"]
Precision = Literal["fp32", "tf32", "bf16"]
MODES: Final = ("auto", "eager", "compile", "graph")
PRECISIONS: Final = ("fp32", "tf32", "bf16")


class Execution:
    """How the programs of one algorithm run.

    Args:
        mode: `"eager"`; `"compile"`; `"graph"`: kernels captured once on CUDA and replayed; or `"auto"`: graph on CUDA,
            elsewhere eager, since compiling costs seconds that only longer runs earn back.
        precision: `"fp32"`; `"tf32"`: matmuls in TF32 on CUDA; `"bf16"`: matmuls in bfloat16, heads and all else in
            float32.
        device: Where the programs run.

    Attributes:
        mode: The mode in force.
        host_looks: Whether the host may look at values: on the CPU it costs nothing, elsewhere it waits for all work.

    Raises:
        ValueError: If mode or precision are not to be had on the device.
    """

    def __init__(self, mode: Mode, precision: Precision, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        for name, value, instead in (("precision", precision, "tf32"), ("execution", mode, "graph")):
            if value == instead and not on_cuda:
                others = "'fp32' or 'bf16'" if name == "precision" else "'eager' or 'compile'"
                raise ValueError(f"{name}={value!r} needs a CUDA device; got {device}. Use {others}.")
        self.falls_back = mode == "auto"
        self.mode: Literal["eager", "compile", "graph"] = ("graph" if on_cuda else "eager") if mode == "auto" else mode
        self.precision = precision
        self.device = device
        self.host_looks = device.type == "cpu"
        self.threads = Threads(device, eager=self.mode == "eager")
        if on_cuda:
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        if device.type == "cpu":
            keep_freed_memory()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a policy's matmuls run in the chosen precision."""
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def program(self, function: Callable[..., Sequence[Tensor]], num_fixed: int = 0) -> Program:
        """Make a program of a function of tensors.

        Args:
            function: Takes tensors and returns a sequence of tensors. It may write to its arguments, in place, and to
                memory that stays where it is; what else it reads must stay the same tensors, though their values may
                change.
            num_fixed: How many of the first arguments are the same tensors in every call. Only those and what the
                function holds itself may be written to.
        """
        if self.mode == "eager":
            return function
        made = CompiledProgram(function) if self.mode == "compile" else CapturedProgram(function, num_fixed)
        return self._guarded(made, function)

    def loop(
        self, function: Callable[..., Sequence[Tensor]], num_state: int, num_items: int = 1, *, ends: bool = False
    ) -> Program:
        """Make a program that calls a function for one item after the other; on the CPU compiled as one.

        Args:
            function: Takes the state, other tensors, and one slice of each of the items; changes the state in place,
                and returns tensors.
            num_state: How many of the first arguments are the state.
            num_items: How many of the last arguments are items, each `[n, *]`.
            ends: Whether the last tensor that the function returns is a 0-d bool: whether to go on to the next item.

        Returns:
            Takes the same, with all items, and returns the results of all, each `[n, *]`; 0 for items after the one
            that ended it.
        """
        options: Any = {"ends": ends, "host_looks": self.host_looks}
        loop = Loop(function, num_state, num_items, **options)
        if self.mode == "eager":
            return loop
        made: Program
        if self.mode == "graph":
            made = CapturedLoop(loop)
        elif self.device.type == "cpu":
            made = CompiledLoop(loop)
        else:  # kernels are launched ahead of what they compute, so that Python between the calls costs little
            made = Loop(CompiledProgram(function), num_state, num_items, **options)
        return self._guarded(made, loop)

    def _guarded(self, made: Program, function: Program) -> Program:
        """Run what was made of a function, or the function itself where that cannot be and `auto` may fall back."""

        def run(*tensors: Tensor) -> Sequence[Tensor]:
            if self.mode == "eager":
                return function(*tensors)
            try:
                return made(*tensors)
            except ProgramError as error:
                if not self.falls_back:
                    raise
                self.mode = "eager"
                warnings.warn(f"{error} Running eagerly.", RuntimeWarning, stacklevel=2)
                return function(*tensors)

        return run

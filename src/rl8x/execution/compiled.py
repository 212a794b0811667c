"""Compiled functions of tensors: traced here, built by the compiler's process, verified, called as one C++ function."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from rl8x.execution.artifacts import key_of
from rl8x.execution.compiler import compiler, load
from rl8x.execution.programs import Loop, Program, ProgramError, layout_of
from rl8x.execution.traces import Trace, describe_program, trace
from rl8x.execution.verification import Check, verdict


class CompiledProgram:
    """A function of tensors, or a loop, compiled once for each layout of its arguments.

    The traced graph is compiled without the guards that `torch.compile` checks at every call, which cost as much as an
    update of a small minibatch. On the CPU a call of the program is one call into C++, of a loop too. A program that
    does not compute what its function does, of a loop the first two items, is refused with a warning, and the function
    runs instead. Unless it `compiles`, the trace is interpreted, for comparison.
    """

    def __init__(self, function: Program, check: Check | None = None, *, compiles: bool = True) -> None:
        self.function = function
        self.loop = function if isinstance(function, Loop) else None
        self.check = check or Check()
        self.compiles = compiles
        self._traced: dict[Hashable, tuple[str, Trace]] = {}  # programs that are being compiled
        self._ready: dict[Hashable, Program] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the program."""
        key = layout_of(tensors)
        program = self._ready.get(key)
        if program is None:
            with _as_program_error():
                program = self._ready[key] = self._compile(tensors) if self.compiles else self._interpret(tensors)
        return program(*tensors)

    def prepare(self, *tensors: Tensor) -> None:
        """Request compilation for arguments of this layout, `[*]` each, without waiting for it."""
        key = layout_of(tensors)
        if key not in self._ready and key not in self._traced:
            with _as_program_error():
                self._traced[key] = text, _ = self._describe(tensors)
                if tensors[0].is_cpu:
                    compiler().request(text)

    def _compile(self, tensors: Sequence[Tensor]) -> Program:
        text, (graph, read) = self._traced.pop(layout_of(tensors), None) or self._describe(tensors)
        if all(tensor.is_cpu for tensor in tensors):
            program = load(compiler().library(text), self._items(tensors), read)
        else:  # in this process; kernels are launched asynchronously, so that a loop in Python costs little
            from rl8x.execution.lowering import compiled_here

            program = self._looped(
                compiled_here(graph, [*(self.loop.first(tensors) if self.loop else tensors), *read]), read
            )
        return program if self._agrees(key_of(text), program, tensors, read) else self.function

    def _interpret(self, tensors: Sequence[Tensor]) -> Program:
        return self._looped(*self._trace(tensors))

    def _looped(self, run: Program, read: Sequence[Tensor]) -> Program:
        """Return what runs a graph that also takes `read`, `[*]` each, in a loop in Python if the function is one."""
        program: Program = lambda *tensors: [result.clone() for result in run(*tensors, *read)]  # noqa: E731
        if self.loop:
            program = Loop(program, self.loop.num_state, self.loop.num_items, ends=self.loop.ends)
        return torch.no_grad()(program)

    def _describe(self, tensors: Sequence[Tensor]) -> tuple[str, Trace]:
        traced, ends = self._trace(tensors), self.loop is not None and self.loop.ends
        return describe_program(traced.graph, [*tensors, *traced.read], self._items(tensors), ends=ends), traced

    def _trace(self, tensors: Sequence[Tensor]) -> Trace:
        return trace(self.loop.function, self.loop.first(tensors)) if self.loop else trace(self.function, tensors)

    def _items(self, tensors: Sequence[Tensor]) -> range:
        """Return which of the arguments are items of a loop."""
        return range(len(tensors) - self.loop.num_items, len(tensors)) if self.loop else range(0)

    def _agrees(self, key: str, program: Program, tensors: Sequence[Tensor], read: Sequence[Tensor]) -> bool:
        """Return whether a program does what its function does: as the run or the cache knows, else by trying both."""
        verdicts, artifacts = self.check.verdicts, compiler().artifacts
        if key not in verdicts:
            found = artifacts.verdict(key)
            if found is None:
                items = self._items(tensors)
                few = [tensor[:2] if i in items else tensor for i, tensor in enumerate(tensors)]
                run, function = (functools.partial(each, *few) for each in (program, self.function))
                found = verdict(run, function, [*few, *read], self.check, items)
                artifacts.judge(key, found)
            verdicts[key] = found
        if verdicts[key]:
            warnings.warn(
                f"a compiled program differs from eager execution, so it runs eagerly: {verdicts[key]}.",
                RuntimeWarning,
                stacklevel=2,
            )
        return not verdicts[key]


@contextlib.contextmanager
def _as_program_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ProgramError("compile", error) from error

"""Compiled functions of tensors: traced here, built by the compiler's process, verified, called as one C++ function."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from rl8x.execution.artifacts import key_of
from rl8x.execution.compiler import Run, compiler, load
from rl8x.execution.loops import Loop
from rl8x.execution.programs import ProgramError, layout_of
from rl8x.execution.traces import Trace, describe_program, trace
from rl8x.execution.verification import Check, verdict


class CompiledProgram:
    """A function of tensors, or a loop, compiled once for each layout of its arguments.

    The traced graph is compiled without the guards that `torch.compile` checks at every call, which cost as much as an
    update of a small minibatch. On the CPU a call of the program is one call into C++, of a loop too: for small
    minibatches the overhead of a Python loop counts. A program that does not compute what its function does is refused
    with a warning, and the function runs instead.

    Args:
        function: The function of tensors, see `Execution.program`, or the loop.
        check: How the program is verified, a loop by its first two items.
        compiles: Whether the traced graph is compiled; False interprets it, for comparison.
    """

    def __init__(self, function: Run, check: Check | None = None, *, compiles: bool = True) -> None:
        self.function = function
        self.check = check or Check()
        self.compiles = compiles
        self._traced: dict[Hashable, tuple[str, Trace]] = {}  # programs that are being compiled
        self._ready: dict[Hashable, Run] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the program."""
        return (self._ready.get(layout_of(tensors)) or self._program(tensors))(*tensors)

    def prepare(self, *tensors: Tensor) -> None:
        """Request compilation for arguments of this layout, `[*]` each, without waiting for it."""
        key = layout_of(tensors)
        if key not in self._ready and key not in self._traced:
            with _as_program_error():
                self._traced[key] = text, _ = self._describe(tensors)
                if tensors[0].is_cpu:
                    compiler().request(text)

    def _program(self, tensors: Sequence[Tensor]) -> Run:
        with _as_program_error():
            program = self._compile(tensors) if self.compiles else self._interpret(tensors)
        self._ready[layout_of(tensors)] = program
        return program

    def _compile(self, tensors: Sequence[Tensor]) -> Run:
        text, (graph, read) = self._traced.pop(layout_of(tensors), None) or self._describe(tensors)
        if all(tensor.is_cpu for tensor in tensors):
            run = load(compiler().library(text), self._items(tensors))
        else:  # in this process
            from rl8x.execution.lowering import compiled_here

            run = torch.no_grad()(compiled_here(graph, [*tensors, *read]))
        program: Run = lambda *tensors: run(*tensors, *read)  # noqa: E731
        return program if self._agrees(key_of(text), program, tensors, read) else self.function

    def _interpret(self, tensors: Sequence[Tensor]) -> Run:
        """Return the traced graph, uncompiled, in a loop over it if the function is one."""
        graph, read = self._trace(tensors)
        run: Run = lambda *tensors: graph(*tensors, *read)  # noqa: E731
        if isinstance(self.function, Loop):
            run = self.function.around(lambda *tensors: [result.clone() for result in graph(*tensors, *read)])
        return torch.no_grad()(run)

    def _describe(self, tensors: Sequence[Tensor]) -> tuple[str, Trace]:
        traced = self._trace(tensors)
        ends = isinstance(self.function, Loop) and self.function.ends
        return describe_program(traced.graph, [*tensors, *traced.read], self._items(tensors), ends=ends), traced

    def _trace(self, tensors: Sequence[Tensor]) -> Trace:
        if isinstance(self.function, Loop):
            return trace(self.function.function, self.function.first(tensors))
        return trace(self.function, tensors)

    def _items(self, tensors: Sequence[Tensor]) -> range:
        """Return which of the arguments are items of a loop."""
        if not isinstance(self.function, Loop):
            return range(0)
        return range(len(tensors) - self.function.num_items, len(tensors))

    # -- verification

    def _agrees(self, key: str, program: Run, tensors: Sequence[Tensor], read: Sequence[Tensor]) -> bool:
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
    """Raise every error as a `ProgramError`."""
    try:
        yield
    except Exception as error:
        raise ProgramError("compile", error) from error

"""Compiled functions of tensors: traced here, built by the compiler's process, verified, called as one C++ function."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rl8x.execution.artifacts import key_of
from rl8x.execution.compiler import Run, compiler, load
from rl8x.execution.loops import Loop
from rl8x.execution.programs import ProgramError, layout_of
from rl8x.execution.traces import LoopShape, Trace, describe_program, trace
from rl8x.execution.verification import Check, verdict


class CompiledProgram:
    """A function of tensors, compiled once for each layout of its arguments.

    The traced graph is compiled without the guards that `torch.compile` checks at every call, which cost as much as an
    update of a small minibatch. On the CPU a call of the program is one call into C++. A program that does not compute
    what its function does is refused with a warning, and the function runs instead.

    Args:
        function: The function of tensors, see `Execution.program`.
        check: How the program is verified.
        compiles: Whether the traced graph is compiled; False interprets it, for comparison.
    """

    def __init__(self, function: Run, check: Check | None = None, *, compiles: bool = True) -> None:
        self.function = function
        self.check = check or Check()
        self.compiles = compiles
        self._described: dict[Hashable, _Described] = {}  # programs that are being compiled
        self._ready: dict[Hashable, Run] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the program."""
        return (self._ready.get(layout_of(tensors)) or self._program(tensors))(*tensors)

    def build(self, *tensors: Tensor) -> None:
        """Compile the program for arguments of this layout, `[*]` each, and wait for it."""
        self._program(tensors)

    def _program(self, tensors: Sequence[Tensor]) -> Run:
        key = layout_of(tensors)
        if key not in self._ready:
            with _as_program_error():
                self._ready[key] = self._compile(tensors) if self.compiles else self._interpret(tensors)
        return self._ready[key]

    def prepare(self, *tensors: Tensor) -> None:
        """Request compilation for arguments of this layout, `[*]` each, without waiting for it."""
        key = layout_of(tensors)
        if key not in self._ready and key not in self._described:
            with _as_program_error():
                self._described[key] = described = self._describe(tensors)
                if tensors[0].device.type == "cpu":
                    compiler().request(described.text)

    def _compile(self, tensors: Sequence[Tensor]) -> Run:
        text, loop, (graph, read) = self._described.pop(layout_of(tensors), None) or self._describe(tensors)
        if all(tensor.device.type == "cpu" for tensor in tensors):
            run = load(compiler().library(text), loop)
        else:  # in this process
            from rl8x.execution.lowering import compiled_here

            run = torch.no_grad()(compiled_here(graph, [*tensors, *read]))
        program: Run = lambda *tensors: run(*tensors, *read)  # noqa: E731
        return program if self._agrees(key_of("program", text), program, tensors, read) else self._whole

    def _describe(self, tensors: Sequence[Tensor]) -> _Described:
        traced = trace(self.function, tensors)
        return _Described(describe_program(traced.graph, [*tensors, *traced.read]).to_json(), None, traced)

    def _interpret(self, tensors: Sequence[Tensor]) -> Run:
        """Return the traced graph, uncompiled."""
        graph, read = trace(self.function, tensors)
        return torch.no_grad()(lambda *tensors: graph(*tensors, *read))

    # -- verification

    def _agrees(self, key: str, program: Run, tensors: Sequence[Tensor], read: Sequence[Tensor]) -> bool:
        """Return whether a program does what its function does: as the run or the cache knows, else by trying both."""
        verdicts, artifacts = self.check.verdicts, compiler().artifacts
        if key not in verdicts:
            found = artifacts.verdict(key)
            if found is None:
                found = self._verdict(program, tensors, read)
                artifacts.judge(key, found)
            verdicts[key] = found
        if verdicts[key]:
            warnings.warn(
                f"a compiled program differs from eager execution, so it runs eagerly: {verdicts[key]}.",
                RuntimeWarning,
                stacklevel=2,
            )
        return not verdicts[key]

    def _verdict(self, program: Run, tensors: Sequence[Tensor], read: Sequence[Tensor]) -> str:
        run, function = (functools.partial(each, *tensors) for each in (program, self._whole))
        return verdict(run, function, [*tensors, *read], self.check)

    @property
    def _whole(self) -> Run:
        """The function that the program stands for."""
        return self.function


class CompiledLoop(CompiledProgram):
    """A compiled loop that iterates in C++, since for small minibatches the overhead of a Python loop counts.

    Args:
        loop: The loop.
        check: How the program is verified, by its first two items.
        compiles: Whether the traced graph is compiled; False interprets it, for comparison.
    """

    def __init__(self, loop: Loop, check: Check | None = None, *, compiles: bool = True) -> None:
        super().__init__(loop.function, check, compiles=compiles)
        self.loop = loop

    def _describe(self, tensors: Sequence[Tensor]) -> _Described:
        traced = trace(self.function, self.loop.first(tensors))
        shape = LoopShape(len(tensors) - self.loop.num_items, self.loop.num_items, self.loop.ends)
        return _Described(describe_program(traced.graph, [*tensors, *traced.read], shape).to_json(), shape, traced)

    def _interpret(self, tensors: Sequence[Tensor]) -> Run:
        """Return a loop over the traced graph, uncompiled."""
        graph, read = trace(self.function, self.loop.first(tensors))
        loop = self.loop.around(lambda *tensors: [result.clone() for result in graph(*tensors, *read)])
        return torch.no_grad()(loop)

    def _verdict(self, program: Run, tensors: Sequence[Tensor], read: Sequence[Tensor]) -> str:
        items = range(len(tensors) - self.loop.num_items, len(tensors))
        first = [*tensors[: items.start], *[tensors[i][:2] for i in items]]
        run, function = (functools.partial(each, *first) for each in (program, self._whole))
        return verdict(run, function, [*first, *read], self.check, items)

    @property
    def _whole(self) -> Run:
        return self.loop


class _Described(NamedTuple):
    """A program for one layout: its description as text, how it loops, and its trace."""

    text: str
    loop: LoopShape | None
    traced: Trace


@contextlib.contextmanager
def _as_program_error() -> Iterator[None]:
    """Raise every error as a `ProgramError`."""
    try:
        yield
    except Exception as error:
        raise ProgramError("compile", error) from error

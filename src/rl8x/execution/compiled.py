"""Functions of tensors, compiled: traced here, built by the compiler's process, called as one C++ function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rl8x.execution.compiler import Run, compiler, load
from rl8x.execution.loops import Loop
from rl8x.execution.memory import keep_small_blocks
from rl8x.execution.programs import ProgramError
from rl8x.execution.traces import Description, LoopShape, describe, trace


class CompiledProgram:
    """A function of tensors, compiled once for every layout of its arguments.

    A traced graph has no Python left in it, so it is compiled as it is, without the guards that `torch.compile` would
    check at every call: they cost as much as an update of a small minibatch. On the CPU a whole program is one call
    into C++.

    Args:
        function: As `Execution.program` takes it.
        compiles: Whether the traced graph is compiled, or run as it is, for comparison.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], *, compiles: bool = True) -> None:
        self.function = function
        self.compiles = compiles
        self._described: dict[Hashable, _Described] = {}
        self._ready: dict[Hashable, _Ready] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the program."""
        key = tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
        ready = self._ready.get(key)
        if ready is None:
            ready = self._ready[key] = self._make(key, tensors)
        with torch.no_grad():
            return ready.run(*tensors, *ready.read)

    def prepare(self, *tensors: Tensor) -> None:
        """Have the program compiled for arguments laid out like these, `[*]` each, without waiting for it."""
        key = tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
        if key in self._ready or key in self._described:
            return
        with _refusals():
            self._described[key] = described = self._describe(tensors)
            compiler().request("program", described.description.to_json())

    def _make(self, key: Hashable, tensors: Sequence[Tensor]) -> _Ready:
        with _refusals():
            if not self.compiles:
                return self._interpret(tensors)
            if any(tensor.device.type != "cpu" for tensor in tensors):
                return self._compile_here(tensors)
            described = self._described.pop(key) if key in self._described else self._describe(tensors)
            return self._compile(described)

    def _describe(self, tensors: Sequence[Tensor]) -> _Described:
        graph, read = trace(self.function, tensors)
        return _Described(describe(graph, [*tensors, *read]), read)

    def _interpret(self, tensors: Sequence[Tensor]) -> _Ready:
        """Return the traced graph as it is."""
        return _Ready(*trace(self.function, tensors))

    def _compile_here(self, tensors: Sequence[Tensor]) -> _Ready:
        """Compile for an accelerator, in this process."""
        from rl8x.execution.lowering import compiled_here

        graph, read = trace(self.function, tensors)
        return _Ready(compiled_here(graph, [*tensors, *read]), read)

    @staticmethod
    def _compile(described: _Described) -> _Ready:
        keep_small_blocks()
        return _Ready(load(compiler().library("program", described.description.to_json())), described.read)


class CompiledLoop(CompiledProgram):
    """A loop that runs in C++: beside a small minibatch's arithmetic, what Python does for each counts.

    Args:
        loop: What is called for each item.
        compiles: As for `CompiledProgram`.
    """

    def __init__(self, loop: Loop, *, compiles: bool = True) -> None:
        super().__init__(loop.function, compiles=compiles)
        self.loop = loop

    def _describe(self, tensors: Sequence[Tensor]) -> _Described:
        loop = self.loop
        graph, read = trace(self.function, loop.first(tensors))
        read.append(torch.ones((), dtype=torch.bool))  # see `operators.looped`
        shape = LoopShape(loop.num_state, len(tensors) - loop.num_items, loop.num_items, loop.ends)
        return _Described(describe(graph, [*tensors, *read], shape), read)

    def _interpret(self, tensors: Sequence[Tensor]) -> _Ready:
        """Return a loop over the traced graph as it is."""
        graph, read = trace(self.function, self.loop.first(tensors))
        return _Ready(self.loop.around(lambda *tensors: graph(*tensors, *read)), [])


class _Ready(NamedTuple):
    """A program for one layout of its arguments, and what it reads beside them."""

    run: Run
    read: Sequence[Tensor]


class _Described(NamedTuple):
    """A program that is to be compiled for one layout, and what it reads beside its arguments."""

    description: Description
    read: Sequence[Tensor]


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Give every error the same form."""
    try:
        yield
    except Exception as error:
        raise ProgramError("compile", error) from error

"""Compiled functions of tensors: traced here, built by the compiler's process, called as one C++ function."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl8x.execution.artifacts import key_of
from rl8x.execution.compiler import Run, compiler, load
from rl8x.execution.fingerprint import Fingerprint, fingerprint
from rl8x.execution.loops import Loop
from rl8x.execution.programs import ProgramError, layout_of
from rl8x.execution.traces import LoopShape, ProgramDescription, describe_program, trace

MadeOf = Callable[[], Sequence[object]]
"""Returns the objects that determine a function's trace."""


class CompiledProgram:
    """A function of tensors, compiled once for each layout of its arguments.

    The traced graph is compiled without the guards that `torch.compile` checks at every call, which cost as much as an
    update of a small minibatch. On the CPU a call of the program is one call into C++.

    Args:
        function: The function of tensors, see `Execution.program`.
        made_of: The objects that determine its trace, see `Execution.program`.
        compiles: Whether the traced graph is compiled; False interprets it, for comparison.
    """

    def __init__(self, function: Run, made_of: MadeOf | None = None, *, compiles: bool = True) -> None:
        self.function = function
        self.made_of = made_of
        self.compiles = compiles
        self._described: dict[Hashable, _Described] = {}  # programs that are being compiled
        self._ready: dict[Hashable, _Ready] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the program."""
        ready = self._ready.get(layout_of(tensors)) or self._program(tensors)
        with torch.no_grad():
            return ready.run(*tensors, *ready.read)

    def build(self, *tensors: Tensor) -> None:
        """Compile the program for arguments of this layout, `[*]` each, and wait for it."""
        self._program(tensors)

    def _program(self, tensors: Sequence[Tensor]) -> _Ready:
        key = layout_of(tensors)
        ready = self._ready.get(key)
        if ready is None:
            with _as_program_error():
                ready = self._ready[key] = self._compile(tensors) if self.compiles else self._interpret(tensors)
        return ready

    def prepare(self, *tensors: Tensor) -> None:
        """Request compilation for arguments of this layout, `[*]` each, without waiting for it."""
        key = layout_of(tensors)
        if key in self._ready or key in self._described:
            return
        with _as_program_error():
            if self._noted(tensors) is not None:  # loaded at the first call, whose arguments check it
                return
            self._described[key] = described = self._describe(tensors)
            compiler().request(described.description.to_json())

    def _compile(self, tensors: Sequence[Tensor]) -> _Ready:
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return self._compile_here(tensors)
        described = self._described.pop(layout_of(tensors), None)
        if described is None:
            ready = self._found(tensors)
            if ready is not None:
                return ready
            described = self._describe(tensors)
        library = compiler().library(described.description.to_json())
        self._note(described, tensors)
        return _Ready(load(library), described.read)

    def _compile_here(self, tensors: Sequence[Tensor]) -> _Ready:
        """Compile for an accelerator, in this process."""
        from rl8x.execution.lowering import compiled_here

        graph, read = trace(self.function, tensors)
        return _Ready(compiled_here(graph, [*tensors, *read]), read)

    def _describe(self, tensors: Sequence[Tensor]) -> _Described:
        graph, read = trace(self.function, tensors)
        return _Described(describe_program(graph, [*tensors, *read]), read)

    def _interpret(self, tensors: Sequence[Tensor]) -> _Ready:
        """Return the traced graph, uncompiled."""
        return _Ready(*trace(self.function, tensors))

    # -- programs of earlier processes, found without tracing

    def _noted(self, tensors: Sequence[Tensor]) -> tuple[Fingerprint, dict[str, Any]] | None:
        """Return the fingerprint, and the note that an earlier process left on the same program, if there is one."""
        mark = None if self.made_of is None else fingerprint(self.made_of())
        if mark is None:
            return None
        note = compiler().artifacts.noted(self._fingerprint_key(mark, tensors))
        if note is None or compiler().artifacts.find(note["program"]) is None:
            compiler().start()  # it loads while this process traces
            return None
        return mark, note

    def _found(self, tensors: Sequence[Tensor]) -> _Ready | None:
        """Return the program that an earlier process compiled, if its results agree with the function's."""
        noted = self._noted(tensors)
        if noted is None:
            return None
        mark, note = noted
        read = [mark.tensors[place] for place in note["read"]]
        ready = _Ready(load(compiler().artifacts.library(note["program"])), read)
        return ready if self._agrees(ready, tensors) else None

    def _note(self, described: _Described, tensors: Sequence[Tensor]) -> None:
        """Let later processes find a program by fingerprint, if the fingerprint contains all tensors that it reads."""
        mark = None if self.made_of is None else fingerprint(self.made_of())
        places = None if mark is None else mark.places(described.read)
        if mark is not None and places is not None:
            program = key_of("program", described.description.to_json())
            compiler().artifacts.note(self._fingerprint_key(mark, tensors), {"program": program, "read": places})

    def _fingerprint_key(self, mark: Fingerprint, tensors: Sequence[Tensor]) -> str:
        inputs = [[list(each.shape), list(each.stride()), str(each.dtype)] for each in tensors]
        return key_of(mark.text, repr(self), json.dumps(inputs), str(torch.get_num_threads()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self.function, '__qualname__', '')})"

    def _agrees(self, found: _Ready, tensors: Sequence[Tensor]) -> bool:
        """Run program and function on copies of the tensors, `[*]` each, and compare results and in-place writes.

        Running the function also has the side effects on Python objects that tracing it would have had.
        """
        mine, its = ([tensor.detach().clone() for tensor in tensors] for _ in range(2))
        with torch.no_grad():
            expected = [*self._reference(*its), *its]
            actual = [*found.run(*mine, *found.read), *mine]
        pairs = list(zip(actual, expected, strict=True))
        return all(
            one.shape == two.shape and torch.allclose(one.double(), two.double(), atol=1e-2, rtol=1e-2, equal_nan=True)
            for one, two in pairs
        )

    def _reference(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.function(*tensors)


class CompiledLoop(CompiledProgram):
    """A compiled loop that iterates in C++, since for small minibatches the overhead of a Python loop counts.

    Args:
        loop: The loop.
        made_of: The objects that determine its trace, see `Execution.program`.
        compiles: Whether the traced graph is compiled; False interprets it, for comparison.
    """

    def __init__(self, loop: Loop, made_of: MadeOf | None = None, *, compiles: bool = True) -> None:
        super().__init__(loop.function, made_of, compiles=compiles)
        self.loop = loop

    def _describe(self, tensors: Sequence[Tensor]) -> _Described:
        loop = self.loop
        graph, read = trace(self.function, loop.first(tensors))
        shape = LoopShape(len(tensors) - loop.num_items, loop.num_items, loop.ends)
        return _Described(describe_program(graph, [*tensors, *read], shape), read)

    def _interpret(self, tensors: Sequence[Tensor]) -> _Ready:
        """Return a loop over the traced graph, uncompiled."""
        graph, read = trace(self.function, self.loop.first(tensors))
        loop = self.loop.around(lambda *tensors: [result.clone() for result in graph(*tensors, *read)])
        return _Ready(loop, [])

    def __repr__(self) -> str:
        loop = self.loop
        return f"{super().__repr__()}, {loop.num_state} of state, {loop.num_items} items, ends: {loop.ends}"

    def _reference(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.loop(*tensors)


class _Ready(NamedTuple):
    """A program for one layout of its arguments, and the tensors that it reads beside them."""

    run: Run
    read: Sequence[Tensor]


class _Described(NamedTuple):
    """The description of a program for one layout, and the tensors that it reads beside its arguments."""

    description: ProgramDescription
    read: Sequence[Tensor]


@contextlib.contextmanager
def _as_program_error() -> Iterator[None]:
    """Raise every error as a `ProgramError`."""
    try:
        yield
    except Exception as error:
        raise ProgramError("compile", error) from error

"""Programs, which are functions of flat lists of tensors; loops of them; and nested dicts and tuples as such lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.output import message_of
from rl8x.trees import row_major

Program = Callable[..., Sequence[Tensor]]
"""Takes tensors and returns a sequence of tensors."""


def prepare(program: Program, *tensors: Tensor) -> None:
    """Request compilation of a program for arguments of this layout, `[*]` each, if it supports that."""
    ahead = getattr(program, "prepare", None)
    if ahead is not None:
        ahead(*tensors)


class ProgramError(RuntimeError):
    """A function could not be compiled or captured."""

    def __init__(self, mode: str, error: Exception) -> None:
        lines = message_of(error).strip().splitlines()
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        super().__init__(f"execution={mode!r} is not possible here: {reason}. execution='eager' always is.")


@dataclasses.dataclass(eq=False, repr=False)
class Loop:
    """Calls a function once for each item, in Python; `CompiledProgram` is its form in C++.

    Args:
        function: Takes the state, other tensors, and one slice of each items tensor; updates the state in place, and
            returns tensors, which the loop returns stacked, `[n, *]` each.
        num_state: How many leading arguments are the state.
        num_items: How many trailing arguments are items, each `[n, *]`.
        ends: Whether the function's last result is a 0-d bool, at which the host looks: False ends the loop after this
            item, with zeros for results of those that follow.
        num_written: How many of the items, the last ones, the function writes in place.
    """

    function: Program
    num_state: int
    num_items: int = 1
    _: dataclasses.KW_ONLY
    ends: bool = False
    num_written: int = 0

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the loop, up to the item that ends it."""
        given, items = tensors[: -self.num_items], tensors[-self.num_items :]
        each: list[Sequence[Tensor]] = []
        for item in zip(*items, strict=True):
            each.append(self.function(*given, *item))
            if self.ends and not each[-1][-1]:
                break
        columns = [torch.stack(column) for column in zip(*each, strict=True)]
        missing = len(items[0]) - len(each)
        return [torch.cat((column, column.new_zeros(missing, *column.shape[1:]))) for column in columns]

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the function's arguments for the first item, given the loop's: slice 0 of the items `[n, *]`."""
        return [*tensors[: -self.num_items], *[items[0] for items in tensors[-self.num_items :]]]


class TreeProgram:
    """A program, as `make` makes it, of a function of nested dicts and tuples of tensors.

    Leaves may be None, in the same places in every call.
    """

    def __init__(self, function: Callable[..., Any], make: Callable[[Program], Program]) -> None:
        self.function = function
        self._program = make(self._flat)

    def __call__(self, *trees: Any) -> Any:
        """Run the program."""
        tensors, self._given = flat_of(trees)
        flat = self._program(*tensors)  # the first call finds what the function returns
        return self._returned(flat)

    def prepare(self, *trees: Any) -> None:
        """Request compilation for arguments of this layout, without running the program or waiting."""
        tensors, self._given = flat_of(trees)
        prepare(self._program, *tensors)

    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        flat, self._returned = flat_of(self.function(*self._given(tensors)))
        return flat


def layout_of(tensors: Sequence[Tensor]) -> Hashable:
    """Return shape, strides and dtype of each of `tensors` `[*]`, by which programs are looked up."""
    return tuple([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])


def flat_of(tree: Any) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], Any]]:
    """Return the tensors of a tree, row-major, for one program of all strides, and what rebuilds it."""
    tensors: list[Tensor] = []
    rebuilt = _flatten(tree, tensors)
    return tensors, lambda given: rebuilt(iter(given))


def _flatten(tree: Any, tensors: list[Tensor]) -> Callable[[Iterator[Tensor]], Any]:
    """Append a tree's tensors, `[*]` each, and return what takes as many of an iterator and rebuilds the tree."""
    if isinstance(tree, Tensor):
        tensors.append(row_major(tree))
        return next
    if tree is None:
        return lambda _: None
    if isinstance(tree, dict):
        named = [(name, _flatten(part, tensors)) for name, part in tree.items()]
        return lambda given: {name: part(given) for name, part in named}
    parts, make = [_flatten(part, tensors) for part in tree], getattr(tree, "_make", tuple)
    return lambda given: make([part(given) for part in parts])


Captured = tuple[Callable[[], object], Sequence[Tensor]]

# Runs before a capture, as torch's notes on CUDA graphs advise.
_WARM_UPS: Final = 3


class CapturedProgram:
    """A function of tensors, captured as a CUDA graph once for each layout of its arguments; see `Execution.program`.

    Arguments that are not fixed are copied into the graph's input buffers. A loop is one graph over all items, whose
    state is copied back too, so that it may be other tensors in each call. Its items that are written are fixed too:
    where they lie elsewhere, another graph is captured.
    """

    def __init__(
        self,
        function: Program,
        num_fixed: int = 0,
        capture: Callable[[Callable[[], Sequence[Tensor]]], Captured] | None = None,
    ) -> None:
        self.function = function
        self.num_fixed = num_fixed
        loop = function if isinstance(function, Loop) else Loop(function, 0)
        self._num_state, self._num_written = loop.num_state, loop.num_written
        self._capture = capture or capture_cuda
        self._captured: dict[Hashable, tuple[Sequence[Tensor], Captured]] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Replay the graph, and return copies of its results."""
        end = len(tensors) - self._num_written
        key = layout_of(tensors), *[tensor.data_ptr() for tensor in tensors[end:]]
        if key not in self._captured:
            self._captured[key] = self._program(tensors, end)
        places, (replay, results) = self._captured[key]
        with torch.no_grad():
            for place, tensor in zip(places, tensors[self.num_fixed : end], strict=True):
                place.copy_(tensor)
            replay()
            for tensor, place in zip(tensors[: self._num_state], places, strict=False):
                tensor.copy_(place)
            return [result.clone() for result in results]

    def _program(self, tensors: Sequence[Tensor], end: int) -> tuple[Sequence[Tensor], Captured]:
        """Return the input buffers of a graph for these arguments, and the graph."""
        before, fixed = tensors[: self.num_fixed], [*tensors[: self.num_fixed], *tensors[end:]]
        places = [tensor.clone() for tensor in tensors[self.num_fixed : end]]
        kept = [tensor.clone() for tensor in fixed]
        try:
            with torch.no_grad():
                # Warm-up runs load kernels and libraries; their writes to fixed arguments are undone below.
                return places, self._capture(lambda: self.function(*before, *places, *tensors[end:]))
        except Exception as error:
            raise ProgramError("graph", error) from error
        finally:
            for tensor, old in zip(fixed, kept, strict=True):
                tensor.copy_(old)


def capture_cuda(function: Callable[[], Sequence[Tensor]]) -> Captured:
    """Capture a function as a CUDA graph; return what replays it, and the tensors that then hold its results."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph.replay, results

"""Programs: functions of flat lists of tensors, loops of functions, and functions captured as CUDA graphs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from rl8x.output import first_line

Program = Callable[..., Sequence[Tensor]]
"""Takes tensors and returns a sequence of tensors."""


class ProgramError(RuntimeError):
    """A function could not be compiled or captured."""

    def __init__(self, mode: str, error: Exception) -> None:
        reason = first_line(error).rstrip(".")
        super().__init__(f"execution={mode!r} is not possible here: {reason}. execution='eager' always is.")


@contextlib.contextmanager
def as_program_error(mode: str) -> Iterator[None]:
    """Raise any error within the context as a `ProgramError`."""
    try:
        yield
    except Exception as error:
        raise ProgramError(mode, error) from error


@dataclasses.dataclass(eq=False, repr=False)
class Loop:
    """Calls a function once for each item, in Python; `CompiledProgram` is its form in C++.

    Args:
        function: Takes the state, other tensors, and one slice of each items tensor; updates the state in place, and
            returns tensors, which the loop returns stacked, `[n, *]` each.
        num_state: Number of leading arguments that are the state.
        num_items: Number of trailing arguments that are items, each `[n, *]`; if 0, programs call the function once.
        ends: Whether the function's last result is a 0-d bool that the host reads: False ends the loop after this
            item, and the results of later items are zeros.
        num_written: Number of items, the last ones, that the function writes in place.
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
        end = len(tensors) - self.num_items
        return [*tensors[:end], *[items[0] for items in tensors[end:]]]


def layout_of(tensors: Sequence[Tensor]) -> Hashable:
    """Return shape, strides and dtype of each tensor `[*]`, the key by which programs are looked up."""
    return tuple([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])


Captured = tuple[Callable[[], object], Sequence[Tensor]]


class CapturedProgram:
    """A function of tensors, captured as a CUDA graph once for each layout of its arguments; see `Execution.program`.

    Arguments that are not fixed are copied into the graph's input buffers. A loop is one graph over all items; its
    state is copied back as well, so that it may be other tensors in each call. Items that are written are also fixed:
    if their memory changes, another graph is captured.
    """

    def __init__(self, function: Program, num_fixed: int = 0) -> None:
        self.function = function
        self.num_fixed = num_fixed
        loop = function if isinstance(function, Loop) else Loop(function, 0, num_items=0)
        self._num_state, self._num_written = loop.num_state, loop.num_written
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
            with torch.no_grad(), as_program_error("graph"):
                # Warm-up runs load kernels and libraries; their writes to fixed arguments are undone below.
                return places, capture_cuda(lambda: self.function(*before, *places, *tensors[end:]))
        finally:
            for tensor, old in zip(fixed, kept, strict=True):
                tensor.copy_(old)


def capture_cuda(function: Callable[[], Sequence[Tensor]]) -> Captured:
    """Capture a function as a CUDA graph; return a function that replays it, and the tensors of its results."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # as torch's notes on CUDA graphs advise
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph.replay, results

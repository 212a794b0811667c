"""Functions of tensors that are captured once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

import torch
from torch import Tensor

from rl8x.execution.programs import Loop, Program, ProgramError, layout_of

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

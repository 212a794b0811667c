"""Functions of tensors that are captured once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rl8x.execution.loops import Loop
from rl8x.execution.programs import ProgramError, layout_of

Capture = Callable[[Callable[[], Sequence[Tensor]]], tuple[Callable[[], object], Sequence[Tensor]]]

# Runs before a capture, as torch's notes on CUDA graphs advise.
_WARM_UPS: Final = 3


class CapturedProgram:
    """A function of tensors, captured as a CUDA graph once for each layout of its arguments; see `Execution.program`.

    Arguments that are not fixed are copied into the graph's input buffers.
    """

    def __init__(
        self, function: Callable[..., Sequence[Tensor]], num_fixed: int = 0, capture: Capture | None = None
    ) -> None:
        self.function = function
        self.num_fixed = num_fixed
        self.capture = capture or capture_cuda
        self._captured: dict[Hashable, _Captured] = {}

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Replay the graph, and return copies of its results."""
        captured = self._program(tensors)
        with torch.no_grad():
            for place, tensor in zip(captured.varying, tensors[self.num_fixed :], strict=True):
                place.copy_(tensor)
            captured.replay()
            return [result.clone() for result in captured.results]

    def build(self, *tensors: Tensor) -> None:
        """Capture the graph for arguments of this layout, `[*]` each."""
        self._program(tensors)

    def _program(self, tensors: Sequence[Tensor]) -> _Captured:
        key = layout_of(tensors)
        if key not in self._captured:
            self._captured[key] = self._make(tensors)
        return self._captured[key]

    def _make(self, tensors: Sequence[Tensor]) -> _Captured:
        fixed = list(tensors[: self.num_fixed])
        varying = [tensor.clone() for tensor in tensors[self.num_fixed :]]
        before = [tensor.clone() for tensor in fixed]
        try:
            with torch.no_grad():
                # Warm-up runs load kernels and libraries; their writes to fixed arguments are undone below.
                replay, results = self.capture(lambda: self.function(*fixed, *varying))
        except Exception as error:
            raise ProgramError("graph", error) from error
        finally:
            for tensor, old in zip(fixed, before, strict=True):
                tensor.copy_(old)
        return _Captured(varying, replay, results)


class CapturedLoop:
    """A loop that is captured as one CUDA graph over all items, once for each layout of its arguments.

    Its state is copied into the graph's buffers and back, so it may be other tensors in each call.
    """

    def __init__(self, loop: Loop, capture: Capture | None = None) -> None:
        self.loop = loop
        self._program = CapturedProgram(self._with_state, capture=capture)

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Replay the loop."""
        results = self._program(*tensors)
        for tensor, done in zip(tensors, results[: self.loop.num_state], strict=False):
            tensor.copy_(done)
        return results[self.loop.num_state :]

    def _with_state(self, *tensors: Tensor) -> Sequence[Tensor]:
        results = self.loop(*tensors)
        return [*tensors[: self.loop.num_state], *results]


class _Captured(NamedTuple):
    """A captured graph: its input buffers, the function that replays it, and its output buffers."""

    varying: Sequence[Tensor]
    replay: Callable[[], object]
    results: Sequence[Tensor]


def capture_cuda(function: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], object], Sequence[Tensor]]:
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

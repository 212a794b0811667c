"""Statistics that are computed by one compiled program or by NumPy, instead of dozens of operators on small tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl8x.execution import Execution, Program
from rl8x.execution.programs import prepare
from rl8x.rollouts.statistics import Stats, packed

Summarise = Callable[[Mapping[str, Tensor]], Stats]
"""A pure function from named tensors to statistics, every one of which is a 0-d tensor."""


class StatsProgram:
    """Computes statistics, on the CPU by a compiled program where one was asked for.

    The statistics of a rollout of 128 transitions are 60 operators, which take ten times as long as the arithmetic.
    Those of a single transition or update are computed by NumPy, whose functions take a third of the time of torch's.
    Nothing is summed in them, so that the bits are the same.

    Args:
        summarise: The statistics: a function of a module, or a partial one.
        execution: Decides whether programs are compiled.
    """

    def __init__(self, summarise: Summarise, execution: Execution) -> None:
        self.summarise = summarise
        self.execution = execution
        self._program: Program | None = None
        self._layout: dict[str, tuple[int, ...]] = {}
        self._work = 0
        self._names: list[str] = []
        self._counts: Mapping[str, tuple[str, ...]] = {}

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Request compilation for tensors of these names and shapes, `[*]` each; for others there is no program."""
        if self._program is None and self.execution.host_looks and self.execution.target == "compile":
            self._layout = _layout(tensors)
            self._program = self.execution.program(self._flat, name="statistics", kind="update")
            self._work = sum(tensor.numel() for tensor in tensors.values())
            with self.execution.ahead(), self.execution.threads.for_work(self._work):
                prepare(self._program, *tensors.values())

    def __call__(self, tensors: Mapping[str, Tensor], *, is_single: bool = False) -> Stats:
        """Return the statistics of tensors, `[*]` each, by name; a program's are on the host already.

        Args:
            tensors: The tensors.
            is_single: Whether they are those of a single transition or update.
        """
        if is_single and all(each.is_cpu and each.dtype is not torch.bfloat16 for each in tensors.values()):
            with np.errstate(all="ignore"):
                arrays: Any = {name: each.numpy() for name, each in tensors.items()}
                return self.summarise(arrays)
        if self._program is None or self.execution.mode == "eager" or _layout(tensors) != self._layout:
            return self.summarise(tensors)
        with self.execution.threads.for_work(self._work):
            [vector] = self._program(*tensors.values())
        return Stats(dict(zip(self._names, vector.tolist(), strict=True)), self._counts)

    @torch.no_grad()
    def _flat(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return all statistics in one vector, and remember their names; this function is compiled."""
        stats = self.summarise(dict(zip(self._layout, tensors, strict=True)))
        values, self._counts = stats.unread()
        self._names, vector = packed({name: value for name, value in values.items() if isinstance(value, Tensor)})
        return [vector]


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}

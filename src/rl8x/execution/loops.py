"""A loop over items in Python; `CompiledProgram` is its form in C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Function = Callable[..., Sequence[Tensor]]


class Loop:
    """Calls a function once for each item; see `Execution.loop`.

    A call takes the state, other tensors, and the items, each `[n, *]`. If the host may read values, the loop stops
    after the item that ends it. Otherwise it runs over all items, and those after the end leave the state unchanged.
    """

    def __init__(
        self, function: Function, num_state: int, num_items: int = 1, *, ends: bool = False, host_looks: bool = True
    ) -> None:
        self.function = function
        self.num_state = num_state
        self.num_items = num_items
        self.ends = ends
        self.host_looks = host_looks

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the loop."""
        given, items = tensors[: -self.num_items], tensors[-self.num_items :]
        each: list[Sequence[Tensor]] = []
        for item in zip(*items, strict=True):
            if self.ends and not self.host_looks and each:
                each.append(self._if_going(each[-1][-1], given, item))
                continue
            each.append(self.function(*given, *item))
            if self.ends and self.host_looks and not each[-1][-1]:
                break
        columns = [torch.stack(column) for column in zip(*each, strict=True)]
        missing = len(items[0]) - len(each)
        return [torch.cat((column, column.new_zeros(missing, *column.shape[1:]))) for column in columns]

    def _if_going(self, going: Tensor, given: Sequence[Tensor], item: Sequence[Tensor]) -> Sequence[Tensor]:
        """Call the function, and undo its changes to the state if the loop has ended; `going` is a 0-d bool."""
        state = given[: self.num_state]
        before = [tensor.clone() for tensor in state]
        results = self.function(*given, *item)
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(torch.where(going, tensor, old))
        return [torch.where(going, result, torch.zeros_like(result)) for result in results]

    def around(self, function: Function) -> Loop:
        """Return the same loop around another function."""
        return Loop(function, self.num_state, self.num_items, ends=self.ends, host_looks=self.host_looks)

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the function's arguments for the first item, given the loop's: slice 0 of the items `[n, *]`."""
        return [*tensors[: -self.num_items], *[items[0] for items in tensors[-self.num_items :]]]

"""Loops inside of programs: torch's `scan`, and `while_loop` where a loop may end early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op

from rl8x.execution.traces import LoopShape
from rl8x.trees import row_major

Function = Callable[..., Sequence[Tensor]]


def looped(graph: Function, loop: LoopShape, results: Sequence[Tensor]) -> Function:
    """Return the loop as a function of tensors around one operator.

    Args:
        graph: Does what the loop's function does; it takes further tensors after the item, which it reads.
        loop: How it is called.
        results: What the graph returns for an item, of which only the shapes matter.

    Returns:
        Takes what the loop takes, what the graph reads, and last a 0-d bool that is true.
    """
    n, num_given = loop.num_state, loop.num_given
    last = num_given + loop.num_items
    around = _ending if loop.ends else _scanned

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        state, given, items = tensors[:n], tensors[n:num_given], tensors[num_given:last]
        *read, true = tensors[last:]

        def once(before: Sequence[Tensor], item: Sequence[Tensor], others: Sequence[Tensor]) -> list[Sequence[Tensor]]:
            *others, true = others
            # A body may not write to what it was given.
            after = [tensor.clone() for tensor in before]
            found = graph(*after, *others[: len(given)], *item, *others[len(given) :])
            # Two tensors of the state that are always equal, such as an observation that is the physics, must not
            # become one: Inductor's loop would hand the one on and have none for the other.
            return [[torch.where(true, new, old) for new, old in zip(after, before, strict=True)], found]

        # An operator refuses a state that comes out with other strides than it went in with.
        done, columns = around(once, [row_major(tensor) for tensor in state], items, (*given, *read, true), results)
        for tensor, value in zip(state, done, strict=True):
            tensor.copy_(value)
        return columns

    return run


_Once = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], list[Sequence[Tensor]]]
_Looped = tuple[Sequence[Tensor], Sequence[Tensor]]


def _scanned(
    once: _Once, state: Sequence[Tensor], items: Sequence[Tensor], others: tuple[Tensor, ...], _: Sequence[Tensor]
) -> _Looped:
    n, last = len(state), len(state) + len(items)

    def body(*tensors: Tensor) -> list[Tensor]:
        after, found = once(tensors[:n], tensors[n:last], tensors[last:])
        return [*after, *[result.clone() for result in found]]

    done = scan_op(body, list(state), list(items), others)
    return done[:n], done[n:]


def _ending(
    once: _Once, state: Sequence[Tensor], items: Sequence[Tensor], others: tuple[Tensor, ...], results: Sequence[Tensor]
) -> _Looped:
    n, width, count = len(state), len(results), len(items[0])

    def going(index: Tensor, goes_on: Tensor, *_: Tensor) -> Tensor:
        return (index < count) & goes_on

    def body(index: Tensor, _: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        columns, before, rest = tensors[:width], tensors[width : width + n], tensors[width + n :]
        item = [each.index_select(0, index.unsqueeze(0)).squeeze(0) for each in rest[: len(items)]]
        after, found = once(before, item, rest[len(items) :])
        here = torch.arange(count) == index
        pairs = zip(columns, found, strict=True)
        written = [row_major(torch.where(here.view(-1, *[1] * new.dim()), new, column)) for column, new in pairs]
        return (index + 1, found[-1].clone(), *written, *after)

    columns = [result.new_zeros(count, *result.shape) for result in results]
    start = (torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.bool))
    carried: Any = (*start, *columns, *state)
    _, _, *done = while_loop_op(going, body, carried, (*items, *others))
    return done[width:], done[:width]

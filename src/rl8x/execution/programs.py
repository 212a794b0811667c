"""Programs, which are functions of flat lists of tensors; loops of them; and nested dicts and tuples as such lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

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

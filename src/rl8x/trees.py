"""Observations and actions as a tensor or nested dicts of tensors, as flat dicts by name, and as lists."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Tree: TypeAlias = "Tensor | dict[str, Tree]"
"""A tensor, or a dict of trees; the parts of a `Tuple` space have the keys "0", "1", ..."""


def as_tensor(value: Any, device: torch.device | str | None = None, *, name: str = "it") -> Tensor:
    """Convert a tensor, an array or lists of numbers to a tensor `[*]`; raise for anything else, called `name`."""
    if isinstance(value, Tensor) and not value.is_complex():
        return torch.as_tensor(value, device=device)
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be numbers; got {value!r:.60}.")
    # A copy, if torch refuses it (negative strides, as of a flipped picture, another byte order, long doubles) or warns
    # of it, as it is read-only.
    is_long = array.dtype == np.longdouble
    array = np.require(array, np.float64 if is_long else array.dtype.newbyteorder("="), ["C", "W", "A"])
    return torch.as_tensor(array, device=device)


def tree_map(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor of a tree, whatever their shapes."""
    if not isinstance(tree, Tensor) and isinstance(tree, Mapping):  # the first check takes a tenth of the second's time
        return {name: tree_map(function, part) for name, part in tree.items()}
    return function(tree)


def flatten_tree(name: str, tree: Any) -> dict[str, Tensor]:
    """Return a tree's tensors, of any shapes, by flat names: `obs` stays `obs`, a part of a dict becomes `obs/part`."""
    if isinstance(tree, Tensor) or not isinstance(tree, Mapping):
        return {name: tree}
    return {key: leaf for part, value in tree.items() for key, leaf in flatten_tree(f"{name}/{part}", value).items()}


def unflatten_tree(name: str, flat: Mapping[str, Tensor]) -> Any:
    """Invert `flatten_tree`: return the tree of tensors, of any shapes, whose flat names begin with `name`."""
    if name in flat:
        return flat[name]
    tree: dict[str, Any] = {}
    for key, leaf in flat.items():
        if not key.startswith(f"{name}/"):
            continue
        *path, last = key[len(name) + 1 :].split("/")
        part = tree
        for step in path:
            part = part.setdefault(step, {})
        part[last] = leaf
    return tree


def without_ends(obs: Any, terminated: Tensor) -> Any:
    """Replace non-finite numbers of next observations where an episode terminated, since no target reads them."""

    def finite(part: Tensor) -> Tensor:
        return torch.where(terminated.view(-1, *(1,) * (part.ndim - 1)), part.nan_to_num(0.0, 0.0, 0.0), part)

    return tree_map(lambda part: finite(part) if part.is_floating_point() else part, obs)


def is_part(name: str, *trees: str) -> bool:
    """Whether a flat name belongs to one of these trees."""
    return name.split("/", 1)[0] in trees


@functools.lru_cache
def names_of(names: tuple[str, ...], *trees: str) -> list[str]:
    """Return the flat names that belong to one of these trees."""
    return [name for name in names if is_part(name, *trees)]


def first_tensor(tree: Any) -> Tensor:
    """Return one of a tree's tensors, of any shape, for its device or leading size."""
    while isinstance(tree, Mapping):
        tree = next(iter(tree.values()))
    tensor: Tensor = tree
    return tensor


@functools.lru_cache(4096)
def _row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new tensor."""
    return tuple(itertools.accumulate((max(size, 1) for size in shape[:0:-1]), operator.mul, initial=1))[::-1]


def row_major(tensor: Tensor) -> Tensor:
    """Return a tensor `[...]` with the strides of a new one: itself if it has them, else a copy."""
    # `contiguous()` keeps any stride of a dimension of size 1, which a traced graph refuses.
    if not tensor.dim() or tensor.stride() == _row_major_strides(tensor.shape):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def flat_of(tree: Any) -> tuple[list[Tensor], Callable[[Iterable[Tensor]], Any]]:
    """Return a tree's tensors, row-major, so that one program fits all strides, and a function that rebuilds it."""
    tensors: list[Tensor] = []
    rebuilt = _flatten(tree, tensors)
    return tensors, lambda given: rebuilt(iter(given))


def _flatten(tree: Any, tensors: list[Tensor]) -> Callable[[Iterator[Tensor]], Any]:
    """Append a tree's tensors, `[*]` each; return a function that rebuilds the tree from an iterator."""
    if isinstance(tree, Tensor):
        tensors.append(row_major(tree))
        return next
    if tree is None:
        return lambda _: None
    if isinstance(tree, dict):
        # By name, as a dict of the same parts may have them in another order.
        named, order = {name: _flatten(tree[name], tensors) for name in sorted(tree)}, list(tree)

        def rebuilt(given: Iterator[Tensor]) -> dict[str, Any]:
            parts = {name: part(given) for name, part in named.items()}
            return {name: parts[name] for name in order}

        return rebuilt
    parts, make = [_flatten(part, tensors) for part in tree], getattr(tree, "_make", tuple)
    return lambda given: make([part(given) for part in parts])

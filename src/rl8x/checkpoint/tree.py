"""States: nested dicts, lists and tuples of tensors, segments and plain values, as `torch.save` takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rl8x.segments import Segment, is_segment_name

AS_FIRST: Final = b"="
"""In the state of a rank after the first: a tensor as rank 0 has it; no segment has this name."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used as asked; the message says which one, why, and what can be used instead."""


def mapped(function: Callable[[Any, str], Any], tree: Any, path: str = "") -> Any:
    """Return a state of dicts, lists and tuples, with a function applied to each leaf and its path.

    Raises:
        TypeError: If a key is neither a text nor a whole number.
    """
    if isinstance(tree, Mapping):
        for key in tree:
            if type(key) not in (str, int):
                where = path or "the state"
                raise TypeError(f"the keys of a state are texts or whole numbers; got {key!r} in {where}.")
        return {key: mapped(function, item, f"{path}[{key!r}]") for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        items = [mapped(function, item, f"{path}[{index}]") for index, item in enumerate(tree)]
        return tuple(items) if isinstance(tree, tuple) else items
    return function(tree, path)


def copied(tree: Any) -> Any:
    """Copy a state for a file: tensors of any shapes on the CPU, numbers of NumPy as Python's, segments as their names.

    Names of segments are `bytes`, which no state has; see `segments_in`. The copy shares nothing with `tree`, which may
    change from here on.

    Raises:
        TypeError: If something in the state is of another kind: not all of it would be read with `weights_only=True`.
    """
    return mapped(_copied, tree)


def _copied(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):  # its own storage, since a view would be saved with all of the one that it has
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, Segment):
        return value.name.encode()
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool) or (isinstance(value, bytes) and value == AS_FIRST):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, too, as an enumeration's
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a state holds tensors, numbers, texts, lists and dicts; got {type(value).__name__} in {path}.")


def with_segments(tree: Any, segment: Callable[[str], Segment]) -> Any:
    """Return what `copied` returned with segments by their names.

    Raises:
        CheckpointError: If a name is not legal for a segment.
    """

    def restored(value: Any, _: str) -> Any:
        if not isinstance(value, bytes) or value == AS_FIRST:
            return value
        name = value.decode(errors="replace")
        if not is_segment_name(name):
            raise CheckpointError(f"its state has a segment with the name {name!r:.120}, which is none")
        return segment(name)

    return mapped(restored, tree)


def _leaves(tree: Any, kind: type) -> dict[str, Any]:
    found = {}

    def note(leaf: Any, path: str) -> None:
        if isinstance(leaf, kind):
            found[path] = leaf

    mapped(note, tree)
    return found


def tensors_in(tree: Any) -> dict[str, Tensor]:
    """Return the tensors of a state by path, of any shapes."""
    return _leaves(tree, Tensor)


def segments_in(tree: Any) -> list[Segment]:
    """Return the segments of a state."""
    return list(_leaves(tree, Segment).values())


def clone(tree: Any) -> Any:
    """Copy a state on its device."""
    return mapped(_cloned, tree)


def _cloned(value: Any, _: str) -> Any:
    if isinstance(value, Segment):
        content = value.content()
        return Segment(value.name, lambda: clone(content))
    return value.detach().clone() if isinstance(value, Tensor) else value

"""States as JSON and tensors: nested dicts, lists and tuples of plain values, with the tensors taken out.

A tensor becomes `{"$tensor": name}` in the JSON, where the name is its path in the tree; a segment
`{"$segment": name}`, where the name is its own; a tuple `{"$tuple": [...]}`, and a float that JSON cannot hold
`{"$float": "nan"}`. Everything else is itself, so that a person can read the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.segments import Segment, is_segment_name

_TENSOR: Final = "$tensor"
_SEGMENT: Final = "$segment"
_TUPLE: Final = "$tuple"
_FLOAT: Final = "$float"
_NUMBERED: Final = "$numbered"
_MAX_DEPTH: Final = 64


class CheckpointError(ValueError):
    """A checkpoint cannot be used as asked; the message says which one, why, and what can be used instead."""


def encode(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """Encode nested dicts, lists and tuples of tensors, segments, numbers, texts, flags and None.

    The keys of a dict are texts, or whole numbers as in what torch's optimizers return.

    Returns:
        The tree as JSON can hold it, and copies of its tensors on the CPU, of any shapes, by path. Neither shares
        anything with `tree`, which may change from here on. Of segments there are the names; see `segments_in`.

    Raises:
        TypeError: If something in the tree is of another kind.
    """
    tensors: dict[str, Tensor] = {}
    return _encoded(tree, "", tensors), tensors


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        while path in tensors:  # keys may have slashes: of "a/b" there may be two
            path += "'"
        # A copy, since a view would be saved with its whole storage.
        copied = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        tensors[path] = copied
        return {_TENSOR: path}
    if isinstance(value, Segment):
        return {_SEGMENT: value.name}
    if isinstance(value, Mapping):
        if value and all(type(key) is int for key in value):
            return {_NUMBERED: [[key, _encoded(item, f"{path}/{key}", tensors)] for key, item in value.items()]}
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise TypeError(
                    "the keys of a state are texts without a leading '$', or all whole numbers; got "
                    f"{key!r} in {path or 'the state'}."
                )
        return {key: _encoded(item, f"{path}/{key}" if path else key, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a state holds tensors, numbers, texts, lists and dicts; got {type(value).__name__} in {path}.")


def segments_in(tree: Any) -> Iterator[Segment]:
    """Yield the segments of a state, before it is encoded."""
    if isinstance(tree, Segment):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from segments_in(item)


def segment_names(tree: Any) -> set[str]:
    """Return the names of the segments of an encoded state.

    Raises:
        CheckpointError: If a name is not legal for a segment.
    """
    names, left = set[str](), [tree]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if _SEGMENT in value:
                name = value[_SEGMENT]
                if not is_segment_name(name):
                    raise CheckpointError(f"its state has a segment with the name {name!r:.120}, which is none")
                names.add(name)
            left += value.values()
        elif isinstance(value, list):
            left += value
    return names


def decode(tree: Any, tensors: Mapping[str, Tensor], segment: Callable[[str], Segment] | None = None) -> Any:
    """Decode a state that `encode` returned.

    Args:
        tree: The tree as JSON held it.
        tensors: The tensors by path, of any shapes.
        segment: Returns a segment by its name; None where there can be none.

    Raises:
        CheckpointError: If it is not such a tree, or a tensor is missing.
    """
    return _decoded(tree, tensors, segment, 0)


def _decoded(value: Any, tensors: Mapping[str, Tensor], segment: Callable[[str], Segment] | None, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise CheckpointError("its state is nested too deeply")
    if isinstance(value, list):
        return [_decoded(item, tensors, segment, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    marker = next((key for key in value if key.startswith("$")), None)
    if marker is None:
        return {key: _decoded(item, tensors, segment, depth + 1) for key, item in value.items()}
    content = value[marker]
    if len(value) == 1 and marker == _TENSOR and isinstance(content, str):
        if content not in tensors:
            raise CheckpointError(f"its tensor {content!r} is missing")
        return tensors[content]
    if len(value) == 1 and marker == _SEGMENT and segment is not None and is_segment_name(content):
        return segment(content)
    if len(value) == 1 and marker == _TUPLE and isinstance(content, list):
        return tuple(_decoded(item, tensors, segment, depth + 1) for item in content)
    if len(value) == 1 and marker == _NUMBERED and _is_numbered(content):
        return {key: _decoded(item, tensors, segment, depth + 1) for key, item in content}
    if len(value) == 1 and marker == _FLOAT and content in ("nan", "inf", "-inf"):
        return float(content)
    raise CheckpointError(f"its state has the unknown entry {marker!r}")


def _is_numbered(content: Any) -> bool:
    """Return whether a value is a list of pairs whose first elements are integers."""
    return isinstance(content, list) and all(
        isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in content
    )


def clone(tree: Any) -> Any:
    """Copy a state on its device."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, Segment):
        content = tree.content()
        return Segment(tree.name, lambda: clone(content))
    if isinstance(tree, Mapping):
        return {key: clone(item) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(clone(item) for item in tree)
    return tree

"""States: nested dicts, lists and tuples of tensors, segments and plain values, as `torch.save` takes them.

A checkpoint has the full state of rank 0. Of each other rank it has only the tensors that differ from rank 0's at the
same path: environments, generators and replays differ; weights, optimizers and counters are the same on all ranks.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rl8x.distributed import ranks
from rl8x.replay.ring import Segment, is_segment_name

AS_FIRST: Final = b"="
"""Placeholder in the state of a rank after the first: the tensor equals rank 0's; no segment has this name."""
RANKS: Final = "ranks"
"""Key in a checkpoint's state: the differences of ranks after the first, by rank."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used as asked; the message says which one, why, and what can be used instead."""


def mapped(function: Callable[[Any, str], Any], tree: Any, path: str = "") -> Any:
    """Return a state with `function(leaf, path)` in place of each leaf."""
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
    """Copy a state for a file: tensors to the CPU, NumPy's numbers to Python's, segments to their names as `bytes`."""
    return mapped(_copied, tree)


def _copied(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):  # copied, since a view would be saved with its whole storage
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, Segment):
        return value.name.encode()
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool) or (isinstance(value, bytes) and value == AS_FIRST):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # plain `str`, also of a subclass such as an enumeration
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a state holds tensors, numbers, texts, lists and dicts; got {type(value).__name__} in {path}.")


def with_segments(tree: Any, segment: Callable[[str], Segment]) -> Any:
    """Undo `copied` for segments: replace their names by `segment(name)`."""

    def restored(value: Any, _: str) -> Any:
        if not isinstance(value, bytes) or value == AS_FIRST:
            return value
        name = value.decode(errors="replace")
        if not is_segment_name(name):
            raise CheckpointError(f"its state has a segment with the name {name!r:.120}, which is none")
        return segment(name)

    return mapped(restored, tree)


def tensors_in(tree: Any) -> dict[str, Tensor]:
    """Return the tensors of a state by path, of any shapes."""
    return {path: leaf for path, leaf in _leaves(tree) if isinstance(leaf, Tensor)}


def segments_in(tree: Any) -> list[Segment]:
    """Return the segments of a state."""
    return [leaf for _, leaf in _leaves(tree) if isinstance(leaf, Segment)]


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    mapped(lambda leaf, path: leaves.append((path, leaf)), tree)
    return leaves


def clone(tree: Any) -> Any:
    """Copy a state without segments on its device."""
    return mapped(lambda leaf, _: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)


# -- the states of several ranks


def packed(tree: Any) -> bytes:
    """Serialise a state without segments to bytes, for another rank."""
    return _saved(copied(tree))


def _saved(copied_tree: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(copied_tree, buffer)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """Deserialise the bytes of `packed`."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def gathered(state: Any, kept: Collection[str]) -> dict[str, Any]:
    """Return on rank 0 the other ranks' parts of a checkpoint, without segments `kept` from the previous one."""
    if ranks().size == 1:
        return {}
    own, problem = None, None
    try:
        own = copied(state)
    except TypeError as error:
        problem = str(error)
    for each in filter(None, ranks().share("what cannot be saved", problem)):  # so that all ranks raise
        raise TypeError(each)
    first = ranks().first("the state to save", {path: _digest(tensor) for path, tensor in tensors_in(own).items()})
    kept = set(ranks().first("the segments that are kept", list(kept)))
    if ranks().is_first:
        return {str(rank): _part(content) for rank, content in enumerate(ranks().collect("states", b"")) if rank}

    def different(leaf: Any, path: str) -> Any:
        return AS_FIRST if isinstance(leaf, Tensor) and first.get(path) == _digest(leaf) else leaf

    segments = {segment.name: {} if segment.name in kept else segment.content() for segment in segments_in(state)}
    ranks().collect("states", _saved([mapped(different, own), segments]))
    return {}


def _part(content: bytes) -> Any:
    """Return a rank's part of a checkpoint, given what the rank sent."""
    own, segments = unpacked(content)
    return with_segments(own, lambda name: Segment(name, lambda: segments[name]))


def _digest(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes() + str((tensor.dtype, tuple(tensor.shape))).encode()).hexdigest()[:32]


def num_ranks(state: Mapping[str, Any]) -> int:
    """Return the number of ranks of a checkpoint's state."""
    return 1 + len(state.get(RANKS) or {})


def of_rank(state: Any, others: Mapping[str, Any], rank: int) -> Any:
    """Return the state of a rank, given rank 0's state and the other ranks' parts of the checkpoint."""
    if rank == 0:
        return state
    first = tensors_in(state)
    try:
        return mapped(lambda leaf, path: first[path] if isinstance(leaf, bytes) else leaf, others[str(rank)])
    except KeyError as error:
        raise CheckpointError(f"its state of rank {rank} is damaged ({error})") from error

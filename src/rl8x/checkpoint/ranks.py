"""The states of all ranks in a checkpoint: rank 0's in full, and the differences of the others.

Environments, generators and replays are each rank's own; weights, optimizers and counters are alike. Nothing has to say
which is which: of each rank those tensors are kept whose bits are not those of rank 0's at the same place.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.checkpoint.tree import AS_FIRST, CheckpointError, copied, mapped, segments_in, tensors_in, with_segments
from rl8x.distributed import ranks
from rl8x.segments import Segment

RANKS: Final = "ranks"
"""Key in a checkpoint's state: the differences of ranks after the first, by rank."""


def packed(tree: Any) -> bytes:
    """Serialise a state without segments to bytes, for another rank."""
    buffer = io.BytesIO()
    torch.save(copied(tree), buffer)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """Deserialise the bytes of `packed`."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def gathered(state: Any, kept: Collection[str]) -> dict[str, Any]:
    """Return on rank 0 the other ranks' parts of a checkpoint, by rank; on the others nothing.

    `kept` are on rank 0 the names of the segments that the checkpoint before has, of all ranks.

    Raises:
        TypeError: On all ranks, if one has something in its state that no checkpoint can hold.
    """
    if ranks().size == 1:
        return {}
    own = _copied_on_all(state)
    first = ranks().first("the state to save", {path: _digest(tensor) for path, tensor in tensors_in(own).items()})
    kept = set(ranks().first("the segments that are kept", list(kept)))
    if ranks().is_first:
        return {str(rank): _entry(content) for rank, content in enumerate(ranks().collect("states", b"")) if rank}

    def different(leaf: Any, path: str) -> Any:
        return AS_FIRST if isinstance(leaf, Tensor) and first.get(path) == _digest(leaf) else leaf

    segments = {segment.name: {} if segment.name in kept else segment.content() for segment in segments_in(state)}
    buffer = io.BytesIO()
    torch.save([mapped(different, own), segments], buffer)
    ranks().collect("states", buffer.getvalue())
    return {}


def _copied_on_all(state: Any) -> Any:
    """Copy the state; if one rank cannot, raise on all."""
    own, problem = None, None
    try:
        own = copied(state)
    except TypeError as error:
        problem = str(error)
    problems = ranks().share("what cannot be saved", problem)
    if any(problems):
        raise TypeError(next(filter(None, problems)))
    return own


def _entry(content: bytes) -> Any:
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
    """Return the state of a rank, given that of rank 0 and what the checkpoint has of the others.

    Raises:
        CheckpointError: If it cannot be put together.
    """
    if rank == 0:
        return state
    first = tensors_in(state)
    try:
        return mapped(lambda leaf, path: first[path] if isinstance(leaf, bytes) else leaf, others[str(rank)])
    except KeyError as error:
        raise CheckpointError(f"its state of rank {rank} is damaged ({error})") from error

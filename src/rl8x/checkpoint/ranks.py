"""The states of all ranks in a checkpoint: rank 0's in full, and the differences of the others.

Environments, generators and replays are each rank's own; weights, optimizers and counters are alike. Nothing has to say
which is which: of each rank those tensors are kept whose bits are not those of rank 0's at the same place.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.checkpoint.tree import CheckpointError, decode, encode, segments_in
from rl8x.distributed import ranks
from rl8x.segments import Content, Segment

RANKS: Final = "ranks"
"""Key in a checkpoint's state: the differences of ranks after the first, by rank."""
_LENGTH: Final = 8  # bytes of the header with the length of the text before the tensors


def packed(tree: Any) -> bytes:
    """Serialise a state without segments to bytes, for another rank."""
    return _joined(*encode(tree))


def unpacked(content: bytes) -> Any:
    """Deserialise the bytes of `packed`."""
    return decode(*_parted(content))


def _joined(plain: Any, tensors: Mapping[str, Tensor]) -> bytes:
    text, buffer = json.dumps(plain).encode(), io.BytesIO()
    torch.save(dict(tensors), buffer)
    return len(text).to_bytes(_LENGTH, "little") + text + buffer.getvalue()


def _parted(content: bytes) -> tuple[Any, dict[str, Tensor]]:
    end = _LENGTH + int.from_bytes(content[:_LENGTH], "little")
    tensors = torch.load(io.BytesIO(content[end:]), map_location="cpu", weights_only=True)
    return json.loads(content[_LENGTH:end]), tensors


def gathered(state: Any, kept: Collection[str]) -> dict[str, Any]:
    """Return on rank 0 the other ranks' parts of a checkpoint, by rank; on the others nothing.

    Args:
        state: This rank's state.
        kept: On rank 0 the names of the segments that the checkpoint before has, of all ranks.

    Raises:
        TypeError: On all ranks, if one has something in its state that no checkpoint can hold.
    """
    if ranks().size == 1:
        return {}
    plain, tensors = _encoded_on_all(state)
    digests = ranks().first("the state to save", {name: _digest(tensor) for name, tensor in tensors.items()})
    kept = set(ranks().first("the segments that are kept", list(kept)))
    if ranks().is_first:
        return {str(rank): _entry(content) for rank, content in enumerate(ranks().collect("states", b"")) if rank}
    different = {name: tensor for name, tensor in tensors.items() if digests.get(name) != _digest(tensor)}
    segments = {segment.name: {} if segment.name in kept else segment.content() for segment in segments_in(state)}
    keys = {name: list(content) for name, content in segments.items()}
    parts = {_place(name, key): tensor for name, content in segments.items() for key, tensor in content.items()}
    ranks().collect("states", _joined([plain, keys, list(different)], different | parts))
    return {}


def _encoded_on_all(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Encode the state; if one rank cannot, raise on all."""
    encoded, problem = None, None
    try:
        encoded = encode(state)
    except TypeError as error:
        problem = str(error)
    problems = ranks().share("what cannot be saved", problem)
    if encoded is None or any(problems):
        raise TypeError(next(filter(None, problems)))
    return encoded


def _entry(content: bytes) -> dict[str, Any]:
    """Return a rank's part of a checkpoint, given the state that the rank sent."""
    (plain, segments, names), tensors = _parted(content)
    own_segments = [Segment(name, _content(name, keys, tensors)) for name, keys in segments.items()]
    return {"plain": json.dumps(plain), "tensors": {name: tensors[name] for name in names}, "segments": own_segments}


def _content(segment: str, keys: Collection[str], tensors: Mapping[str, Tensor]) -> Any:
    content: Content = {key: tensors[_place(segment, key)] for key in keys}
    return lambda: content


def _place(segment: str, key: str) -> str:
    """Return the name of a segment's tensor among those of a state, whose names do not begin with a slash."""
    return f"/{segment}/{key}"


def _digest(tensor: Tensor) -> str:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes() + str((tensor.dtype, tuple(tensor.shape))).encode()).hexdigest()[:32]


def num_ranks(state: Mapping[str, Any]) -> int:
    """Return the number of ranks of a checkpoint's state."""
    return 1 + len(state.get(RANKS) or {})


def of_rank(state: Any, others: Mapping[str, Any], rank: int) -> Any:
    """Return the state of a rank.

    Args:
        state: That of rank 0.
        others: What the checkpoint has of the others, as `gathered` returned it and the checkpoint gave it back.
        rank: Which, one that the checkpoint has.

    Raises:
        CheckpointError: If it cannot be put together.
    """
    if rank == 0:
        return state
    try:
        entry = others[str(rank)]
        segments: dict[str, Segment] = {segment.name: segment for segment in entry["segments"]}
        tensors = {**encode(state)[1], **entry["tensors"]}
        return decode(json.loads(entry["plain"]), tensors, segments.__getitem__)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"its state of rank {rank} is damaged ({error})") from error

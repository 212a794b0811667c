"""A ring of rows on the device: the newest `capacity` of them, appended in blocks and sampled in batches."""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rl8x.replay.columns import Columns, Spec, shown, spec_from_plain, spec_of, spec_to_plain
from rl8x.trees import first_tensor

# Such a name becomes that of a file: nothing in it leads anywhere.
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")

Content: TypeAlias = dict[str, Tensor]
"""The tensors of a segment by name, of any shapes."""


class Segment:
    """A piece of a state that never changes under its name."""

    def __init__(self, name: str, content: Callable[[], Content]) -> None:
        if not is_segment_name(name):
            raise ValueError(f"a segment's name has small letters, digits and '-', 100 at most; got {name!r}.")
        self.name = name
        self.content = content


def is_segment_name(name: object) -> bool:
    """Whether something is a text that a segment can have as its name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


_ROWS: Final = 32_768
_BYTES: Final = 8_000_000


class Piece(NamedTuple):
    """A segment's rows, by their numbers, counted from the first row ever appended."""

    first: int
    last: int  # the number of the row after the last
    name: str  # the segment's


def segment_rows(row_bytes: int) -> int:
    """Return the number of rows of a full segment, a power of two: 32,768, or fewer where these are above 8 MB."""
    rows = _ROWS
    while rows > 1 and rows * row_bytes > _BYTES:
        rows //= 2
    return rows


if TYPE_CHECKING:
    from tensordict import TensorDict


def all_finite(rows: Mapping[str, Tensor]) -> Tensor:
    """Return whether all numbers are finite, 0-d: a row that is not would be sampled again and again."""
    # Minimum or maximum is non-finite if any number is; eight times as fast as a mask.
    numbers = [tensor for tensor in rows.values() if tensor.is_floating_point() and tensor.numel()]
    extremes = [extreme.isfinite() for tensor in numbers for extreme in tensor.aminmax()]
    device = first_tensor(rows).device
    return torch.stack(extremes).all() if extremes else torch.ones((), dtype=torch.bool, device=device)


class Replay:
    """The most recently appended rows; allocated at the first `append`. `total` counts all that ever were."""

    def __init__(self, capacity: int, device: torch.device | str, *, path: str | Path | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"a replay's capacity must be at least 1 row; got {capacity}.")
        self.capacity = capacity
        self.device = torch.device(device)
        self.size = 0
        self.total = 0
        self._path = None if path is None else Path(path)
        self._columns: Columns | None = None
        # Row i, counted from the first ever appended, is in slot (i - base) % capacity.
        self._base = 0
        self._divide([])

    def _divide(self, pieces: list[Piece]) -> None:
        """Take these pieces for those of the rows; new ones get names that no other replay gives."""
        self._pieces, self._key = pieces, uuid.uuid4().hex

    @property
    def oldest(self) -> int:
        """The number of the oldest stored row, counted from the first ever appended."""
        return self.total - self.size

    @torch.no_grad()
    def append(self, rows: Mapping[str, Tensor], *, checked: bool = False) -> None:
        """Append rows, replacing the oldest."""
        if not rows:
            return
        spec, counts = spec_of(rows), {tensor.size(0) for tensor in rows.values()}
        if len(counts) != 1:
            by_name = {name: len(tensor) for name, tensor in rows.items()}
            raise ValueError(f"rows of a replay must be equally many of each name; got {by_name}.")
        if not checked and not all_finite(rows):
            wrong = [name for name, tensor in rows.items() if not all_finite({name: tensor})]
            raise ValueError(f"rows with a number that is not finite cannot be appended to a replay: {wrong}.")
        columns, (count,) = self._allocated(spec), counts
        before, self.total = self.total, self.total + count
        self.size = min(self.size + count, self.capacity)
        for first, slots in self.slots(max(before, self.oldest), self.total):
            block = slice(first - before, first - before + slots.stop - slots.start)
            is_whole = block == slice(0, count)
            columns.write(slots, rows if is_whole else {name: tensor[block] for name, tensor in rows.items()})

    def _allocated(self, spec: Spec) -> Columns:
        if self._columns is not None and spec != self._columns.spec:
            raise ValueError(f"a row of this replay holds {shown(self._columns.spec)}; got {shown(spec)}.")
        if self._columns is None:
            self._columns = Columns(spec, self.capacity, self.device, self._path)
        return self._columns

    def slots(self, first: int, last: int) -> Iterator[tuple[int, slice]]:
        """Yield the slots of rows, in at most two pieces."""
        while first < last:
            start = (first - self._base) % self.capacity
            stop = min(start + last - first, self.capacity)
            yield first, slice(start, stop)
            first += stop - start

    def sample(self, count: int, batch: int, generator: torch.Generator) -> Tensor:
        """Draw rows uniformly, with replacement."""
        self._check_rows()
        return torch.randint(self.size, (count, batch), generator=generator, device=self.device)

    def gather(self, index: Tensor) -> dict[str, Tensor]:
        """Return copies of rows by name, each `[*index, ...]`; vectors of one dtype share a tensor."""
        return self.columns.views(self.columns.gather(index, self.device))

    def as_tensordict(self) -> TensorDict:
        """Return the rows as a TensorDict of batch size `[size]`, in the order of their slots, sharing the memory."""
        from tensordict import TensorDict  # imports torch's compiler, which takes a second

        if self._columns is None:
            return TensorDict({}, batch_size=[0])
        views = self._columns.views(self._columns.tensors)
        return TensorDict({name: view[: self.size] for name, view in views.items()}, batch_size=[self.size])

    def state_dict(self) -> dict[str, Any]:
        """Return the rows in segments, to be read before more are appended; a copy lasts (`checkpoint.tree.clone`)."""
        spec = {} if self._columns is None else self._columns.spec
        return {
            "capacity": self.capacity,
            "size": self.size,
            "total": self.total,
            "base": self._base,
            "columns": spec_to_plain(spec),
            "segments": [
                [piece.first, piece.last, Segment(piece.name, functools.partial(self._content, piece, self.oldest))]
                for piece in self._current_pieces(segment_rows(sum(column.row_bytes for column in spec.values())))
            ],
        }

    def _current_pieces(self, length: int) -> list[Piece]:
        """Return the pieces of the rows: full ones never change, the last is replaced as rows are appended.

        A full one ends at a multiple of `length`, so that a checkpoint costs the rows that are new since the one
        before, and at most one piece besides.
        """
        pieces = [piece for piece in self._pieces if piece.last > self.oldest]
        if pieces and pieces[-1].last < self.total and pieces[-1].last % length:
            pieces.pop()
        first = max(self.oldest, pieces[-1].last if pieces else 0)
        while first < self.total:
            last = min((first // length + 1) * length, self.total)
            pieces.append(Piece(first, last, f"{self._key}-{first}-{last}"))
            first = last
        self._pieces = pieces
        return pieces

    def _content(self, piece: Piece, oldest: int) -> Content:
        """Copy those rows of a piece that were stored when the given row was the oldest."""
        first = max(piece.first, oldest)
        if piece not in self._pieces or first < self.oldest:
            raise RuntimeError("the replay has gone on since this state of it was taken; load or clone it before that.")
        # In the memory layout, with several columns per tensor, so that each tensor is one copy.
        pieces = [slots for _, slots in self.slots(first, piece.last)]
        tensors = self.columns.tensors
        if len(pieces) == 1:
            return {name: tensor[pieces[0]].to("cpu", copy=True) for name, tensor in tensors.items()}
        return {name: torch.cat([tensor[slots].cpu() for slots in pieces]) for name, tensor in tensors.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the rows of a state, the newest if there are too many.

        With the same capacity each row comes to where it was, so that the same draws give the same rows.
        """
        spec = spec_from_plain(state["columns"])
        if self._columns is not None and spec and list(spec.items()) != list(self._columns.spec.items()):
            raise ValueError(f"a row of this replay holds {shown(self._columns.spec)}; the state's {shown(spec)}.")
        total, size = state["total"], min(state["size"], self.capacity)
        base = state["base"] if state["capacity"] == self.capacity else total - size
        pieces = [(Piece(first, last, segment.name), segment) for first, last, segment in state["segments"]]
        if size:
            self._allocated(spec)
        # Stays empty if a segment is damaged.
        self.total, self.size, self._base = 0, 0, base
        try:
            self._load(pieces, total - size, total)
        except BaseException:
            self._divide([])
            raise
        self.total, self.size = total, size
        self._divide([piece for piece, _ in pieces])

    def _load(self, pieces: list[tuple[Piece, Segment]], first: int, total: int) -> None:
        """Copy the rows from `first` to `total` from segments to their slots."""
        for piece, segment in pieces:
            if piece.last <= first:
                continue
            if piece.first > first:
                break
            content = segment.content()
            for name, tensor in self.columns.tensors.items():
                rows = content.get(name, tensor[:0])
                if rows.shape[1:] != tensor.shape[1:] or rows.dtype != tensor.dtype or len(rows) < piece.last - first:
                    raise ValueError(f"the segment {segment.name} of a replay does not have the rows that it should.")
                # A segment that was written late lacks its first rows, which had been overwritten.
                rows = rows[len(rows) - (piece.last - first) :]
                for number, slots in self.slots(first, piece.last):
                    tensor[slots].copy_(rows[number - first : number - first + slots.stop - slots.start])
            first = piece.last
        if first != total:
            raise ValueError(f"the segments of a replay end at row {first:,}, and it has rows up to {total:,}.")

    def _check_rows(self) -> None:
        if not self.size:
            raise RuntimeError("a replay without rows cannot be sampled from; append some before.")

    @property
    def columns(self) -> Columns:
        """Where the rows are."""
        if self._columns is None:
            raise RuntimeError("a replay without rows has nothing to gather; append some before.")
        return self._columns

"""A ring of rows on the device: the newest `capacity` of them, appended in blocks and sampled in batches."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rl8x.distributed import resolve_device
from rl8x.spaces import DTYPES
from rl8x.trees import first_tensor

if TYPE_CHECKING:
    from tensordict import TensorDict


class Column(NamedTuple):
    """The shape of one named column in a row, `()` for a scalar, and its type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes in one row."""
        return math.prod(self.shape) * self.dtype.itemsize


Spec = Mapping[str, Column]
"""The columns of a row by name."""


def spec_of(rows: Mapping[str, Tensor]) -> dict[str, Column]:
    """Return the columns of some rows, each `[rows, ...]`."""
    return {name: Column(tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in rows.items()}


class Columns:
    """Rows in one tensor per dtype, so that a batch is one `index_select` of each; images have tensors of their own."""

    def __init__(self, spec: Spec, capacity: int, device: torch.device, path: Path | None = None) -> None:
        self.spec = dict(spec)
        self._places: dict[str, tuple[str, int | slice | None]] = {}
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in spec.items():
            if len(shape) > 1:  # else it is in a matrix `[capacity, width]`
                self._places[name], shapes[name] = (name, None), (shape, dtype)
                continue
            matrix = f"vectors.{_name(dtype)}"
            start = shapes[matrix][0][0] if matrix in shapes else 0
            stop = start + math.prod(shape)
            self._places[name] = matrix, slice(start, stop) if shape else start
            shapes[matrix] = (stop,), dtype
        # Which columns each tensor has, and whether they are scalars.
        self._parts: dict[str, list[tuple[str, bool]]] = {key: [] for key in shapes}
        for name, (key, place) in self._places.items():
            self._parts[key].append((name, isinstance(place, int)))
        self.tensors = {
            name: torch.empty((capacity, *shape), dtype=dtype, device=device)
            if path is None
            else _mapped((capacity, *shape), dtype, path)
            for name, (shape, dtype) in shapes.items()
        }

    def write(self, slots: slice, rows: Mapping[str, Tensor]) -> None:
        """Write rows by column name, each `[rows, *shape]`, into slots."""
        for key, tensor in self.tensors.items():
            parts = [rows[name].unsqueeze(1) if is_scalar else rows[name] for name, is_scalar in self._parts[key]]
            torch.cat([part.to(tensor.device) for part in parts], 1, out=tensor[slots])

    def gather(self, index: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Return copies of the rows at `index`, on a device, laid out as `tensors`, each `[*index, *row]`."""
        flat, gathered = index.reshape(-1), {}
        for key, tensor in self.tensors.items():
            rows = tensor.index_select(0, flat.to(tensor.device)).to(device)
            gathered[key] = rows.view(index.shape + tensor.shape[1:])
        return gathered

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return views by column name, each `[..., *shape]`, of tensors laid out as `tensors`, each `[..., *row]`."""
        views = {}
        for name, (key, place) in self._places.items():
            tensor = tensors[key]
            if isinstance(place, int):
                tensor = tensor.select(-1, place)
            elif place is not None:
                tensor = tensor.narrow(-1, place.start, place.stop - place.start)
            views[name] = tensor
        return views


class Rows:
    """Rows to sample from, of a replay or a data set: `size` rows can be drawn, and batches are on `device`."""

    size: int
    device: torch.device
    _missing: ClassVar[str]
    """The error message if there are no rows yet."""
    stored: Columns | None = None

    def sample(self, count: int, batch: int, generator: torch.Generator) -> Tensor:
        """Draw rows uniformly, with replacement; return their indices, int64 `[count, batch]`.

        Args:
            count: Batches.
            batch: Rows of each batch.
            generator: Source of the draws, on the device.
        """
        if not self.size:
            raise RuntimeError(self._missing)
        return torch.randint(self.size, (count, batch), generator=generator, device=self.device)

    def gather(self, index: Tensor) -> dict[str, Tensor]:
        """Return copies of rows by name, each `[*index, ...]`; vectors of one dtype share a tensor.

        Args:
            index: Their indices, int64 `[*index]`.
        """
        return self.columns.views(self.columns.gather(index, self.device))

    @property
    def columns(self) -> Columns:
        """The columns that hold the rows; raise `RuntimeError` if there are none."""
        if self.stored is None:
            raise RuntimeError(self._missing)
        return self.stored


def spec_to_plain(spec: Spec) -> dict[str, Any]:
    """Return the columns of a row as plain data."""
    return {name: {"shape": list(shape), "dtype": _name(dtype)} for name, (shape, dtype) in spec.items()}


def spec_from_plain(plain: Mapping[str, Any]) -> dict[str, Column]:
    """Return the columns of a row from the plain data of `spec_to_plain`."""
    dtypes = {**DTYPES, "bfloat16": torch.bfloat16}
    return {name: Column(tuple(each["shape"]), dtypes[each["dtype"]]) for name, each in plain.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """Map a new file of a folder into memory as `[*shape]`; unlink it at once, so it is not shared or left behind."""
    size = math.prod(shape)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(prefix="rl8x-replay-", dir=folder)
        try:
            # Allocate all of it now: with a full disk, writing to the mapping would kill the process by SIGBUS.
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(file, 0, size * dtype.itemsize)
            return torch.from_file(name, shared=True, size=size, dtype=dtype).view(shape)
        finally:
            os.close(file)
            Path(name).unlink()
    except OSError as error:  # a quota, or another process has taken the space since the check
        raise ValueError(
            f"a replay's file of {size * dtype.itemsize / 1e9:,.1f} GB cannot be made in {folder}: {error.strerror}. "
            "Lower the capacity, or give another folder."
        ) from error


# A segment's name becomes a file name, so it must not contain a path.
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")
_ROWS: Final = 32_768

Content: TypeAlias = dict[str, Tensor]
"""The tensors of a segment by name, of any shapes."""


@dataclasses.dataclass(eq=False)
class Segment:
    """A named piece of a state; the content of a name never changes."""

    name: str
    content: Callable[[], Content]

    def __post_init__(self) -> None:
        if not is_segment_name(self.name):  # it is the name of a file
            raise ValueError(f"a segment's name has small letters, digits and '-', 100 at most; got {self.name!r}.")


def is_segment_name(name: object) -> bool:
    """Whether a value is a legal name of a segment."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


class Piece(NamedTuple):
    """A segment's rows, by their numbers, counted from the first row ever appended."""

    first: int
    last: int  # the number of the row after the last
    name: str  # the segment's


def segment_rows(row_bytes: int) -> int:
    """Return the number of rows of a full segment, a power of two: 32,768, or fewer if those exceed 8 MB."""
    rows = _ROWS
    while rows > 1 and rows * row_bytes > 8_000_000:
        rows //= 2
    return rows


class Replay(Rows):
    """The most recently appended rows, in memory allocated at the first `append`; `total` counts all appended rows."""

    _missing = "a replay without rows cannot be sampled from; append some before."

    def __init__(self, capacity: int, device: torch.device | str, *, path: str | Path | None = None) -> None:
        self.capacity = capacity
        self.device = resolve_device(device)
        self.size = 0
        self.total = 0
        self._path = None if path is None else Path(path)
        # Row i, counted from the first ever appended, is in slot (i - base) % capacity.
        self._base = 0
        self._divide([])

    def _divide(self, pieces: list[Piece]) -> None:
        """Set the pieces of the rows; new pieces will get names that no other replay uses."""
        self._pieces, self._key = pieces, uuid.uuid4().hex

    @property
    def oldest(self) -> int:
        """The number of the oldest stored row, counted from the first ever appended."""
        return self.total - self.size

    @torch.no_grad()
    def append(self, rows: Mapping[str, Tensor]) -> None:
        """Append rows, whose numbers are finite, replacing the oldest."""
        if not rows:
            return
        if self.stored is None:
            self.stored = Columns(spec_of(rows), self.capacity, self.device, self._path)
        count = len(first_tensor(rows))
        before, self.total = self.total, self.total + count
        self.size = min(self.size + count, self.capacity)
        for first, slots in self.slots(max(before, self.oldest), self.total):
            block = slice(first - before, first - before + slots.stop - slots.start)
            is_whole = block == slice(0, count)
            self.stored.write(slots, rows if is_whole else {name: tensor[block] for name, tensor in rows.items()})

    def slots(self, first: int, last: int) -> Iterator[tuple[int, slice]]:
        """Yield the slots of rows, in at most two pieces."""
        while first < last:
            start = (first - self._base) % self.capacity
            stop = min(start + last - first, self.capacity)
            yield first, slice(start, stop)
            first += stop - start

    def as_tensordict(self) -> TensorDict:
        """Return the rows as a TensorDict of batch size `[size]`, in the order of their slots, sharing the memory."""
        from tensordict import TensorDict  # imports torch's compiler, which takes a second

        views = {} if self.stored is None else self.stored.views(self.stored.tensors)
        return TensorDict({name: view[: self.size] for name, view in views.items()}, batch_size=[self.size])

    def state_dict(self) -> dict[str, Any]:
        """Return the rows in segments; read or clone them (`checkpoint.tree.clone`) before appending more rows."""
        spec = {} if self.stored is None else self.stored.spec
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
        """Return the pieces of the rows; full ones, which end at multiples of `length`, never change."""
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
        return {name: torch.cat([tensor[slots].cpu() for slots in pieces]) for name, tensor in tensors.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore rows, only the newest if there are too many; with the same capacity, each keeps its slot."""
        total, size = state["total"], min(state["size"], self.capacity)
        base = state["base"] if state["capacity"] == self.capacity else total - size
        pieces = [(Piece(first, last, segment.name), segment) for first, last, segment in state["segments"]]
        if size and self.stored is None:
            self.stored = Columns(spec_from_plain(state["columns"]), self.capacity, self.device, self._path)
        self.total, self.size, self._base = total, size, base
        self._divide([piece for piece, _ in pieces])
        first = self.oldest
        for piece, segment in pieces:
            if piece.last <= first:
                continue
            content = segment.content()
            for name, tensor in self.columns.tensors.items():
                # A segment that was written late lacks its first rows, which had been overwritten.
                rows = content[name][len(content[name]) - (piece.last - first) :]
                for number, slots in self.slots(first, piece.last):
                    tensor[slots].copy_(rows[number - first : number - first + slots.stop - slots.start])
            first = piece.last

"""The storage of a replay: the columns of its rows, their size in bytes, and their layout in memory."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rl8x import spaces


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
    """Rows in one tensor per dtype, so that a batch is one `index_select` of each.

    Scalars and vectors of one dtype lie side by side in one matrix `[capacity, width]`; what has more axes, such as an
    image, is a tensor of its own, `[capacity, *shape]`.
    """

    def __init__(self, spec: Spec, capacity: int, device: torch.device, path: Path | None = None) -> None:
        self.spec = dict(spec)
        self._places: dict[str, tuple[str, int | slice | None]] = {}
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in spec.items():
            if len(shape) > 1:
                self._places[name], shapes[name] = (name, None), (shape, dtype)
                continue
            matrix = f"vectors.{dtype_name(dtype)}"
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
        """Return copies of rows on a device, laid out as `tensors`, each `[*index, *row]`, given where they are."""
        flat, gathered = index.reshape(-1), {}
        for key, tensor in self.tensors.items():
            rows = tensor.index_select(0, flat.to(tensor.device)).to(device)
            gathered[key] = rows.view(index.shape + tensor.shape[1:])
        return gathered

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return rows by their names, each `[..., *shape]`, of tensors laid out as `tensors`, each `[..., *row]`."""
        views = {}
        for name, (key, place) in self._places.items():
            tensor = tensors[key]
            if isinstance(place, int):
                tensor = tensor.select(-1, place)
            elif place is not None:
                tensor = tensor.narrow(-1, place.start, place.stop - place.start)
            views[name] = tensor
        return views


def spec_to_plain(spec: Spec) -> dict[str, Any]:
    """Return the columns of a row as plain data."""
    return {name: {"shape": list(shape), "dtype": dtype_name(dtype)} for name, (shape, dtype) in spec.items()}


def spec_from_plain(plain: Mapping[str, Any]) -> dict[str, Column]:
    """Return the columns of a row from the plain data of `spec_to_plain`."""
    return {name: Column(tuple(each["shape"]), DTYPES[each["dtype"]]) for name, each in plain.items()}


def shown(spec: Spec) -> str:
    """Return the columns of a row as text for a message."""
    return ", ".join(f"{name} {dtype_name(dtype)} {list(shape)}" for name, (shape, dtype) in spec.items())


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


DTYPES: Final = {**spaces.DTYPES, "bfloat16": torch.bfloat16}


def _mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """Map a new file `[*shape]` in a folder into memory; it is unlinked at once, and freed when the mapping is closed.

    So two processes never share one, and none is left behind.
    """
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


def take_room(folder: Path, size: int) -> None:
    """Raise if a folder's disk cannot provide these bytes: writing to a mapped file would kill; create it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        if size and hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, size)

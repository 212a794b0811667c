"""Reads HDF5 files that anybody may have made, or that are damaged.

The library opens other files where a file says so, reserves whatever a file declares, and fills in what was never
written. So each array is looked at before it is read: it must be numbers that the file itself holds, and fit into
memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from torch import Tensor

# For whole numbers that torch hardly computes with, a type that holds them all.
_WIDER: Final = {"uint16": np.int32, "uint32": np.int64}


@contextlib.contextmanager
def refused_if_damaged(what: str) -> Iterator[None]:
    """Say in one line that a file cannot be read, whatever goes wrong within the context."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # of damaged files h5py, and Minari with it, raise nearly everything there is
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(f"{what}, or damaged: {reason:.300}.") from None


def read_arrays(path: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Read arrays at the top of a file; those that are not there are left out."""
    import h5py

    with h5py.File(path, "r") as file:
        found = {name: _member(file, name) for name in names if file.get(name, getlink=True) is not None}
        _check_fits(sum(_checked_bytes(name, array) for name, array in found.items()))
        return {names[name]: _tensor(name, array[()]) for name, array in found.items()}


def check_groups(path: Path) -> dict[str, dict[str, int]]:
    """Check all arrays in the groups of a file as `read_arrays` does; return the rows of those at the top of each."""
    import h5py

    with h5py.File(path, "r") as file:
        need, seen, rows = 0, set[int](), dict[str, dict[str, int]]()
        left: list[tuple[tuple[str, ...], Any]] = [((name,), _member(file, name)) for name in file]
        while left:
            names, member = left.pop()
            if not isinstance(member, h5py.Group):
                need += _checked_bytes("/".join(names), member)
                rows.setdefault(names[0], {})["/".join(names[1:])] = member.shape[0] if member.shape else 0
                continue
            address = h5py.h5o.get_info(member.id).addr
            if address in seen:
                raise ValueError(f"`{'/'.join(names)}` is there twice")  # maybe within itself
            seen.add(address)
            rows.setdefault(names[0], {})
            left += [((*names, name), _member(member, name)) for name in member]
        _check_fits(need)
        return rows


def _member(group: Any, name: str) -> Any:
    """Return a member of a group, unless it may lie in another file."""
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"`{name}` is a link to something else")
    return group[name]


def _checked_bytes(name: str, array: Any) -> int:
    """Return the memory that an array takes; refuse what the file itself does not hold."""
    import h5py

    if not isinstance(array, h5py.Dataset):
        raise ValueError(f"`{name}` is not an array of numbers")
    if array.is_virtual or array.external:
        raise ValueError(f"`{name}` lies in another file")
    if array.shape is None:
        raise ValueError(f"`{name}` is empty")
    made = array.id.get_create_plist()
    for i in range(made.get_nfilters()):
        number, _, _, filter_name = made.get_filter(i)
        if not h5py.h5z.filter_avail(number):
            raise ValueError(f"`{name}` is stored with the filter {number} ({filter_name!r:.40}), which is not here")
    if array.chunks is None:
        whole = array.id.get_storage_size() >= array.nbytes
    else:
        starts = [range(0, size, chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)]
        whole = array.id.get_num_chunks() >= math.prod(map(len, starts)) and all(
            map(_is_stored(array), product(*starts))
        )
    if not whole:
        raise ValueError(f"`{name}` is said to be {list(array.shape)}, of which not all was ever written")
    return int(array.nbytes)


def _is_stored(array: Any) -> Callable[[tuple[int, ...]], bool]:
    """Return what says whether the chunk at a position is found and is as large as it must be.

    What no filter could make smaller is stored as it is, which the chunk's mask says: it is not shorter then.
    """
    unfiltered = math.prod(array.chunks) * array.dtype.itemsize

    def is_stored(at: tuple[int, ...]) -> bool:
        chunk = array.id.get_chunk_info_by_coord(at)
        return chunk.byte_offset is not None and (not chunk.filter_mask or chunk.size >= unfiltered)

    return is_stored


def _check_fits(need: int) -> None:
    available = psutil.virtual_memory().available
    if need > available:
        raise ValueError(f"it holds {need / 1e9:,.1f} GB, and {available / 1e9:,.1f} GB of memory are available")


def _tensor(name: str, array: Any) -> Tensor:
    array = np.asarray(array)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"`{name}` is not an array of numbers")
    array = array.astype(_WIDER.get(array.dtype.name, array.dtype.newbyteorder("=")), copy=False)
    if array.dtype == np.uint64:
        if array.size and array.max() > np.iinfo(np.int64).max:
            raise ValueError(f"`{name}` has numbers that no tensor holds")
        array = array.astype(np.int64)
    if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
        raise ValueError(f"`{name}` has flags that are neither true nor false")
    return torch.from_numpy(array)

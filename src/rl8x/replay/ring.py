"""A ring of rows on the device: the newest `capacity` of them, appended in blocks and sampled in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl8x.replay.columns import Columns, check_fits, free_disk, spec_of

if TYPE_CHECKING:
    from tensordict import TensorDict


def all_finite(rows: Mapping[str, Tensor]) -> Tensor:
    """Return whether all numbers of some rows are finite, as a 0-d flag on their device.

    One row that is not would be sampled again and again, and spoil all that is learned from then on.
    """
    flags = [tensor.isfinite().all() for tensor in rows.values() if tensor.is_floating_point()]
    return torch.stack(flags).all() if flags else torch.ones((), dtype=torch.bool)


class Replay:
    """The newest rows of all that were appended; allocated at the first `append`, from the shapes and dtypes there.

    Args:
        capacity: Rows that are kept, at least 1.
        device: Where they live, and where batches are made.
        path: A folder to keep them in, on a disk, by memory-mapped tensors; batches are then gathered by the CPU. None
            keeps them in the device's memory.
        available: Returns how many bytes a device has left, None where that is not known; what does not fit is refused.

    Attributes:
        size: Rows that are there.
        total: Rows that were ever appended.

    Raises:
        ValueError: If the capacity is less than 1.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device | str,
        *,
        path: str | Path | None = None,
        available: Callable[[torch.device], int | None] | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a replay's capacity must be at least 1 row; got {capacity}.")
        self.capacity = capacity
        self.device = torch.device(device)
        self.size = 0
        self.total = 0
        self._path = None if path is None else Path(path)
        self._available = available
        self._columns: Columns | None = None
        # Row i, counted from the first ever appended, is in slot (i - base) % capacity.
        self._base = 0

    @torch.no_grad()
    def append(self, rows: Mapping[str, Tensor], *, checked: bool = False) -> None:
        """Append rows in the place of the oldest.

        Args:
            rows: By name, each `[rows, ...]`; names, shapes and dtypes as at the first time.
            checked: Whether the caller has made sure that they are finite; see `all_finite`. Else they are looked at
                here, for which the host waits.

        Raises:
            ValueError: If they are not what a row holds, or not finite, or there is no room for a replay of this
                capacity. Nothing is appended then.
        """
        if not rows:
            return
        count = self._count(rows)
        if not checked and not all_finite(rows):
            wrong = [name for name, tensor in rows.items() if not all_finite({name: tensor})]
            raise ValueError(f"rows with a number that is not finite cannot be appended to a replay: {wrong}.")
        columns = self._allocated(rows)
        kept = min(count, self.capacity)
        start = (self.total + count - kept - self._base) % self.capacity
        first = min(kept, self.capacity - start)
        for name, stored in columns.views(columns.tensors).items():
            newest = rows[name][count - kept :]
            stored[start : start + first].copy_(newest[:first])
            stored[: kept - first].copy_(newest[first:])
        self.total += count
        self.size = min(self.size + count, self.capacity)

    def _count(self, rows: Mapping[str, Tensor]) -> int:
        counts = {name: len(tensor) for name, tensor in rows.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"rows of a replay must be equally many of each name; got {counts}.")
        if self._columns is not None and spec_of(rows) != self._columns.spec:
            raise ValueError(f"a row of this replay holds {_shown(self._columns.spec)}; got {_shown(spec_of(rows))}.")
        return next(iter(counts.values()))

    def _allocated(self, rows: Mapping[str, Tensor]) -> Columns:
        if self._columns is None:
            spec = spec_of(rows)
            if self._path is not None:
                check_fits(spec, self.capacity, free_disk(self._path), str(self._path))
            elif self._available is not None:
                check_fits(spec, self.capacity, self._available(self.device), str(self.device))
            self._columns = Columns(spec, self.capacity, self.device, self._path)
        return self._columns

    def sample(self, count: int, batch: int, generator: torch.Generator) -> Tensor:
        """Draw rows uniformly, with replacement.

        Args:
            count: Batches.
            batch: Rows of each.
            generator: Source of the draws, on the replay's device.

        Returns:
            Where the rows are, `[count, batch]`, int64.

        Raises:
            RuntimeError: If there is no row.
        """
        if not self.size:
            raise RuntimeError("a replay without rows cannot be sampled from; append some before.")
        return torch.randint(self.size, (count, batch), generator=generator, device=self.device)

    @torch.no_grad()
    def gather(self, index: Tensor) -> dict[str, Tensor]:
        """Return copies of rows by name, each `[*index, ...]`, given where they are, `[*index]`, int64.

        Scalars and vectors of one dtype are views of one tensor, `[*index, width]`: not contiguous.
        """
        columns = self._filled()
        gathered = {}
        for name, tensor in columns.tensors.items():
            found = tensor.index_select(0, index.reshape(-1).to(tensor.device)).to(self.device)
            gathered[name] = found.view(*index.shape, *tensor.shape[1:])
        return columns.views(gathered)

    def as_tensordict(self) -> TensorDict:
        """Show the rows as a TensorDict of batch size `[size]`, in the order of their slots, sharing the memory."""
        from tensordict import TensorDict  # it loads torch's compiler, a second that few runs have use for

        if self._columns is None:
            return TensorDict({}, batch_size=[0])
        views = self._columns.views(self._columns.tensors)
        return TensorDict({name: view[: self.size] for name, view in views.items()}, batch_size=[self.size])

    def _filled(self) -> Columns:
        if self._columns is None:
            raise RuntimeError("a replay without rows has nothing to gather; append some before.")
        return self._columns


def _shown(spec: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, (shape, dtype) in spec.items())

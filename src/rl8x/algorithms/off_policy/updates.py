"""Runs all updates that are due after a collect as programs of tensors: loops without Python between updates."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rl8x.algorithms.off_policy.nets import Net, Nets
from rl8x.algorithms.optimizer import updates_not_finite
from rl8x.distributed import ranks
from rl8x.execution import Execution, Program
from rl8x.execution.programs import prepare
from rl8x.rollouts.statistics import Number, Stats, library_of
from rl8x.trees import is_part, row_major

ReplayBatch = Mapping[str, Tensor]
"""The inputs of one update, by flat names: rows of the replay `[batch_size, ...]`, and drawn noise."""

WEIGHTS: Final = "importance_weights"
"""Key of a batch: importance weights of prioritised sampling, `[batch_size]`; missing without priorities."""

# Maximum bytes of the batches that are sampled at once; images would fill the memory.
_BLOCK_BYTES: Final = 2**26


def weighted_mean(losses: Tensor, batch: ReplayBatch) -> Tensor:
    """Return the mean of losses, `[batch_size]`, weighted by the batch's importance weights if it has any."""
    return (losses * batch[WEIGHTS]).mean() if WEIGHTS in batch else losses.mean()


class UpdateResult(NamedTuple):
    """The result of an update.

    Attributes:
        metrics: Its metrics, 0-d each, by name.
        errors: Absolute errors of its values, `[batch_size]`: the priorities of the rows; None where the
            algorithm knows none.
    """

    metrics: Mapping[str, Tensor]
    errors: Tensor | None = None


class Update(Protocol):
    """Learns from one batch: a function of tensors that changes networks in place and has no other effects."""

    @abstractmethod
    def __call__(self, nets: Mapping[str, Net], batch: ReplayBatch) -> UpdateResult:
        """Make one update."""


class OffPolicyUpdater:
    """Runs updates in blocks.

    Args:
        update: What an update does.
        nets: The networks.
        names: The metrics that an update gives, in order.
        execution: How the programs run.
    """

    def __init__(self, update: Update, nets: Nets, names: Sequence[str], execution: Execution) -> None:
        self.update = update
        self.nets = nets
        self.names = tuple(names)
        self.execution = execution
        self._items: tuple[str, ...] = ()

    def run(self, items: ReplayBatch) -> tuple[Tensor, Tensor | None]:
        """Make updates one after the other.

        Args:
            items: What each update reads, by name, `[updates, ...]`.

        Returns:
            Their metrics, `[updates, metrics]`, and the errors of the rows, `[updates, batch_size]`, if any.
        """
        arguments = self._arguments(items)
        rows, *errors = self._program(*arguments)
        return rows, errors[0] if errors else None

    def prepare(self, items: ReplayBatch) -> None:
        """Request compilation for items of this layout, without running the program or waiting for it."""
        arguments = self._arguments(items)
        prepare(self._program, *arguments)

    def _arguments(self, items: ReplayBatch) -> list[Tensor]:
        self._items = tuple(items)
        # Columns of a replay are views of one tensor; compiled programs get contiguous tensors.
        return [*self.nets.state, *self.nets.rates, *[row_major(item) for item in items.values()]]

    @functools.cached_property
    def _program(self) -> Program:
        """Return the loop, built at the first call, when the names of the items are known."""
        if ranks().size > 1:
            return self.execution.split_loop(self._update_tensors, len(self.nets.state), len(self._items))
        return self.execution.loop(
            self._update_tensors,
            len(self.nets.state),
            len(self._items),
            name="update",
            kind="update",
        )

    @torch.no_grad()
    def _update_tensors(self, *tensors: Tensor) -> list[Tensor]:
        """Make one update; this function is compiled."""
        num_state, num_items = len(self.nets.state), len(self._items)
        state, rates, items = tensors[:num_state], tensors[num_state:-num_items], tensors[-num_items:]
        nets = self.nets.bind(state, rates)
        metrics, errors = self.update(nets, dict(zip(self._items, items, strict=True)))
        row = torch.stack([metrics[name] for name in self.names])
        return [row] if errors is None else [row, errors]


def update_stats(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Stats:
    """Average the metrics of a step's updates, and flag non-finite ones.

    Args:
        tensors: Under `rows/...` the metrics of updates in a row, `[updates, metrics]` each, of which some updates may
            lack the last ones; under `weights/...` what was changed, as vectors.
        names: The names of all metrics; norms of gradients end in `grad_norm`.
    """
    rows = [tensor for name, tensor in tensors.items() if is_part(name, "rows")]
    width, means, library = len(names), dict[str, Number](), library_of(rows[0])
    table = library.concatenate([_widened(each, width) for each in rows])
    for i, (name, total) in enumerate(zip(names, table.sum(0), strict=True)):
        count = sum(len(each) for each in rows if each.shape[1] > i)
        means |= {name: total / count} if count else {}
    norms = [name.endswith("grad_norm") for name in names]
    weights = [tensor for name, tensor in tensors.items() if is_part(name, "weights")]
    return Stats({**means, **updates_not_finite(table, norms, weights)})


def _widened(rows: Any, width: int) -> Any:
    """Add columns of zeros to `rows` `[updates, metrics]`, up to `width`."""
    missing = width - rows.shape[1]
    if not missing:
        return rows
    return pad(rows, (0, missing)) if isinstance(rows, Tensor) else np.pad(rows, ((0, 0), (0, missing)))


def block_size(updates: float, batch_bytes: int, *, masks: bool, most: int | None = None) -> int:
    """Return the number of updates in one program; the remainder is done one by one, so that two are compiled.

    Args:
        updates: Updates of a step on average.
        batch_bytes: Bytes of what an update reads.
        masks: Whether a collect may have fewer transitions than usual, because a simulator masks steps. Blocks are
            then small, since a block that is too large is not run at all.
        most: A limit of the algorithm's own.
    """
    size = int(updates**0.5) if masks else int(updates)
    limits = [size, _BLOCK_BYTES // max(1, batch_bytes), *([] if most is None else [most])]
    return max(1, min(limits))

"""A replay that samples rows by priority: more often, the larger their last temporal-difference errors.

Priorities are in blocks of 64, whose sums are kept in float64: a draw searches the sums and then one block, without a
tree and without a host sync.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rl8x.replay.ring import Replay

EPSILON: Final = 1e-6
_BLOCK: Final = 64
# Draws are at most 1 minus this, so that rounding never leads beyond the last row with a priority.
_MARGIN: Final = 2.0**-40


class PrioritizedReplay(Replay):
    """A replay that draws row i with a probability proportional to a power of its priority.

        P(i) = p_i^alpha / sum_k p_k^alpha,    p_i = |delta_i| + epsilon

    A new row gets the largest p so far, initially 1, so that it is likely drawn at least once.

    Source: Schaul et al. 2016, arXiv:1511.05952, section 3.3 (proportional) and algorithm 1.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device | str,
        *,
        alpha: float = 0.6,
        **options: Any,
    ) -> None:
        super().__init__(capacity, device, **options)
        self.alpha = alpha
        num_blocks = -(-capacity // _BLOCK)
        # p^alpha of each slot, 0 for empty ones, and their sums over blocks.
        self._powers = torch.zeros(num_blocks, _BLOCK, device=self.device)
        self._sums = torch.zeros(num_blocks, dtype=torch.float64, device=self.device)
        self._max = torch.ones((), device=self.device)
        # For each update since `begin_updates`: its rows, and their powers and the largest power before it.
        self._replaced: list[tuple[Tensor, Tensor, Tensor]] | None = None

    @torch.no_grad()
    def append(self, rows: Mapping[str, Tensor]) -> None:
        """Append rows, replacing the oldest, with the largest priority; see `Replay.append`."""
        before = self.total
        super().append(rows)
        for _, slots in self.slots(max(before, self.oldest), self.total):
            self._powers.view(-1)[slots] = self._max
            blocks = slice(slots.start // _BLOCK, -(-slots.stop // _BLOCK))
            self._sums[blocks] = self._powers[blocks].sum(1, dtype=torch.float64)

    @torch.no_grad()
    def sample(self, count: int, batch: int, generator: torch.Generator) -> Tensor:
        """Draw rows by their priorities, with replacement: one in each of `batch` equal parts of their sum."""
        if not self.size:
            raise RuntimeError(self._missing)
        draws = torch.rand(count, batch, dtype=torch.float64, generator=generator, device=self.device)
        parts = torch.arange(batch, dtype=torch.float64, device=self.device)
        ends = self._sums.cumsum(0)
        points = draws.add_(parts).view(-1).mul_(ends[-1] * ((1.0 - _MARGIN) / batch))
        block = torch.searchsorted(ends, points, right=True)
        # As a fraction of the block's sum, since sums in another order are rounded differently.
        sums = self._sums[block]
        way = points.sub_(ends[block]).add_(sums).div_(sums).clamp_(0.0, 1.0 - _MARGIN)
        within = self._powers.index_select(0, block).cumsum(1, dtype=torch.float64)
        place = torch.searchsorted(within, (way * within[:, -1]).unsqueeze(1), right=True).squeeze(1)
        return place.add_(block, alpha=_BLOCK).view(count, batch)

    @torch.no_grad()
    def weights(self, index: Tensor, beta: float) -> Tensor:
        """Return importance weights, w_i = (N P(i))^-beta / max_j w_j of the batch, float32 `[count, batch]`."""
        # N and the sum of all powers are constant in a batch, so that the normalisation cancels them.
        powers = self._powers.view(-1)[index]
        return (powers / powers.amin(1, keepdim=True)).pow_(-beta)

    @torch.no_grad()
    def update(self, index: Tensor, errors: Tensor) -> None:
        """Set the priorities of rows by their last errors."""
        flat = index.reshape(-1)
        if self._replaced is not None:
            self._replaced.append((flat, self._powers.view(-1)[flat], self._max.clone()))
        powers = errors.detach().reshape(-1).to(self._powers.dtype).abs().add_(EPSILON).pow_(self.alpha)
        powers = torch.where(powers.isfinite(), powers, self._max)
        torch.maximum(self._max, powers.amax(), out=self._max)
        self._powers.view(-1).scatter_reduce_(0, flat, powers, "amax", include_self=False)
        self._sum_blocks_of(flat)

    def begin_updates(self) -> None:
        """Record the updates from here on, for `undo_updates`."""
        self._replaced = []

    @torch.no_grad()
    def undo_updates(self) -> None:
        """Undo all updates since `begin_updates`, whose errors came from weights that were discarded."""
        while self._replaced:
            flat, powers, largest = self._replaced.pop()
            self._powers.view(-1)[flat] = powers
            self._max.copy_(largest)
            self._sum_blocks_of(flat)

    def _sum_blocks_of(self, flat: Tensor) -> None:
        blocks = flat // _BLOCK
        # Recomputed rather than updated by differences, whose rounding errors would accumulate.
        self._sums[blocks] = self._powers.index_select(0, blocks).sum(1, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows in segments, as `Replay` does, and all priorities."""
        state = {"alpha": self.alpha, "powers": self._powers, "sums": self._sums, "max": self._max}
        return {**super().state_dict(), **state}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore rows and priorities of a state, with this `alpha`; rows of a plain `Replay` get equal priorities."""
        powers = state["powers"].clone() if "powers" in state else None  # it may share memory with what is zeroed
        sums = state["sums"].clone() if "sums" in state else None
        self._powers.zero_()
        self._sums.zero_()
        self._max.copy_(state["max"] if powers is not None else torch.ones(()))
        super().load_state_dict(state)
        for first, slots in self.slots(self.oldest, self.total):
            if powers is None:
                self._powers.view(-1)[slots] = self._max
                continue
            numbers = torch.arange(first, first + slots.stop - slots.start, device=powers.device)
            there = (numbers - state["base"]) % state["capacity"]
            self._powers.view(-1)[slots] = powers.view(-1)[there].to(self.device)
        before = state.get("alpha", self.alpha)
        if before != self.alpha:
            # Rows that were drawn uniformly have no priorities: their powers are 1, and stay 1.
            for each in (self._powers, self._max):
                each.copy_(torch.where(each > 0, each.pow(self.alpha / before if before else 1.0), 0.0))
        if sums is not None and state["capacity"] == self.capacity and before == self.alpha:
            self._sums.copy_(sums)  # for equal bits, since sums in another order are rounded differently
        else:
            self._sums.copy_(self._powers.sum(1, dtype=torch.float64))

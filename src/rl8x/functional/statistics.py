"""Means and variances of batches, over ranks, and running over all batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl8x.distributed import ranks


class Moments(NamedTuple):
    """Count, mean and variance (over the count, not the count less one) of the rows of a batch, in float64.

    Attributes:
        num_rows: How many rows, 0-d.
        mean: Their mean, `[*shape]`.
        var: Their variance, `[*shape]`.
    """

    num_rows: Tensor
    mean: Tensor
    var: Tensor


@torch.no_grad()
def moments(batch: Tensor, mask: Tensor | None = None) -> Moments:
    """Return count, mean and variance over the first axis.

    The rows are shifted by about their mean before they are squared, so that a large offset costs no digits; what
    rounding left of the mean is corrected afterwards.

    Args:
        batch: Numbers, `[rows, *shape]`.
        mask: Which rows count, `[rows]`, bool; None is all. Rows outside of it have no influence, NaN neither.

    Returns:
        Count (0-d), mean and variance (`[*shape]`), float64. Without any row: 0, the shift, 0.

    Raises:
        ValueError: If `batch` has no axis of rows, or `mask` is not one flag a row.
    """
    if not batch.dim() or (mask is not None and mask.shape != batch.shape[:1]):
        flags = "" if mask is None else f" and {list(mask.shape)}"
        raise ValueError(f"`batch` must be shaped [rows, ...] and `mask` [rows]; got {list(batch.shape)}{flags}.")
    if batch.dtype not in (torch.float32, torch.float64):
        batch = batch.to(torch.float32 if batch.is_floating_point() else torch.float64)
    if mask is None:
        count = torch.full((), len(batch), dtype=torch.float64, device=batch.device)
    else:
        count = mask.sum(dtype=torch.float64)
        mask = mask.reshape(-1, *[1] * (batch.ndim - 1))
        batch = torch.where(mask, batch, 0.0)
    total = count.clamp(min=1.0)
    shift = (batch.sum(0) / total).to(batch.dtype)
    centred = batch - shift if mask is None else torch.where(mask, batch - shift, 0.0)
    first = centred.sum(0).to(torch.float64) / total
    second = centred.square_().sum(0).to(torch.float64) / total
    return Moments(count, shift.to(torch.float64) + first, (second - first.square()).clamp(min=0.0))


@torch.no_grad()
def pooled_moments(batch: Tensor, mask: Tensor | None = None) -> Moments:
    """Return count, mean and variance of the numbers `[rows]` of all ranks, 0-d each."""
    own = moments(batch, mask)
    if ranks().size == 1:
        return own
    pooled = RunningMoments().to(batch.device)
    for rank_moments in _of_all_ranks(own):
        pooled.merge(*rank_moments)
    return Moments(pooled.count, pooled.mean, pooled.var)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the explained variance of the returns by the values, over all ranks.

        1 - Var[returns - values] / Var[returns]

    1 is perfect, 0 no better than a constant, below 0 worse than one; 0 where the returns do not vary.

    Args:
        values: Estimated values, `[...]`.
        returns: What they should have been, of the same shape.
        mask: Which elements count, of the same shape, bool; None is all.

    Returns:
        The share, at most 1, 0-d.

    Raises:
        ValueError: If the shapes differ.
    """
    if values.shape != returns.shape or (mask is not None and mask.shape != returns.shape):
        flags = "" if mask is None else f" and {list(mask.shape)}"
        raise ValueError(
            "`values`, `returns` and `mask` must have one shape; "
            f"got {list(values.shape)}, {list(returns.shape)}{flags}."
        )
    mask = None if mask is None else mask.reshape(-1)
    spread = pooled_moments(returns.reshape(-1), mask).var
    error = pooled_moments((returns - values).reshape(-1), mask).var
    share = 1.0 - error / torch.where(spread > 0, spread, 1.0)
    return torch.where(spread > 0, share, 0.0).to(returns.dtype)


class RunningMoments(nn.Module):
    """Running mean and variance of all rows seen so far, independent of how they were batched.

    Everything is updated in place, without a copy to the host, so that a captured program keeps reading and writing
    the same memory. Statistics are float64 whatever the dtype of the numbers and of the module.

    Args:
        shape: Shape of one number, observation or other row; `()` for scalars.
        epsilon: Added to the variance before its root, against division by 0 where a feature never varies; at least 0.

    Raises:
        ValueError: If a size of `shape` or `epsilon` is negative.

    Source: Chan, Golub & LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1 (pairwise merge).
    """

    # Flat, never 0-d: torch.compile (2.13) loses what is written into a float64 scalar on the CPU, without an error.
    num_rows: Tensor
    means: Tensor
    variances: Tensor

    def __init__(self, shape: Sequence[int] = (), *, epsilon: float = 1e-8) -> None:
        super().__init__()
        if not epsilon >= 0 or any(size < 0 for size in shape):
            raise ValueError(f"`shape` and `epsilon` must not be negative; got {tuple(shape)} and {epsilon}.")
        self.shape = tuple(shape)
        self.epsilon = epsilon
        size = math.prod(self.shape)
        self.register_buffer("num_rows", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("means", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variances", torch.ones(size, dtype=torch.float64))

    @property
    def count(self) -> Tensor:
        """Rows seen, 0-d float64."""
        return self.num_rows[0]

    @property
    def mean(self) -> Tensor:
        """Their mean, `[*shape]` float64; 0 before the first."""
        return self.means.view(self.shape)

    @property
    def var(self) -> Tensor:
        """Their variance over the count, `[*shape]` float64; 1 before the first."""
        return self.variances.view(self.shape)

    @torch.no_grad()
    def update(self, batch: Tensor, mask: Tensor | None = None, *, shared: bool = False) -> None:
        """Update with a batch and those of all other ranks, so that all ranks have the same moments.

        Args:
            batch: Rows in any number of leading axes, `[..., *shape]`.
            mask: Which rows count, `[...]`, bool; None is all.
            shared: Whether all ranks have the same batch, which then counts once.

        Raises:
            ValueError: If the shapes do not fit.
        """
        leading = batch.shape[: batch.ndim - len(self.shape)]
        if batch.shape != (*leading, *self.shape) or not leading:
            needed = ", ".join(map(str, ("...", *self.shape)))
            raise ValueError(f"`batch` must be shaped [{needed}]; got {list(batch.shape)}.")
        if mask is not None and mask.shape != leading:
            raise ValueError(f"`mask` must be shaped {list(leading)}, one a row; got {list(mask.shape)}.")
        rows = batch.reshape(leading.numel(), self.means.numel())
        own = moments(rows, None if mask is None else mask.reshape(-1))
        for rank_moments in [own] if shared else _of_all_ranks(own):
            self.merge(*rank_moments)

    @torch.no_grad()
    def merge(self, count: Tensor, mean: Tensor, var: Tensor) -> None:
        """Merge the moments of other rows.

            M = M_a + M_b + (mean_b - mean_a)^2 * n_a * n_b / n,    M = n * var

        Args:
            count: How many rows, 0-d.
            mean: Their mean, `[*shape]`.
            var: Their variance over the count, `[*shape]`.
        """
        total = self.num_rows + count
        share = count / total.clamp(min=1.0)  # the new rows' share of all rows; 0 if there are none
        difference = mean.reshape(-1) - self.means
        spread = difference.square() * (share * (1.0 - share))
        self.variances.copy_(self.variances * (1.0 - share) + var.reshape(-1) * share + spread)
        self.means.add_(difference * share)
        self.num_rows.copy_(total)

    @property
    def std(self) -> Tensor:
        """The root of variance plus epsilon, `[*shape]`, float64."""
        return (self.var + self.epsilon).sqrt()

    def normalize(self, values: Tensor, clip: float | None = None, *, center: bool = True) -> Tensor:
        """Return `(values - mean) / std`, in the dtype of `values`.

        Args:
            values: Rows, `[..., *shape]`.
            clip: The result lies in [-clip, clip]; None does not clip.
            center: Whether the mean is subtracted. Rewards are only scaled: a shift would change the task.

        Returns:
            `[..., *shape]`.
        """
        centred = values - self.mean.to(values.dtype) if center else values
        normalized = centred * self.std.reciprocal().to(values.dtype)
        return normalized if clip is None else normalized.clamp(-clip, clip)

    def denormalize(self, values: Tensor) -> Tensor:
        """Undo `normalize`, where nothing was clipped.

        Args:
            values: Normalised rows, `[..., *shape]`.

        Returns:
            `values * std + mean`, `[..., *shape]`, in the dtype of `values`.
        """
        return values * self.std.to(values.dtype) + self.mean.to(values.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningMoments:
        """Follow `.to(device)`, but keep every digit under `.to(dtype)`, `.half()` and `.bfloat16()`."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.to(fn(buffer).device)
        return self


def _of_all_ranks(own: Moments) -> list[Moments]:
    """Return the moments of every rank's rows, in the order of ranks."""
    if ranks().size == 1:
        return [own]
    gathered = ranks().gather(torch.cat([part.reshape(-1) for part in own]))
    size = own.mean.numel()
    return [Moments(row[0], row[1 : 1 + size], row[1 + size :]) for row in gathered]

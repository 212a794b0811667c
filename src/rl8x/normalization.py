"""Running moments, which bring observations, rewards and values to zero mean and unit scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl8x.functional.stats import Moments, moments


class RunningMoments(nn.Module):
    """Mean and variance of all that was ever seen, whatever the batches it came in.

    Everything is updated in place, without a copy to the host, so that a captured program keeps reading and writing
    the same memory. Statistics are float64 whatever the dtype of the numbers and of the module.

    Args:
        shape: Shape of one number, observation or other row; `()` for scalars.
        epsilon: Added to the variance before its root, against division by 0 where a feature never varies.

    Source: Chan, Golub & LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1 (pairwise merge).
    """

    # Flat, never 0-d: torch.compile (2.13) loses what is written into a float64 scalar on the CPU, without an error.
    num_rows: Tensor
    means: Tensor
    variances: Tensor

    def __init__(self, shape: Sequence[int] = (), *, epsilon: float = 1e-8) -> None:
        super().__init__()
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
    def update(self, batch: Tensor, mask: Tensor | None = None) -> None:
        """Take in a batch; in a process group of torch.distributed, those of all ranks, so that all know the same.

        Args:
            batch: Rows in any number of leading axes, `[..., *shape]`.
            mask: Which rows count, `[...]`, bool; None is all.

        Raises:
            ValueError: If the shapes do not fit.
        """
        leading = batch.shape[: batch.ndim - len(self.shape)]
        if batch.shape != (*leading, *self.shape) or not leading:
            needed = ", ".join(map(str, ("...", *self.shape)))
            raise ValueError(f"`batch` must be shaped [{needed}]; got {list(batch.shape)}.")
        if mask is not None and mask.shape != leading:
            raise ValueError(f"`mask` must be shaped {list(leading)}, one a row; got {list(mask.shape)}.")
        rows = batch.reshape(-1, self.means.numel())
        own = moments(rows, None if mask is None else mask.reshape(-1))
        for each in _of_all_ranks(own):
            self.merge(*each)

    @torch.no_grad()
    def merge(self, count: Tensor, mean: Tensor, var: Tensor) -> None:
        """Take in the moments of other rows, for example those that another process has seen.

        M = M_a + M_b + (mean_b - mean_a)^2 * n_a * n_b / n,    M = n * var
        """
        total = self.num_rows + count
        share = count / total.clamp(min=1.0)  # what the new rows are of all; 0 of 0 is 0
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
        """
        centred = values - self.mean.to(values.dtype) if center else values
        normalized = centred * self.std.reciprocal().to(values.dtype)
        return normalized if clip is None else normalized.clamp(-clip, clip)

    def denormalize(self, values: Tensor) -> Tensor:
        """Undo `normalize` (where nothing was clipped)."""
        return values * self.std.to(values.dtype) + self.mean.to(values.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningMoments:
        """Follow `.to(device)`, but keep every digit under `.to(dtype)`, `.half()` and `.bfloat16()`."""
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.to(fn(buffer).device)
        return self


def _of_all_ranks(own: Moments) -> list[Moments]:
    """Return the moments of every rank's rows, in the order of ranks; without a process group, this process's own."""
    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    flat = torch.cat([part.reshape(-1) for part in own])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    size = own.mean.numel()
    return [Moments(each[0], each[1 : 1 + size], each[1 + size :]) for each in gathered]

"""Reductions over the elements that a mask leaves, and masks for attention. A mask is True where an element counts."""

from __future__ import annotations

import torch
from torch import Tensor

from rl8x.nn.sampling import inverse_cdf


def masked_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Replace the logits of masked elements by a number whose exponential is 0.

    It is finite, because 0 * -inf in the entropy and in its gradient would be NaN, and half of the least one, because
    `log_softmax` subtracts the largest logit from it.
    """
    if mask is None:
        return logits
    return torch.where(mask, logits, torch.finfo(logits.dtype).min / 2)


def masked_mean(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return the mean of the elements that count along `dim`; 0 where none does.

    Args:
        x: Any tensor; what a masked element is, NaN too, has no influence.
        mask: Bool, of a shape that broadcasts to that of `x`.
        dim: The dimension to reduce.
    """
    mask = mask.expand_as(x)
    return torch.where(mask, x, 0.0).sum(dim) / mask.sum(dim).clamp(min=1)


def masked_max(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return the largest of the elements that count along `dim`; 0 where none does. Arguments as for `masked_mean`."""
    mask = mask.expand_as(x)
    largest = torch.where(mask, x, -torch.inf).amax(dim)
    return torch.where(mask.any(dim), largest, 0.0)


def masked_log_softmax(logits: Tensor, mask: Tensor, dim: int = -1) -> Tensor:
    """Return the logarithm of the softmax over the elements that count; finite and very low elsewhere."""
    return masked_logits(logits, mask).log_softmax(dim)


def masked_categorical(logits: Tensor, mask: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one of the elements that count, along the last dimension.

    Args:
        logits: `[..., num_choices]`.
        mask: At least one element of each row must count, `[..., num_choices]`, bool.
        uniform: Numbers in [0, 1), `[...]`.

    Returns:
        Indices, int64 `[...]`, and their log-probabilities, `[...]`.
    """
    log_probs = masked_log_softmax(logits, mask)
    index = inverse_cdf(log_probs, uniform)
    return index, log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def additive_mask(mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what to add to attention's scores: 0 where an element counts, -inf where not."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def boolean_mask(additive: Tensor) -> Tensor:
    """Return True where an additive mask lets an element count: the inverse of `additive_mask`."""
    return additive > -torch.inf


def length_mask(lengths: Tensor, size: int) -> Tensor:
    """Return the mask of sequences of the given lengths, padded at their end.

    Args:
        lengths: Elements that count, `[...]`, int64.
        size: Elements with padding.

    Returns:
        `[..., size]`, bool.
    """
    return torch.arange(size, device=lengths.device) < lengths.unsqueeze(-1)


def causal_mask(size: int, device: torch.device | str | None = None) -> Tensor:
    """Return the mask that lets each element look at itself and what came before, `[size, size]`, bool."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()

"""Masked logits and means. A mask is True where an element counts."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """Replace the logits of masked elements by a number whose exponential is 0.

    It is finite, because 0 * -inf in the entropy and in its gradient would be NaN, and half of the least one, because
    `log_softmax` subtracts the largest logit from it.

    Args:
        logits: `[..., num_choices]`, floating-point.
        mask: True where an element counts, bool, of a shape that broadcasts to that of `logits`.

    Returns:
        `[..., num_choices]`.
    """
    return torch.where(mask, logits, torch.finfo(logits.dtype).min / 2)


def masked_mean(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return the mean along `dim` of the elements that count; 0 if there are none.

    Args:
        x: `[...]`; the values of masked elements, NaN too, have no influence.
        mask: True where an element counts, bool, of a shape that broadcasts to that of `x`.
        dim: The dimension to reduce.

    Returns:
        The shape of `x` without `dim`.
    """
    mask = mask.expand_as(x)
    return torch.where(mask, x, 0.0).sum(dim) / mask.sum(dim).clamp(min=1)

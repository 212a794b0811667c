"""Sampling of a categorical distribution from one uniform number."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_UNIFORM = 1.0 - 2.0**-24
_UNROLLED_CHOICES = 16


def inverse_cdf(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return for each row the first choice whose cumulative probability exceeds the uniform number.

    The threshold is `uniform * total`, with the total as it was summed: smaller than the total whatever is rounded, so
    that the index is always in range.

    Args:
        log_probs: `[..., num_choices]`.
        uniform: Numbers in [0, 1), `[...]`; 1 itself is taken for the largest float below it.

    Returns:
        Indices, int64 `[...]`, never of a choice whose probability is 0 in float32.
    """
    probs = log_probs.detach().float().exp()
    uniform = uniform.clamp(max=LARGEST_UNIFORM)
    if probs.shape[-1] > _UNROLLED_CHOICES:
        return _first_hit(probs, uniform)
    # Added up one by one, a choice of probability 0 leaves the sum as it is, and cannot be the first above anything.
    columns = probs.unbind(-1)
    sums = [columns[0]]
    for column in columns[1:]:
        sums.append(sums[-1] + column)
    threshold = uniform * sums[-1]
    index = torch.zeros_like(uniform, dtype=torch.int64)
    for partial in sums[:-1]:
        index += partial <= threshold
    return index


def _first_hit(probs: Tensor, uniform: Tensor) -> Tensor:
    # On a GPU `cumsum` adds as a tree: neighbours may differ by a rounding error where the probability is 0, so that
    # has to be asked for, and the last sum need not be the largest.
    sums = probs.cumsum(-1).where(probs > 0, 0.0)
    threshold = uniform * sums.amax(-1)
    return (sums > threshold.unsqueeze(-1)).to(torch.uint8).argmax(-1)

"""Values as categorical distributions over atoms."""

from __future__ import annotations

import torch
from torch import Tensor


def expectation(logits: Tensor, atoms: Tensor) -> Tensor:
    """Return the means of distributions over atoms: softmax(logits) . atoms.

    Args:
        logits: `[..., num_atoms]`.
        atoms: The values that have these probabilities, `[num_atoms]`.

    Returns:
        `[...]`.

    Raises:
        ValueError: If there are not as many atoms as logits of a distribution.
    """
    if atoms.dim() != 1 or logits.shape[-1:] != atoms.shape:
        raise ValueError(
            f"`logits` must be [..., num_atoms] for `atoms` [num_atoms]; got {list(logits.shape)}, {list(atoms.shape)}."
        )
    return logits.softmax(-1) @ atoms


def project(probs: Tensor, values: Tensor, atoms: Tensor) -> Tensor:
    """Project distributions onto fixed atoms: each value's probability is split between its two neighbouring atoms.

        p_i = sum_j clamp(1 - |clamp(x_j, z_1, z_n) - z_i| / dz, 0, 1) p_j

    The result sums to what `probs` sums to, and has the same mean where no value lies outside of the atoms. Sums, and
    not additions at indices, whose order accelerators do not keep.

    Args:
        probs: `[..., num_atoms]`.
        values: The values x that have these probabilities, `[..., num_atoms]`.
        atoms: The fixed ones z, equally far apart, rising, `[num_atoms]`.

    Returns:
        `[..., num_atoms]`.

    Source: Bellemare et al. 2017, arXiv:1707.06887, eq. 7.

    Raises:
        ValueError: If there are fewer than two atoms, or the shapes do not fit.
    """
    if atoms.dim() != 1 or len(atoms) < 2 or not probs.shape[-1:] == values.shape[-1:] == atoms.shape:
        raise ValueError(
            "`probs` and `values` must be [..., num_atoms] for `atoms` [num_atoms], at least two; "
            f"got {list(probs.shape)}, {list(values.shape)}, {list(atoms.shape)}."
        )
    low, high = atoms[0], atoms[-1]
    # Places in units of the distance, so that both shares of a value add up to 1 in floating point too.
    places = (torch.minimum(torch.maximum(values, low), high) - low) * ((len(atoms) - 1) / (high - low))
    index = torch.arange(len(atoms), device=atoms.device, dtype=atoms.dtype).unsqueeze(-1)
    shares = (1.0 - (places.unsqueeze(-2) - index).abs()).clamp(min=0.0)  # [..., atom, value]
    return (shares * probs.unsqueeze(-2)).sum(-1)

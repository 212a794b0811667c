"""Learned embeddings of the positions in a sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PositionalEmbedding(nn.Module):
    """Add a learned vector to each position of a sequence.

    Args:
        max_length: Length of the longest sequence.
        width: Width of its elements.
    """

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(max_length, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return a sequence `[..., S, width]` with the vectors of the first S positions added, `[..., S, width]`.

        Raises:
            ValueError: If the sequence is longer than `max_length`.
        """
        if x.shape[-2] > len(self.weight):
            raise ValueError(
                f"a sequence of {x.shape[-2]} elements is longer than `max_length`, which is {len(self.weight)}."
            )
        return x + self.weight[: x.shape[-2]]

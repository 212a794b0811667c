"""Layers side by side: several networks of one shape as one, with a batched product for each layer of all of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LinearStack(nn.Module):
    """Linear layers side by side, of which each has its own rows: `[size, rows, inputs]` to `[size, rows, outputs]`.

    Args:
        size: How many.
        num_inputs: Width of the input of each.
        num_outputs: Width of the output of each.
        gain: Gain of their orthogonal weights; biases are 0, as in `nn.mlp.linear`.
    """

    def __init__(self, size: int, num_inputs: int, num_outputs: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, num_inputs, num_outputs))
        self.bias = nn.Parameter(torch.zeros(size, 1, num_outputs))
        for weight in self.weight.data:
            nn.init.orthogonal_(weight.T, gain)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply all rows in one batched product."""
        return torch.baddbmm(self.bias, x, self.weight)


class LayerNormStack(nn.Module):
    """Layer normalisations side by side, of `[size, rows, width]`, each with its own scales and shifts."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, 1, width))
        self.bias = nn.Parameter(torch.zeros(size, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each row."""
        return F.layer_norm(x, x.shape[-1:]) * self.weight + self.bias

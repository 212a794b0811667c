"""Ways to pass a layer's input around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl8x.nn.names import unknown_name

SKIPS = ("residual", "cat", "none")


class Skip(nn.Module):
    """Join a layer's input x and output y: `residual` x + y, `cat` both side by side, `none` y alone.

    Args:
        kind: One of these names.
        num_inputs: Width of x.
        num_outputs: Width of y; for `residual` the same.
    """

    def __init__(self, kind: str, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        if kind not in SKIPS:
            raise ValueError(unknown_name("skip connection", kind, SKIPS))
        if kind == "residual" and num_inputs != num_outputs:
            raise ValueError(
                f"a residual connection needs equal widths; got {num_inputs} and {num_outputs}. Use 'cat' or 'none'."
            )
        self.kind = kind
        self.num_outputs = num_inputs + num_outputs if kind == "cat" else num_outputs

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Join `[..., num_inputs]` and `[..., num_outputs]`."""
        if self.kind == "residual":
            return x + y
        return torch.cat([x, y], -1) if self.kind == "cat" else y


class SkipSequential(nn.Module):
    """Layers one after the other, with a skip connection around each.

    Args:
        kind: Kind of the skip connections.
        num_inputs: Width of the input.
    """

    def __init__(self, kind: str, num_inputs: int) -> None:
        super().__init__()
        self.kind = kind
        self.num_outputs = num_inputs
        self.layers = nn.ModuleList()
        self.skips = nn.ModuleList()

    def append(self, layer: nn.Module, num_outputs: int) -> SkipSequential:
        """Add a layer that reads what the last connection gave (`num_outputs` wide) and gives another width."""
        skip = Skip(self.kind, self.num_outputs, num_outputs)
        self.layers.append(layer)
        self.skips.append(skip)
        self.num_outputs = skip.num_outputs
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers, `[..., num_inputs]` to `[..., num_outputs]`."""
        for layer, skip in zip(self.layers, self.skips, strict=True):
            x = skip(x, layer(x))
        return x

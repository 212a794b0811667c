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
        """Join x `[..., num_inputs]` and y, and return `[..., self.num_outputs]`."""
        if self.kind == "residual":
            return x + y
        return torch.cat([x, y], -1) if self.kind == "cat" else y

"""Activation functions by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rl8x.names import unknown_name


class SquaredReLU(nn.Module):
    """Compute max(0, x)^2.

    Source: So et al. 2021, arXiv:2109.08668.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to every element.

        Args:
            x: `[...]`.

        Returns:
            `[...]`.
        """
        return torch.relu(x).square()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "squared_relu": SquaredReLU,
    "identity": nn.Identity,
}


def activation(name: str) -> nn.Module:
    """Make the activation of a name.

    Args:
        name: A key of `ACTIVATIONS`.

    Raises:
        ValueError: If there is none of that name; the message has the nearest ones.
    """
    if name not in ACTIVATIONS:
        raise ValueError(unknown_name("activation", name, ACTIVATIONS))
    return ACTIVATIONS[name]()

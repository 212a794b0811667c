"""Small layers: activations by name, masked logits and means, and layers of several networks side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


def initialise(weight: Tensor, gain: float | None) -> None:
    """Draw a weight `[outputs, inputs]`: orthogonal times `gain`; None: uniform within 1 / sqrt(inputs)."""
    if gain is None:
        nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)
    else:
        nn.init.orthogonal_(weight, gain)


class LinearStack(nn.Module):
    """Linear layers side by side, of which each has its own rows: `[size, rows, inputs]` to `[size, rows, outputs]`."""

    def __init__(self, size: int, num_inputs: int, num_outputs: int, gain: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, num_inputs, num_outputs))
        self.bias = nn.Parameter(torch.zeros(size, 1, num_outputs))
        for weight in self.weight.data:
            initialise(weight.T, gain)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply all rows in one batched product."""
        return torch.baddbmm(self.bias, x, self.weight)


class HeadStack(LinearStack):
    """Such layers that compute in float32 where autocast has others compute in bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply all rows in one batched product."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


class LayerNormStack(nn.Module):
    """Layer normalisations side by side, of `[size, rows, width]`, each with its own scales and shifts."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, 1, width))
        self.bias = nn.Parameter(torch.zeros(size, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each row."""
        return F.layer_norm(x, x.shape[-1:]) * self.weight + self.bias

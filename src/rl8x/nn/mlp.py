"""Multilayer perceptrons and the initialisation of their weights."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Sequence

from torch import Tensor, nn

from rl8x.nn.activations import activation as make_activation
from rl8x.nn.perceptron import perceptron, plain_layers

HIDDEN_GAIN = math.sqrt(2.0)


def linear(
    num_inputs: int, num_outputs: int, gain: float = HIDDEN_GAIN, *, kind: type[nn.Linear] = nn.Linear
) -> nn.Linear:
    """Make a linear layer with an orthogonal weight times `gain` and a bias of 0.

    Args:
        num_inputs: Width of the input, `[..., num_inputs]`.
        num_outputs: Width of the output, `[..., num_outputs]`.
        gain: Factor of the weight; sqrt(2) keeps the scale of what goes through a ReLU.
        kind: Class of the layer.

    Raises:
        ValueError: If a width is less than 1.

    Source: Saxe et al. 2014, arXiv:1312.6120.
    """
    check_widths(num_inputs=num_inputs, num_outputs=num_outputs)
    layer = kind(num_inputs, num_outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Sequential):
    """Linear layers with an activation after each, `[..., sizes[0]]` to `[..., sizes[-1]]`.

    Args:
        sizes: Width of the input, of each hidden layer and of the output. One size alone makes an identity.
        activation: Name of the activation between layers.
        activate_last: Whether the last layer is followed by an activation too.
        gain: Gain of the hidden layers' orthogonal weights.
        last_gain: Gain of the last layer; None: that of the hidden ones.
        layer_norm: Whether the output of each layer that an activation follows is normalised before it.

    Attributes:
        num_inputs: Width of the input.
        num_outputs: Width of the output.

    Raises:
        ValueError: If a width is not a whole number of at least 1, or the activation is unknown.

    Source: Ba et al. 2016, arXiv:1607.06450 (layer normalisation).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        activate_last: bool = False,
        gain: float = HIDDEN_GAIN,
        last_gain: float | None = None,
        layer_norm: bool = False,
    ) -> None:
        check_sizes("sizes", sizes)
        if not sizes:
            raise ValueError("`sizes` must have at least the width of the input; got none.")
        layers: list[nn.Module] = []
        for i, (num_inputs, num_outputs) in enumerate(itertools.pairwise(sizes)):
            last = i == len(sizes) - 2
            layers.append(linear(num_inputs, num_outputs, last_gain if last and last_gain is not None else gain))
            if not last or activate_last:
                if layer_norm:
                    layers.append(nn.LayerNorm(num_outputs))
                layers.append(make_activation(activation))
        super().__init__(*layers)
        self.num_inputs, self.num_outputs = sizes[0], sizes[-1]
        self.num_activations = sum(sizes[1:])

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers to every row.

        Args:
            x: `[..., sizes[0]]`.

        Returns:
            `[..., sizes[-1]]`.

        Raises:
            ValueError: If rows have another width.
        """
        if x.shape[-1:] != (self.num_inputs,):
            raise ValueError(f"this MLP reads rows [..., {self.num_inputs}]; got {list(x.shape)}.")
        # As a matrix of rows: torch would copy a batch of more axes that is not contiguous, and add its bias apart.
        flat = x.reshape(-1, x.shape[-1])
        layers = plain_layers(self, flat, self.num_activations)
        rows: Tensor = super().forward(flat) if layers is None else perceptron(flat, layers)  # type: ignore[no-untyped-call]
        return rows.view(*x.shape[:-1], rows.shape[-1])


def check_widths(**widths: int) -> None:
    """Refuse numbers, by the names of arguments, that are not whole or less than 1.

    Raises:
        ValueError: At the first such number.
    """
    for name, width in widths.items():
        if not isinstance(width, numbers.Integral) or isinstance(width, bool) or width < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1; got {width!r}.")


def check_sizes(name: str, sizes: Sequence[int]) -> None:
    """Refuse widths that are not whole numbers of at least 1.

    Raises:
        ValueError: At the first such width.
    """
    whole = isinstance(sizes, Sequence) and all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
    if isinstance(sizes, str) or not whole or any(size < 1 for size in sizes):
        raise ValueError(f"`{name}` must be a list of whole numbers of at least 1, such as [256, 256]; got {sizes!r}.")

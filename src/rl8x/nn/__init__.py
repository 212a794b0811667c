"""Building blocks of networks."""

from rl8x.nn.activations import ACTIVATIONS, SquaredReLU, activation
from rl8x.nn.mlp import MLP, linear

__all__ = ["ACTIVATIONS", "MLP", "SquaredReLU", "activation", "linear"]

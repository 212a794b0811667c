"""Building blocks of networks."""

from rl8x.nn.activations import ACTIVATIONS, SquaredReLU, activation
from rl8x.nn.attention import (
    Attention,
    CrossAttention,
    PositionalEmbedding,
    SelfAttention,
    SelfAttentionStack,
    Skip,
)
from rl8x.nn.masking import masked_logits, masked_mean
from rl8x.nn.mlp import MLP, linear
from rl8x.nn.perceiver import Perceiver
from rl8x.nn.pointer import PointerNetwork

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Attention",
    "CrossAttention",
    "Perceiver",
    "PointerNetwork",
    "PositionalEmbedding",
    "SelfAttention",
    "SelfAttentionStack",
    "Skip",
    "SquaredReLU",
    "activation",
    "linear",
    "masked_logits",
    "masked_mean",
]

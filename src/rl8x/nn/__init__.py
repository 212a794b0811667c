"""Building blocks of networks."""

from rl8x.nn.attention import (
    Attention,
    CrossAttention,
    Perceiver,
    PointerNetwork,
    PositionalEmbedding,
    SelfAttention,
    SelfAttentionStack,
    Skip,
)
from rl8x.nn.layers import ACTIVATIONS, SquaredReLU, activation, masked_logits, masked_mean
from rl8x.nn.mlp import MLP, linear

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

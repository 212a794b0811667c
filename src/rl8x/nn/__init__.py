"""Building blocks of networks, which the built-in models consist of too."""

from rl8x.models.attention import (
    Attention,
    CrossAttention,
    Perceiver,
    PointerNetwork,
    PositionalEmbedding,
    SelfAttention,
    SelfAttentionStack,
    Skip,
)
from rl8x.models.layers import ACTIVATIONS, SquaredReLU, activation, linear, masked_logits, masked_mean
from rl8x.models.mlp import MLP

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

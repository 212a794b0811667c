"""Building blocks of networks."""

from rl8x.nn.activations import ACTIVATIONS, SquaredReLU, activation
from rl8x.nn.attention import Attention, CrossAttention, SelfAttention, SelfAttentionStack
from rl8x.nn.masking import (
    additive_mask,
    boolean_mask,
    causal_mask,
    length_mask,
    masked_categorical,
    masked_log_softmax,
    masked_max,
    masked_mean,
)
from rl8x.nn.mlp import MLP, linear
from rl8x.nn.perceiver import Perceiver, PerceiverIO
from rl8x.nn.pointer import PointerNetwork
from rl8x.nn.positions import PositionalEmbedding
from rl8x.nn.skip import Skip, SkipSequential

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Attention",
    "CrossAttention",
    "Perceiver",
    "PerceiverIO",
    "PointerNetwork",
    "PositionalEmbedding",
    "SelfAttention",
    "SelfAttentionStack",
    "Skip",
    "SkipSequential",
    "SquaredReLU",
    "activation",
    "additive_mask",
    "boolean_mask",
    "causal_mask",
    "length_mask",
    "linear",
    "masked_categorical",
    "masked_log_softmax",
    "masked_max",
    "masked_mean",
]

"""Building blocks of networks, which the built-in models consist of too."""

from rl8x.models.attention import Attention as Attention
from rl8x.models.attention import CrossAttention as CrossAttention
from rl8x.models.attention import Perceiver as Perceiver
from rl8x.models.attention import PointerNetwork as PointerNetwork
from rl8x.models.attention import PositionalEmbedding as PositionalEmbedding
from rl8x.models.attention import SelfAttention as SelfAttention
from rl8x.models.attention import SelfAttentionStack as SelfAttentionStack
from rl8x.models.attention import Skip as Skip
from rl8x.models.layers import ACTIVATIONS as ACTIVATIONS
from rl8x.models.layers import SquaredReLU as SquaredReLU
from rl8x.models.layers import activation as activation
from rl8x.models.layers import linear as linear
from rl8x.models.layers import masked_logits as masked_logits
from rl8x.models.layers import masked_mean as masked_mean
from rl8x.models.mlp import MLP as MLP

"""What layers refuse, each in a line that says what came and what is legal."""

import pytest
import torch

from rl8x.nn import (
    MLP,
    Attention,
    CrossAttention,
    Perceiver,
    PointerNetwork,
    PositionalEmbedding,
    SelfAttentionStack,
    Skip,
    activation,
    linear,
)

WHOLE = "must be .*whole number.? of at least 1"
REFUSED = [
    *(("sizes", lambda sizes=sizes: MLP(sizes)) for sizes in ([], [3, 0], [3, 2.5], "34")),
    *((f"`num_inputs` {WHOLE}; got", lambda width=width: linear(width, 3)) for width in (0, 2.5, True, "3", None)),
    (f"`num_outputs` {WHOLE}; got", lambda: linear(3, 0)),
    (r"reads rows \[..., 3\]; got \[5, 4\]", lambda: MLP([3, 2])(torch.rand(5, 4))),
    ("no activation 'squared-relu'. Did you mean 'squared_relu'", lambda: activation("squared-relu")),
    ("must divide the width; got 3 and 8", lambda: Attention(8, 3)),
    (f"`num_heads` {WHOLE}", lambda: Attention(8, 0)),
    (f"`context_width` {WHOLE}", lambda: CrossAttention(8, 1, context_width=0)),
    (f"`sizes` {WHOLE}", lambda: CrossAttention(8, 1, hidden_size=0)),
    (f"`num_layers` {WHOLE}", lambda: SelfAttentionStack(8, 2, 0)),
    (f"`max_length` {WHOLE}", lambda: PositionalEmbedding(0, 8)),
    ("6 elements is longer than `max_length`, which is 5", lambda: PositionalEmbedding(5, 3)(torch.randn(2, 6, 3))),
    (f"`num_outputs` {WHOLE}", lambda: Skip("none", 8, 0)),
    ("Did you mean 'residual'", lambda: Skip("residul", 3, 3)),
    ("equal widths; got 3 and 4", lambda: Skip("residual", 3, 4)),
    (f"`num_latents` {WHOLE}; got 0", lambda: Perceiver(6, 0, 8)),
    ("latents keep their width", lambda: Perceiver(6, 4, 8, skip="cat")),
    (f"`query_width` {WHOLE}; got 0", lambda: PointerNetwork(3, 0, 5)),
]


@pytest.mark.parametrize(("message", "make"), REFUSED)
def test_what_is_not_legal_is_refused_with_what_is(message, make):
    with pytest.raises(ValueError, match=message):
        make()

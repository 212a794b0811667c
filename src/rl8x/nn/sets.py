"""Networks over sets: a perceiver reads long inputs into latent vectors, a pointer chooses among elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl8x.nn.attention import CrossAttention, SelfAttentionStack
from rl8x.nn.layers import masked_logits
from rl8x.nn.mlp import check_widths


class Perceiver(nn.Module):
    """Latent vectors that look at the inputs, then at each other, as often as there are layers.

    Args:
        num_inputs: Width of the inputs.
        num_latents: How many latent vectors, at least 1.
        width: Their width; a multiple of `num_heads`.
        num_heads: Heads of each attention, at least 1.
        num_layers: Times that the latents look at the inputs, at least 1.
        num_blocks: Blocks of self-attention after each time, at least 1.
        options: Further arguments of the attention blocks: `hidden_size`, `activation`, `skip` (not `"cat"`).

    Attributes:
        num_outputs: Width of the output, which is `width`.

    Raises:
        ValueError: If a number is less than 1, or as in `CrossAttention`.

    Source: Jaegle et al. 2021, arXiv:2103.03206.
    """

    def __init__(
        self,
        num_inputs: int,
        num_latents: int,
        width: int,
        *,
        num_heads: int = 1,
        num_layers: int = 1,
        num_blocks: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        check_widths(num_inputs=num_inputs, num_latents=num_latents, num_layers=num_layers)
        if options.get("skip", "residual") == "cat":
            raise ValueError("a perceiver's latents keep their width: `skip` must be 'residual' or 'none'; got 'cat'.")
        self.num_outputs = width
        self.latents = nn.Parameter(0.02 * torch.randn(num_latents, width))
        layers = range(num_layers)
        self.reads = nn.ModuleList(
            CrossAttention(width, num_heads, context_width=num_inputs, **options) for _ in layers
        )
        self.stacks = nn.ModuleList(SelfAttentionStack(width, num_heads, num_blocks, **options) for _ in layers)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """Read inputs into latents.

        Args:
            inputs: `[B, S, num_inputs]`.
            mask: True where an input counts, `[B, S]`, bool.

        Returns:
            `[B, num_latents, width]`.
        """
        latents = self.latents.expand(inputs.shape[0], -1, -1)
        visible = None if mask is None else mask.unsqueeze(1)
        for read, stack in zip(self.reads, self.stacks, strict=True):
            latents = stack(read(latents, inputs, visible))
        return latents


class PointerNetwork(nn.Module):
    """Score the elements of a set against a query: logits_i = v . tanh(W_k e_i + W_q q).

    Args:
        num_inputs: Width of the elements.
        query_width: Width of the query.
        hidden_size: Width in between.

    Raises:
        ValueError: If a width is less than 1.

    Source: Vinyals et al. 2015, arXiv:1506.03134, eq. 3.
    """

    def __init__(self, num_inputs: int, query_width: int, hidden_size: int) -> None:
        super().__init__()
        check_widths(num_inputs=num_inputs, query_width=query_width, hidden_size=hidden_size)
        self.key = nn.Linear(num_inputs, hidden_size, bias=False)
        self.query = nn.Linear(query_width, hidden_size)
        self.score = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, query: Tensor, elements: Tensor, mask: Tensor | None = None) -> Tensor:
        """Score elements.

        Args:
            query: `[..., query_width]`.
            elements: `[..., S, num_inputs]`.
            mask: True where there is an element that may be chosen, `[..., S]`, bool.

        Returns:
            Logits, `[..., S]`; those of masked elements so low that their probability is 0.
        """
        hidden = torch.tanh(self.key(elements) + self.query(query).unsqueeze(-2))
        # A sum, and no product of matrices, which autocast would take in bfloat16.
        logits = (hidden.float() * self.score.weight.squeeze(0)).sum(-1)
        return logits if mask is None else masked_logits(logits, mask)

"""Attention over torch's fused `scaled_dot_product_attention`; a mask is True where a query may look."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl8x.models.layers import check_widths, masked_logits
from rl8x.models.mlp import MLP
from rl8x.names import unknown_name

SKIPS: Final = ("residual", "cat", "none")


class Skip(nn.Module):
    """Join a layer's input x and output y: x + y (`residual`), both side by side (`cat`), or y alone (`none`).

    Args:
        kind: One of these names.
        num_inputs: Width of x.
        num_outputs: Width of y; for `residual` the same.

    Attributes:
        num_outputs: Width of the result: `num_inputs + num_outputs` for `cat`, else that of y.
    """

    def __init__(self, kind: str, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        if kind not in SKIPS:
            raise ValueError(unknown_name("skip connection", kind, SKIPS))
        check_widths(num_inputs=num_inputs, num_outputs=num_outputs)
        if kind == "residual" and num_inputs != num_outputs:
            raise ValueError(
                f"a residual connection needs equal widths; got {num_inputs} and {num_outputs}. Use 'cat' or 'none'."
            )
        self.kind = kind
        self.num_outputs = num_inputs + num_outputs if kind == "cat" else num_outputs

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the joined tensors, `[..., self.num_outputs]`.

        Args:
            x: The layer's input, `[..., num_inputs]`.
            y: The layer's output, `[..., num_outputs]` as in the constructor.
        """
        if self.kind == "residual":
            return x + y
        return torch.cat([x, y], -1) if self.kind == "cat" else y


class PositionalEmbedding(nn.Module):
    """Add a learned vector to each position of a sequence.

    Args:
        max_length: Length of the longest sequence, at least 1.
        width: Width of its elements, at least 1.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5, the learned ones.
    """

    def __init__(self, max_length: int, width: int) -> None:
        super().__init__()
        check_widths(max_length=max_length, width=width)
        self.weight = nn.Parameter(0.02 * torch.randn(max_length, width))

    def forward(self, x: Tensor) -> Tensor:
        """Add the vectors of the first S positions.

        Args:
            x: A sequence, `[..., S, width]`, as the result is.
        """
        if x.shape[-2] > len(self.weight):
            raise ValueError(
                f"a sequence of {x.shape[-2]} elements is longer than `max_length`, which is {len(self.weight)}."
            )
        return x + self.weight[: x.shape[-2]]


class Attention(nn.Module):
    """Multi-head attention of queries to a context.

    Args:
        width: Width of queries and of the output; a multiple of `num_heads`.
        num_heads: Heads, at least 1.
        context_width: Width of the context; None: that of the queries.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.
    """

    def __init__(self, width: int, num_heads: int, *, context_width: int | None = None) -> None:
        super().__init__()
        context_width = width if context_width is None else context_width
        check_widths(width=width, num_heads=num_heads, context_width=context_width)
        if width % num_heads:
            raise ValueError(f"`num_heads` must divide the width; got {num_heads} and {width}.")
        self.num_heads = num_heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(context_width, width)
        self.value = nn.Linear(context_width, width)
        self.out = nn.Linear(width, width)
        for layer in (self.query, self.key, self.value, self.out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what each query gathers from the context, `[B, Q, width]`.

        Args:
            x: Queries, `[B, Q, width]`.
            context: Keys and values, `[B, S, context_width]`.
            mask: True where a query may look, bool, broadcast to `[B, Q, S]`: `[B, 1, S]` for a context with padding,
                `[S, S]` for a causal one. A query that may look nowhere gathers zeros.
        """
        query, key, value = (
            layer(inputs).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, inputs in ((self.query, x), (self.key, context), (self.value, context))
        )
        if mask is None:
            gathered = functional.scaled_dot_product_attention(query, key, value)
        else:
            mask = (mask if mask.dim() == 3 else mask.unsqueeze(0)).unsqueeze(1)
            sees = mask.any(-1, keepdim=True)
            # Some kernels return NaN for a query that sees nothing: let it see everything, and drop the result.
            gathered = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask | ~sees)
            gathered = gathered.masked_fill(~sees, 0.0)
        out: Tensor = self.out(gathered.transpose(1, 2).flatten(-2))
        return out


class CrossAttention(nn.Module):
    """Attention to a context, then a perceptron; each has normalised inputs and a skip connection.

    Args:
        width: Width of the queries; a multiple of `num_heads`.
        num_heads: Heads, at least 1.
        context_width: Width of the context; None: that of the queries.
        hidden_size: Width of the perceptron's hidden layer; None: four times that of the queries.
        activation: Name of its activation.
        skip: Kind of the skip connections: `"residual"`, `"cat"` or `"none"`.

    Attributes:
        num_outputs: Width of the output: `width`, or 3 times that with `"cat"`.

    Source: Xiong et al. 2020, arXiv:2002.04745 (normalisation before each part).
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        context_width: int | None = None,
        hidden_size: int | None = None,
        activation: str = "gelu",
        skip: str = "residual",
    ) -> None:
        super().__init__()
        context_width = width if context_width is None else context_width
        check_widths(width=width, context_width=context_width)
        self.query_norm = nn.LayerNorm(width)
        self.context_norm = nn.LayerNorm(context_width)
        self.attention = Attention(width, num_heads, context_width=context_width)
        self.attention_skip = Skip(skip, width, width)
        between = self.attention_skip.num_outputs
        self.mlp_norm = nn.LayerNorm(between)
        self.mlp = MLP([between, 4 * width if hidden_size is None else hidden_size, width], activation=activation)
        self.mlp_skip = Skip(skip, between, width)
        self.num_outputs = self.mlp_skip.num_outputs

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return what the queries read from a context, `[B, Q, num_outputs]`.

        Args:
            x: Queries, `[B, Q, width]`.
            context: What they look at, `[B, S, context_width]`.
            mask: Where a query may look, as in `Attention`.
        """
        return self._finish(x, self.attention(self.query_norm(x), self.context_norm(context), mask))

    def _finish(self, x: Tensor, gathered: Tensor) -> Tensor:
        x = self.attention_skip(x, gathered)
        out: Tensor = self.mlp_skip(x, self.mlp(self.mlp_norm(x)))
        return out


class SelfAttention(CrossAttention):
    """A block of self-attention; arguments are those of `CrossAttention`, except `context_width`."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        hidden_size: int | None = None,
        activation: str = "gelu",
        skip: str = "residual",
    ) -> None:
        super().__init__(width, num_heads, hidden_size=hidden_size, activation=activation, skip=skip)
        del self.context_norm

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Apply the block to a sequence `[B, S, width]`; return `[B, S, num_outputs]`."""
        normed = self.query_norm(x)
        return self._finish(x, self.attention(normed, normed, mask))


class SelfAttentionStack(nn.Module):
    """Blocks of self-attention one after the other.

    Args:
        width: Width of the sequence; a multiple of `num_heads`.
        num_heads: Heads of each block, at least 1.
        num_layers: Number of blocks, at least 1.
        options: Further arguments of `SelfAttention`.

    Attributes:
        num_outputs: Width of the output: `width`, or 3 times as much for each block with `skip="cat"`.
    """

    def __init__(self, width: int, num_heads: int, num_layers: int, **options: Any) -> None:
        super().__init__()
        check_widths(num_layers=num_layers)
        self.blocks = nn.ModuleList()
        self.num_outputs = width
        for _ in range(num_layers):
            block = SelfAttention(self.num_outputs, num_heads, **options)
            self.blocks.append(block)
            self.num_outputs = block.num_outputs

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the last block's output, `[B, S, num_outputs]`.

        Args:
            x: A sequence, `[B, S, width]`.
            mask: Where an element may look, as in `Attention`.
        """
        for block in self.blocks:
            x = block(x, mask)
        return x


class Perceiver(nn.Module):
    """Alternating cross-attention to the inputs and self-attention over latent vectors.

    Args:
        num_inputs: Width of the inputs.
        num_latents: Number of latent vectors, at least 1.
        width: Their width; a multiple of `num_heads`.
        num_heads: Heads of each attention, at least 1.
        num_layers: Times that the latents look at the inputs, at least 1.
        num_blocks: Blocks of self-attention after each time, at least 1.
        options: Further arguments of the attention blocks: `hidden_size`, `activation`, `skip` (not `"cat"`).

    Attributes:
        num_outputs: Width of the output, which is `width`.

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
        """Return latents that have read the inputs, `[B, num_latents, width]`.

        Args:
            inputs: `[B, S, num_inputs]`.
            mask: True where an input counts, `[B, S]`, bool.
        """
        latents = self.latents.expand(inputs.shape[0], -1, -1)
        visible = None if mask is None else mask.unsqueeze(1)
        for read, stack in zip(self.reads, self.stacks, strict=True):
            latents = stack(read(latents, inputs, visible))
        return latents


class PointerNetwork(nn.Module):
    """Score the elements of a set against a query: logits_i = v . tanh(W_k e_i + W_q q).

    Args:
        num_inputs: Width of the elements, at least 1.
        query_width: Width of the query, at least 1.
        hidden_size: Width in between, at least 1.

    Source: Vinyals et al. 2015, arXiv:1506.03134, eq. 3.
    """

    def __init__(self, num_inputs: int, query_width: int, hidden_size: int) -> None:
        super().__init__()
        check_widths(num_inputs=num_inputs, query_width=query_width, hidden_size=hidden_size)
        self.key = nn.Linear(num_inputs, hidden_size, bias=False)
        self.query = nn.Linear(query_width, hidden_size)
        self.score = nn.Linear(hidden_size, 1, bias=False)

    def forward(self, query: Tensor, elements: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits of elements, `[..., S]`; those of masked ones so low that their probability is 0.

        Args:
            query: `[..., query_width]`.
            elements: `[..., S, num_inputs]`.
            mask: True where there is an element that may be chosen, `[..., S]`, bool.
        """
        hidden = torch.tanh(self.key(elements) + self.query(query).unsqueeze(-2))
        # A sum, since autocast would compute a matrix product in bfloat16.
        logits = (hidden.float() * self.score.weight.squeeze(0)).sum(-1)
        return logits if mask is None else masked_logits(logits, mask)

"""Choosing among a varying number of elements."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl8x.nn.masking import masked_logits
from rl8x.nn.mlp import check_widths


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

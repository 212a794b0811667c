from __future__ import annotations

import pytest
import torch

from rl8x.nn import PositionalEmbedding


def test_each_position_has_its_vector():
    positions = PositionalEmbedding(5, 3)
    x = torch.randn(2, 4, 3)
    for i in range(4):
        assert torch.equal(positions(x)[:, i], x[:, i] + positions.weight[i])
    positions(x).sum().backward()
    assert positions.weight.grad[:, 0].tolist() == [2.0, 2.0, 2.0, 2.0, 0.0]


def test_a_longer_sequence_is_refused():
    with pytest.raises(ValueError, match="6 elements is longer than `max_length`, which is 5"):
        PositionalEmbedding(5, 3)(torch.randn(2, 6, 3))

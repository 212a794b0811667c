from __future__ import annotations

import pytest
import torch

from rl8x.nn import PointerNetwork


def test_scores_by_hand():
    pointer = PointerNetwork(3, 4, 5)
    query, elements = torch.randn(2, 4), torch.randn(2, 6, 3)
    logits = pointer(query, elements)
    assert logits.shape == (2, 6)
    for b in range(2):
        for i in range(6):
            hidden = torch.tanh(
                pointer.key.weight @ elements[b, i] + pointer.query.weight @ query[b] + pointer.query.bias
            )
            assert torch.allclose(logits[b, i], pointer.score.weight[0] @ hidden, atol=1e-6)


def test_masked_elements_are_never_chosen_and_have_no_gradient():
    pointer = PointerNetwork(3, 4, 5)
    query, elements = torch.randn(2, 4), torch.randn(2, 6, 3, requires_grad=True)
    mask = torch.tensor([True, False, True, True, False, True]).expand(2, 6)
    probs = pointer(query, elements, mask).softmax(-1)
    assert torch.equal(probs[~mask], torch.zeros(4))
    assert torch.allclose(probs.sum(-1), torch.ones(2))
    (gradient,) = torch.autograd.grad(probs.square().sum(), elements)
    assert torch.equal(gradient[~mask], torch.zeros(4, 3))


def test_leading_dimensions_are_free():
    pointer = PointerNetwork(3, 4, 5)
    query, elements = torch.randn(7, 2, 4), torch.randn(7, 2, 6, 3)
    assert torch.allclose(pointer(query, elements)[3], pointer(query[3], elements[3]), atol=1e-6)


def test_widths_that_are_none_are_refused():
    with pytest.raises(ValueError, match="`query_width` must be a whole number of at least 1; got 0"):
        PointerNetwork(3, 0, 5)

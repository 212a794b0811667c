"""Perceivers and pointer networks."""

from __future__ import annotations

import torch

from rl8x.nn import Perceiver, PointerNetwork


def inputs() -> torch.Tensor:
    return torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))


def test_latents_read_the_inputs_and_then_each_other():
    perceiver = Perceiver(6, 4, 8, num_heads=2, num_layers=2, num_blocks=2)
    x = inputs()
    latents = perceiver.latents.expand(3, 4, 8)
    assert len(perceiver.reads) == len(perceiver.stacks) == 2
    for layer in range(2):
        latents = perceiver.stacks[layer](perceiver.reads[layer](latents, x))
    assert torch.equal(perceiver(x), latents)
    assert perceiver(x).shape == (3, 4, perceiver.num_outputs)


def test_masked_inputs_are_as_if_they_were_not_there():
    # In float32 the order of a sum shows in the seventh digit.
    perceiver, x = Perceiver(6, 4, 8, num_layers=2).double(), inputs().double()
    mask = torch.tensor([True, True, False, True, False]).expand(3, 5)
    assert torch.allclose(perceiver(x, mask), perceiver(x[:, [0, 1, 3]]), atol=1e-6)


def test_the_order_of_the_inputs_does_not_matter():
    perceiver, x = Perceiver(6, 4, 8).double(), inputs().double()
    assert torch.allclose(perceiver(x), perceiver(x.flip(1)), atol=1e-6)


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

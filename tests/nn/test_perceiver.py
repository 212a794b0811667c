from __future__ import annotations

import pytest
import torch

from rl8x.nn import Perceiver


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


def test_every_parameter_gets_a_gradient():
    model = Perceiver(6, 4, 8, num_heads=2, num_layers=2, num_blocks=2)
    model(inputs()).square().sum().backward()
    assert all(weights.grad is not None for weights in model.parameters())


def test_what_makes_no_perceiver_is_refused():
    with pytest.raises(ValueError, match="`num_latents` must be a whole number of at least 1; got 0"):
        Perceiver(6, 0, 8)
    with pytest.raises(ValueError, match="`num_layers` must be a whole number"):
        Perceiver(6, 4, 8, num_layers=0)
    with pytest.raises(ValueError, match="latents keep their width"):
        Perceiver(6, 4, 8, skip="cat")
    assert Perceiver(6, 4, 8, skip="none")(inputs()).shape == (3, 4, 8)

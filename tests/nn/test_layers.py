"""Layers: activations and means. What masked logits are is in tests/distributions, and of pointers."""

import pytest
import torch

from rl8x.nn import activation, masked_mean


def test_values_by_hand():
    x = torch.tensor([-2.0, 0.0, 3.0])
    assert activation("relu")(x).tolist() == [0.0, 0.0, 3.0]
    assert activation("squared_relu")(x).tolist() == [0.0, 0.0, 9.0]
    assert activation("identity")(x).tolist() == [-2.0, 0.0, 3.0]
    assert activation("silu")(x).tolist() == pytest.approx([-2 * 0.1192029, 0.0, 3 * 0.9525741], abs=1e-6)
    assert activation("tanh")(x).tolist() == pytest.approx([-0.9640276, 0.0, 0.9950548], abs=1e-6)


def test_means_are_those_of_the_elements_that_count_and_others_have_no_influence_not_even_nan():
    x = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[2] = False
    spoiled = x.masked_fill(~mask.unsqueeze(-1), torch.nan).requires_grad_()
    mean = masked_mean(spoiled, mask.unsqueeze(-1), 1)
    for row in range(4):
        expected = x[row][mask[row]].sum(0) / max(1, int(mask[row].sum()))
        torch.testing.assert_close(mean[row], expected, atol=1e-6, rtol=0)
    (gradient,) = torch.autograd.grad(mean.sum(), spoiled)
    assert bool(gradient.isfinite().all())
    assert not gradient[~mask].any()

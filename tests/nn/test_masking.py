from __future__ import annotations

import math

import pytest
import torch

from rl8x.nn import (
    additive_mask,
    boolean_mask,
    causal_mask,
    length_mask,
    masked_categorical,
    masked_log_softmax,
    masked_max,
    masked_mean,
)
from rl8x.nn.masking import masked_logits


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def mask() -> torch.Tensor:
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[2] = False
    return mask


def test_means_and_maxima_are_those_of_the_elements_that_count(x, mask):
    mean, largest = masked_mean(x, mask.unsqueeze(-1), 1), masked_max(x, mask.unsqueeze(-1), 1)
    assert mean.shape == largest.shape == (4, 3)
    for row in range(4):
        for column in range(3):
            values = [x[row, i, column].item() for i in range(6) if mask[row, i]]
            assert mean[row, column].item() == pytest.approx(sum(values) / max(1, len(values)), abs=1e-6)
            assert largest[row, column].item() == pytest.approx(max(values, default=0.0))


def test_what_does_not_count_has_no_influence_not_even_nan(x, mask):
    spoiled = x.masked_fill(~mask.unsqueeze(-1), torch.nan).requires_grad_()
    clean = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    for reduce in (masked_mean, masked_max):
        result = reduce(spoiled, mask.unsqueeze(-1), 1)
        assert torch.equal(result, reduce(clean, mask.unsqueeze(-1), 1))
        (gradient,) = torch.autograd.grad(result.sum(), spoiled)
        assert torch.equal(gradient[~mask], torch.zeros_like(gradient[~mask]))
        assert bool(gradient.isfinite().all())


def test_log_softmax_over_what_counts():
    logits = torch.tensor([[1.0, 9.0, 3.0]], requires_grad=True)
    log_probs = masked_log_softmax(logits, torch.tensor([[True, False, True]]))
    total = math.exp(1.0) + math.exp(3.0)
    assert log_probs[0, 0].item() == pytest.approx(1.0 - math.log(total), abs=1e-6)
    assert log_probs[0, 2].item() == pytest.approx(3.0 - math.log(total), abs=1e-6)
    assert log_probs[0, 1].exp().item() == 0.0
    (gradient,) = torch.autograd.grad((log_probs.exp() * log_probs).sum(), logits)
    assert bool(gradient.isfinite().all())
    assert gradient[0, 1].item() == 0.0


def test_log_softmax_along_another_dimension(x):
    mask = torch.ones(4, 6, 3, dtype=torch.bool)
    assert torch.equal(masked_log_softmax(x, mask, 1), x.log_softmax(1))


def test_no_mask_changes_nothing(x):
    assert masked_logits(x, None) is x


def test_categorical_draws_what_counts_as_often_as_its_probability_says():
    logits = torch.tensor([0.0, 5.0, math.log(3.0)]).expand(50_000, 3)
    mask = torch.tensor([True, False, True]).expand(50_000, 3)
    uniform = torch.rand(50_000, generator=torch.Generator().manual_seed(0))
    index, logp = masked_categorical(logits, mask, uniform)
    assert set(index.tolist()) == {0, 2}
    # p(2) = 3/4; one standard deviation of the frequency is sqrt(3/16 / 50000) = 0.0019.
    assert (index == 2).float().mean().item() == pytest.approx(0.75, abs=0.01)
    assert torch.allclose(logp, torch.where(index == 2, math.log(0.75), math.log(0.25)), atol=1e-6)


def test_conversions_of_masks(mask):
    additive = additive_mask(mask)
    assert torch.equal(additive == 0, mask)
    assert torch.equal(additive == -torch.inf, ~mask)
    assert torch.equal(boolean_mask(additive), mask)
    assert additive_mask(mask, torch.float64).dtype == torch.float64


def test_masks_of_lengths_and_of_the_past():
    assert length_mask(torch.tensor([[0, 2], [3, 1]]), 3).tolist() == [
        [[False, False, False], [True, True, False]],
        [[True, True, True], [True, False, False]],
    ]
    assert causal_mask(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]

from __future__ import annotations

import pytest
import torch

from rl8x.distributions.discrete import _first_hit, inverse_cdf


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 200])
def test_sampling_inverts_the_cumulative_distribution(n):
    logits = torch.randn(2000, n, generator=torch.Generator().manual_seed(1)) * 2
    log_probs = logits.log_softmax(-1)
    uniform = torch.rand(2000, generator=torch.Generator().manual_seed(2))
    index = inverse_cdf(log_probs, uniform)
    cumulative = log_probs.double().exp().cumsum(-1)
    upper = cumulative.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    lower = upper - log_probs.double().exp().gather(-1, index.unsqueeze(-1)).squeeze(-1)
    # Float32 sums of n numbers are off by some 1e-7 n; the chosen action's interval must contain the number up to that.
    assert bool((uniform <= upper + 3e-6).all())
    assert bool((uniform >= lower - 3e-6).all())
    assert index.dtype == torch.int64


def test_first_hit_survives_sums_that_are_not_monotone(monkeypatch):
    # What adding up as a tree may give, exaggerated: the sum grows at choice 1, of probability 0, and the last sum
    # is smaller than the one before.
    probs = torch.tensor([[0.5, 0.0, 0.5, 0.0]])
    sums = torch.tensor([[0.5, 0.6, 1.1, 1.0]])
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: sums)
    assert _first_hit(probs, torch.tensor([0.5])).item() == 2
    assert _first_hit(probs, torch.tensor([1 - 2.0**-24])).item() == 2
    assert _first_hit(probs, torch.tensor([0.0])).item() == 0

from __future__ import annotations

import pytest
import torch
from gymnasium.spaces import Discrete, MultiBinary

from rl8x.distributions import Bernoulli
from rl8x.distributions.bernoulli import BernoulliParams


def test_everything_agrees_with_torch():
    distribution = Bernoulli(MultiBinary(3))
    assert (distribution.num_features, distribution.num_noise) == (3, 3)
    logits = torch.randn(2, 6, 40, 3, generator=torch.Generator().manual_seed(0)) * 2
    params, other = (distribution.from_features(each) for each in logits)
    reference, other_reference = (torch.distributions.Bernoulli(logits=each) for each in logits)
    noise = torch.rand(6, 40, 3)
    actions, logp = distribution.sample(params, noise)
    assert actions.dtype == torch.int8
    assert torch.equal(actions, (noise < reference.probs).to(torch.int8))
    assert torch.allclose(logp, reference.log_prob(actions.float()).sum(-1), atol=1e-5)
    assert torch.allclose(distribution.entropy(params), reference.entropy().sum(-1), atol=1e-5)
    kl = torch.distributions.kl_divergence(reference, other_reference).sum(-1)
    assert torch.allclose(distribution.kl(params, other), kl, atol=1e-5)
    assert torch.equal(distribution.mode(params), (logits[0] > 0).to(torch.int8))


@pytest.mark.parametrize("value", [0.0, 1 - 2.0**-24, 1.0])
def test_certain_bits_are_certain(value):
    distribution = Bernoulli(MultiBinary(2))
    params = distribution.from_features(torch.tensor([[200.0, -200.0]]))
    actions, logp = distribution.sample(params, torch.full((1, 2), value))
    assert actions.tolist() == [[1, 0]]
    assert logp.item() == 0.0
    assert distribution.entropy(params).item() == 0.0


def test_a_masked_bit_is_zero():
    distribution = Bernoulli(MultiBinary(2))
    logits = torch.tensor([[3.0, 0.5]], requires_grad=True)
    params = distribution.from_features(logits, torch.tensor([[False, True]]))
    actions, logp = distribution.sample(params, torch.zeros(1, 2))
    assert actions.tolist() == [[0, 1]]
    reference = torch.distributions.Bernoulli(logits=torch.tensor(0.5))
    assert logp.item() == pytest.approx(reference.log_prob(torch.tensor(1.0)).item(), abs=1e-6)
    assert distribution.entropy(params).item() == pytest.approx(reference.entropy().item(), abs=1e-6)
    loss = logp + distribution.entropy(params) + distribution.kl(params, BernoulliParams(params.logits.detach()))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert bool(gradient.isfinite().all())
    assert gradient[0, 0].item() == 0.0


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_extreme_logits_give_finite_entropies_and_gradients(scale):
    distribution = Bernoulli(MultiBinary(4))
    logits = (torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * scale).requires_grad_()
    params = distribution.from_features(logits)
    _, logp = distribution.sample(params, torch.rand(50, 4))
    entropy = distribution.entropy(params)
    (logp + entropy).sum().backward()
    for tensor in (logp, entropy, logits.grad):
        assert bool(tensor.isfinite().all())


def test_bits_in_two_dimensions():
    distribution = Bernoulli(MultiBinary([2, 3]))
    params = distribution.from_features(torch.randn(5, 4, 6))
    actions, logp = distribution.sample(params, torch.rand(5, 4, 6))
    assert actions.shape == (5, 4, 2, 3)
    assert torch.equal(distribution.logp(params, actions), logp)
    assert distribution.mode(params).shape == (5, 4, 2, 3)


def test_a_space_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="MultiBinary"):
        Bernoulli(Discrete(2))

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete
from tests.probes import noise_of

from rl8x.distributions import Categorical
from rl8x.distributions.categorical import CategoricalParams

torch.manual_seed(0)


def random_logits(*shape: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * scale


def test_features_are_logits_and_one_uniform_number_is_needed():
    distribution = Categorical(Discrete(5))
    assert (distribution.num_features, distribution.num_noise) == (5, 1)
    noise = noise_of(distribution, (3, 4), torch.Generator().manual_seed(0), "cpu")
    assert noise.shape == (3, 4, 1)
    assert noise.dtype == torch.float32
    assert bool(((noise >= 0) & (noise < 1)).all())


def test_a_space_that_is_not_discrete_is_refused():
    with pytest.raises(TypeError, match="Discrete"):
        Categorical(gymnasium.spaces.Box(-1, 1, (2,)))


@pytest.mark.parametrize("n", [1, 2, 3, 18])
def test_logp_entropy_kl_and_mode_agree_with_torch(n):
    distribution = Categorical(Discrete(n))
    logits, other_logits = random_logits(7, 4, n), random_logits(2, 7, 4, n)[1]
    params, other = distribution.from_features(logits), distribution.from_features(other_logits)
    reference = torch.distributions.Categorical(logits=logits)
    other_reference = torch.distributions.Categorical(logits=other_logits)
    actions = torch.randint(n, (7, 4))
    assert torch.allclose(distribution.logp(params, actions), reference.log_prob(actions), atol=1e-6)
    assert torch.allclose(distribution.entropy(params), reference.entropy(), atol=1e-6)
    kl = torch.distributions.kl_divergence(reference, other_reference)
    assert torch.allclose(distribution.kl(params, other), kl, atol=1e-6)
    assert torch.equal(distribution.mode(params), logits.argmax(-1))


def test_two_actions_by_hand():
    # p = (3/4, 1/4): log p = (-0.28768, -1.38629), entropy = 0.75 * 0.28768 + 0.25 * 1.38629 = 0.56234.
    distribution = Categorical(Discrete(2))
    params = distribution.from_features(torch.tensor([[np.log(3.0), 0.0]], dtype=torch.float32))
    assert distribution.logp(params, torch.tensor([0])).item() == pytest.approx(-0.28768, abs=1e-5)
    assert distribution.logp(params, torch.tensor([1])).item() == pytest.approx(-1.38629, abs=1e-5)
    assert distribution.entropy(params).item() == pytest.approx(0.56234, abs=1e-5)
    # Action 0 owns the uniform numbers in [0, 3/4), action 1 those in [3/4, 1).
    noise = torch.tensor([0.0, 0.7499, 0.7501, 0.9999]).unsqueeze(-1)
    actions, _ = distribution.sample(CategoricalParams(params.log_probs.expand(4, 2)), noise)
    assert actions.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("n", [2, 5, 40])
def test_frequencies_pass_a_chi_square_bound(n):
    distribution = Categorical(Discrete(n))
    logits = random_logits(n, scale=1.0)
    count = 200_000
    noise = noise_of(distribution, (count,), torch.Generator().manual_seed(3), "cpu")
    actions, _ = distribution.sample(distribution.from_features(logits.expand(count, n)), noise)
    expected = logits.double().softmax(-1) * count
    chi_square = ((torch.bincount(actions, minlength=n) - expected).square() / expected).sum().item()
    # Mean n - 1, standard deviation sqrt(2 (n - 1)): 5 of them are exceeded less than once in 10^3 seeds.
    assert chi_square < (n - 1) + 5 * (2 * (n - 1)) ** 0.5


@pytest.mark.parametrize("n", [2, 3, 16, 17, 60])
@pytest.mark.parametrize("value", [0.0, 1e-45, 2.0**-25, 0.5, 1 - 2.0**-24, 1.0])
def test_no_uniform_number_leads_out_of_range_or_to_an_impossible_action(n, value):
    generator = torch.Generator().manual_seed(4)
    legal = torch.rand(3000, n, generator=generator) < 0.5
    legal[torch.arange(3000), torch.randint(n, (3000,), generator=generator)] = True
    distribution = Categorical(Discrete(n))
    params = distribution.from_features(torch.randn(3000, n, generator=generator) * 5, legal)
    actions, logp = distribution.sample(params, torch.full((3000, 1), value))
    assert bool(((actions >= 0) & (actions < n)).all())
    assert bool(legal.gather(-1, actions.unsqueeze(-1)).all())
    assert bool(logp.isfinite().all())
    assert bool((logp <= 0).all())
    if value == 0.0:
        assert torch.equal(actions, (params.log_probs.exp() > 0).int().argmax(-1))


@pytest.mark.parametrize("n", [3, 30])
def test_sampled_logp_is_to_the_bit_what_logp_gives(n):
    distribution = Categorical(Discrete(n))
    params = distribution.from_features(random_logits(6, 50, n))
    actions, logp = distribution.sample(params, torch.rand(6, 50, 1))
    assert torch.equal(logp, distribution.logp(params, actions))


def test_actions_count_from_the_start_of_the_space():
    plain, shifted = Categorical(Discrete(3)), Categorical(Discrete(3, start=-1))
    logits, noise = random_logits(20, 3), torch.rand(20, 1)
    params = plain.from_features(logits)
    actions, logp = plain.sample(params, noise)
    shifted_actions, shifted_logp = shifted.sample(params, noise)
    assert torch.equal(shifted_actions, actions - 1)
    assert torch.equal(shifted_logp, logp)
    assert torch.equal(shifted.logp(params, shifted_actions), logp)
    assert torch.equal(shifted.mode(params), plain.mode(params) - 1)
    assert all(shifted.space.contains(np.int64(action)) for action in shifted_actions.tolist())


def test_masked_actions_have_no_probability_and_the_rest_is_as_if_they_were_not_there():
    distribution = Categorical(Discrete(4))
    logits = random_logits(50, 4)
    mask = torch.tensor([True, False, True, False]).expand(50, 4)
    params = distribution.from_features(logits, mask)
    reference = torch.distributions.Categorical(logits=logits[:, [0, 2]])
    assert torch.allclose(params.log_probs[:, [0, 2]], reference.logits, atol=1e-6)
    assert torch.equal(params.log_probs[:, [1, 3]].exp(), torch.zeros(50, 2))
    assert torch.allclose(distribution.entropy(params), reference.entropy(), atol=1e-6)
    assert set(distribution.sample(params, torch.rand(50, 1))[0].tolist()) == {0, 2}
    assert set(distribution.mode(params).tolist()) <= {0, 2}
    other = distribution.from_features(random_logits(2, 50, 4)[1], mask)
    other_reference = torch.distributions.Categorical(logits=random_logits(2, 50, 4)[1][:, [0, 2]])
    kl = torch.distributions.kl_divergence(reference, other_reference)
    assert torch.allclose(distribution.kl(params, other), kl, atol=1e-5)


def test_a_mask_that_allows_nothing_gives_every_action_the_same_probability():
    distribution = Categorical(Discrete(4))
    params = distribution.from_features(random_logits(3, 4), torch.zeros(3, 4, dtype=torch.bool))
    assert torch.allclose(params.log_probs.exp(), torch.full((3, 4), 0.25))


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("masked", [False, True])
def test_extreme_logits_give_finite_values_and_gradients(scale, masked):
    distribution = Categorical(Discrete(4))
    logits = (random_logits(64, 4) * scale).requires_grad_()
    mask = (torch.rand(64, 4) < 0.5) | (torch.arange(4) == 2) if masked else None
    params = distribution.from_features(logits, mask)
    actions, logp = distribution.sample(params, torch.rand(64, 1))
    entropy = distribution.entropy(params)
    loss = logp.sum() + entropy.sum() + distribution.kl(params, CategoricalParams(params.log_probs.detach())).sum()
    loss.backward()
    for value in (logp, entropy, logits.grad):
        assert bool(value.isfinite().all())
    assert bool((entropy >= 0).all())
    if mask is not None:
        assert torch.equal(logits.grad[~mask], torch.zeros_like(logits.grad[~mask]))
        assert bool(mask.gather(-1, actions.unsqueeze(-1)).all())


def test_gradients_agree_with_torch():
    distribution = Categorical(Discrete(3))
    logits = random_logits(10, 3).requires_grad_()
    actions = torch.randint(3, (10,))
    params = distribution.from_features(logits)
    (mine,) = torch.autograd.grad(
        (distribution.logp(params, actions) + 0.3 * distribution.entropy(params)).sum(), logits
    )
    reference = torch.distributions.Categorical(logits=logits)
    (theirs,) = torch.autograd.grad((reference.log_prob(actions) + 0.3 * reference.entropy()).sum(), logits)
    assert torch.allclose(mine, theirs, atol=1e-6)


def test_there_are_no_reparameterised_samples():
    distribution = Categorical(Discrete(3))
    with pytest.raises(TypeError, match="discrete"):
        distribution.rsample(distribution.from_features(torch.zeros(1, 3)), torch.rand(1, 1))

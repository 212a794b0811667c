"""Distributions over discrete actions."""

from __future__ import annotations

import pytest
import torch
from gymnasium.spaces import Discrete, MultiBinary
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.distributions import Bernoulli, Categorical, EpsilonGreedy
from rl8x.distributions.discrete import inverse_cdf


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


@pytest.mark.parametrize("shape", [3, [2, 3]])
def test_a_bit_is_1_below_its_probability_and_certain_bits_are_certain(shape):
    distribution, size = Bernoulli(MultiBinary(shape)), 3 if shape == 3 else 6
    logits, noise = torch.randn(5, 4, size), torch.rand(5, 4, size)
    actions, _ = distribution.sample(distribution.from_features(logits), noise)
    assert actions.dtype == torch.int8
    assert torch.equal(actions.flatten(2), (noise < logits.sigmoid()).to(torch.int8))
    assert actions.shape == (5, 4, *distribution.space.shape)
    certain = distribution.from_features(torch.full((2, size), 200.0) * torch.tensor([[1.0], [-1.0]]))
    for value in (0.0, 1 - 2.0**-24, 1.0):
        actions, logp = distribution.sample(certain, torch.full((2, size), value))
        assert actions.flatten(1).float().mean(1).tolist() == [1.0, 0.0]
        assert not logp.any()
    assert not distribution.entropy(certain).any()


def plain_probabilities(values: list[float], legal: list[bool], epsilon: float) -> list[float]:
    """The mixture as one would write it down, with an action at random first."""
    actions = [a for a, allowed in enumerate(legal) if allowed] or list(range(len(values)))
    best = max(actions, key=lambda a: (values[a], -a))
    return [
        (epsilon / len(actions) if a in actions else 0.0) + (1.0 - epsilon) * (a == best) for a in range(len(values))
    ]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_probabilities_entropy_and_mode_are_those_of_the_mixture(data):
    n = data.draw(st.integers(1, 20))
    epsilon = data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    values = data.draw(st.lists(st.integers(-3, 3).map(float), min_size=n, max_size=n))
    legal = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    distribution = EpsilonGreedy(Discrete(n), epsilon=epsilon)
    params = distribution.from_features(torch.tensor([values]), torch.tensor([legal]))
    expected = torch.tensor(plain_probabilities(values, legal, epsilon), dtype=torch.float64)
    found = torch.stack([distribution.logp(params, torch.tensor([a])).exp()[0] for a in range(n)]).double()
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.equal(found == 0, expected == 0)
    entropy = -torch.xlogy(expected, expected).sum().item()
    assert distribution.entropy(params).item() == pytest.approx(entropy, abs=1e-5)
    allowed = [v for v, is_legal in zip(values, legal, strict=True) if is_legal] or values
    assert values[distribution.mode(params).item()] == max(allowed)
    assert legal[distribution.mode(params).item()] or not any(legal)


def test_epsilon_0_is_greedy_whatever_the_noise_and_1_ignores_the_values():
    values = torch.randn(4000, 6, generator=torch.Generator().manual_seed(1))
    noise = torch.rand(4000, 1, generator=torch.Generator().manual_seed(2))
    noise[0], noise[1] = 0.0, 1.0
    distribution = EpsilonGreedy(Discrete(6))
    params = distribution.from_features(values)
    actions, logp = distribution.sample(params, noise)
    assert torch.equal(actions, values.argmax(-1))
    assert torch.equal(logp, torch.zeros(4000))
    distribution.set_epsilon(1.0)
    params = distribution.from_features(values)
    assert torch.equal(distribution.sample(params, noise)[0], (noise.squeeze(1) * 6).clamp(max=5).long())
    assert torch.equal(distribution.mode(params), values.argmax(-1))


def test_epsilon_is_a_buffer_that_is_saved_and_changed_in_place():
    distribution, other = EpsilonGreedy(Discrete(3), epsilon=0.25), EpsilonGreedy(Discrete(3))
    address = distribution.epsilon.data_ptr()
    distribution.set_epsilon(0.5)
    assert (distribution.epsilon.data_ptr(), distribution.epsilon.item()) == (address, 0.5)
    other.load_state_dict(distribution.state_dict())
    assert other.epsilon.item() == 0.5
    assert list(distribution.parameters()) == []


def test_values_that_are_not_finite_do_not_make_an_illegal_action_greedy():
    distribution = EpsilonGreedy(Discrete(3), epsilon=0.2)
    values = torch.tensor([[torch.nan, 1.0, 2.0], [torch.inf, 1.0, 2.0], [3.0, -torch.inf, -torch.inf]])
    params = distribution.from_features(values, torch.tensor([[False, True, True]]).expand(3, 3))
    assert distribution.mode(params)[:2].tolist() == [2, 2]
    assert bool((params.log_probs.exp()[:, 0] == 0).all())


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
    log_probs = torch.tensor([[0.5, 0.0, 0.5, 0.0]]).log()
    sums = torch.tensor([[0.5, 0.6, 1.1, 1.0]])
    monkeypatch.setattr("rl8x.distributions.discrete._UNROLLED_CHOICES", 0)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: sums)
    found = [inverse_cdf(log_probs, torch.tensor([uniform])).item() for uniform in (0.5, 1 - 2.0**-24, 0.0)]
    assert found == [2, 2, 0]

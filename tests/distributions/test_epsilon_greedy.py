from __future__ import annotations

import gymnasium
import pytest
import torch
from gymnasium.spaces import Discrete
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.probes import noise_of

from rl8x.distributions import Categorical, EpsilonGreedy, make_distribution


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


@pytest.mark.parametrize("epsilon", [0.1, 0.6, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_frequencies_pass_a_chi_square_bound(epsilon, masked):
    distribution, count = EpsilonGreedy(Discrete(5), epsilon=epsilon), 200_000
    values, legal = torch.tensor([0.5, 9.0, 2.0, -1.0, 1.0]), torch.tensor([True, not masked, True, True, not masked])
    noise = noise_of(distribution, (count,), torch.Generator().manual_seed(3), "cpu")
    mask = legal.expand(count, 5) if masked else None
    actions, _ = distribution.sample(distribution.from_features(values.expand(count, 5), mask), noise)
    expected = torch.tensor(plain_probabilities(values.tolist(), legal.tolist(), epsilon)) * count
    counts = torch.bincount(actions, minlength=5)
    assert bool((counts[~legal] == 0).all())
    chi_square = ((counts - expected).square() / expected)[legal].sum().item()
    freedom = int(legal.sum()) - 1
    # Mean is the degrees of freedom, variance twice that: 5 standard deviations are exceeded once in 10^3 seeds.
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


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
    distribution = EpsilonGreedy(Discrete(3), epsilon=0.25)
    address = distribution.epsilon.data_ptr()
    distribution.set_epsilon(0.5)
    assert (distribution.epsilon.data_ptr(), distribution.epsilon.item()) == (address, 0.5)
    other = EpsilonGreedy(Discrete(3))
    other.load_state_dict(distribution.state_dict())
    assert other.epsilon.item() == 0.5
    assert list(distribution.parameters()) == []


def test_values_that_are_not_finite_do_not_make_an_illegal_action_greedy():
    distribution = EpsilonGreedy(Discrete(3), epsilon=0.2)
    values = torch.tensor([[torch.nan, 1.0, 2.0], [torch.inf, 1.0, 2.0], [3.0, -torch.inf, -torch.inf]])
    params = distribution.from_features(values, torch.tensor([[False, True, True]]).expand(3, 3))
    assert distribution.mode(params)[:2].tolist() == [2, 2]
    assert bool((params.log_probs.exp()[:, 0] == 0).all())


@pytest.mark.parametrize("epsilon", [-0.1, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(epsilon):
    with pytest.raises(ValueError, match="`epsilon` must be at least 0 and at most 1"):
        EpsilonGreedy(Discrete(2), epsilon=epsilon)


def test_it_is_for_discrete_spaces_and_never_picked_by_itself():
    with pytest.raises(TypeError, match="EpsilonGreedy needs a Discrete"):
        EpsilonGreedy(gymnasium.spaces.MultiDiscrete([2, 3]))
    assert type(make_distribution(None, Discrete(2))) is Categorical
    assert type(make_distribution("epsilon_greedy", Discrete(2), {"epsilon": 0.1})) is EpsilonGreedy


@pytest.mark.parametrize("epsilon", [-0.1, 1.5, float("nan")])
def test_a_share_outside_of_0_and_1_is_refused_and_changes_nothing(epsilon):
    greedy = EpsilonGreedy(Discrete(3), epsilon=0.25)
    with pytest.raises(ValueError, match="`epsilon` must be at least 0 and at most 1"):
        greedy.set_epsilon(epsilon)
    assert greedy.epsilon.item() == 0.25

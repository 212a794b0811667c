from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tests.probes import noise_of

from rl8x import PPOConfig
from rl8x.algorithms import TD3Config
from rl8x.distributions import NoisyDeterministic
from rl8x.envs import Pendulum

SPACE = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
ONE = Box(-1.0, 1.0, (1,))


def drawn(distribution, features, seed=0):
    noise = noise_of(distribution, (len(features),), torch.Generator().manual_seed(seed))
    return distribution.sample(distribution.from_features(features), noise)


def test_the_mode_is_tanh_scaled_to_the_box():
    distribution = NoisyDeterministic(SPACE, noise_std=0.3)
    features = torch.tensor([[0.0, 0.0], [0.5, -1.0], [50.0, -50.0]])
    expected = [[0.0, 5.0], [2 * math.tanh(0.5), 5 + 5 * math.tanh(-1.0)], [2.0, 0.0]]
    found = distribution.mode(distribution.from_features(features))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_gradients_reach_the_features_through_means():
    distribution = NoisyDeterministic(SPACE)
    features = torch.tensor([[0.3, -0.7]], requires_grad=True)
    (gradient,) = torch.autograd.grad(distribution.means(features).sum(), features)
    expected = [2 * (1 - math.tanh(0.3) ** 2), 5 * (1 - math.tanh(-0.7) ** 2)]
    np.testing.assert_allclose(gradient[0].numpy(), expected, rtol=1e-5)


def test_noise_has_the_std_of_each_range_and_stops_at_the_bounds():
    distribution = NoisyDeterministic(SPACE, noise_std=0.1)
    actions, _ = drawn(distribution, torch.zeros(100_000, 2))
    np.testing.assert_allclose(actions.std(0).numpy(), [0.2, 0.5], rtol=0.01)
    actions, _ = drawn(distribution, torch.tensor([[9.0, -9.0]]).expand(10_000, 2))
    assert all(SPACE.contains(action) for action in actions[:100].numpy())
    np.testing.assert_allclose((actions == torch.tensor([2.0, 0.0])).float().mean(0).numpy(), [0.5, 0.5], atol=0.02)
    assert torch.equal(distribution.env_actions(actions), actions)


def test_copies_have_their_own_std_evenly_spread():
    distribution = NoisyDeterministic(SPACE, noise_std=0.4, noise_std_min=0.1)
    params = distribution.from_features(torch.zeros(3, 2))
    expected = np.array([[0.15], [0.25], [0.35]]) * [[2.0, 5.0]]
    np.testing.assert_allclose(params.log_std.exp().numpy(), expected, rtol=1e-6)
    one = distribution.from_features(torch.zeros(1, 2)).log_std.exp()
    np.testing.assert_allclose(one.numpy(), [[0.5, 1.25]], rtol=1e-6)


@pytest.mark.parametrize(("feature", "std"), [(0.0, 0.3), (0.8, 0.5), (-3.0, 0.2), (0.4, 2.0)])
def test_densities_and_bounds_add_up_to_one_and_give_the_entropy(feature, std):
    distribution = NoisyDeterministic(Box(-1.0, 3.0, (1,)), noise_std=std).double()
    grid = torch.linspace(-1, 3, 200_001, dtype=torch.float64)[1:-1, None]
    features = torch.full_like(grid, feature)
    logp = distribution.logp(distribution.from_features(features), grid)
    two = distribution.from_features(features[:2])
    ends = distribution.logp(two, torch.tensor([[-1.0], [3.0]], dtype=torch.float64))
    width = 4 / 200_000
    assert (logp.exp().sum() * width + ends.exp().sum()).item() == pytest.approx(1.0, abs=2e-5)
    entropy = -(logp.exp() * logp).sum() * width - (ends.exp() * ends).sum()
    assert distribution.entropy(two)[0].item() == pytest.approx(entropy.item(), abs=1e-4)


def test_what_is_sampled_has_the_logp_of_what_is_stored_even_far_from_the_bounds():
    distribution = NoisyDeterministic(SPACE, noise_std=0.001)
    actions, logp = drawn(distribution, torch.randn(1000, 2, generator=torch.Generator().manual_seed(1)))
    params = distribution.from_features(torch.randn(1000, 2, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(logp, distribution.logp(params, actions))
    assert bool(logp.isfinite().all())
    assert bool(distribution.entropy(params).isfinite().all())


@pytest.mark.parametrize("std", [0.001, 0.1, 0.5, 3.0])
@pytest.mark.parametrize("feature", [-40.0, -1.0, 0.0, 2.0, 40.0])
def test_gradients_are_finite_where_a_bound_has_no_probability(std, feature):
    distribution = NoisyDeterministic(Box(-1.0, 3.0, (1,)), noise_std=std)
    for action in (-1.0, 0.9, 3.0):
        features = torch.tensor([[feature]], requires_grad=True)
        params = distribution.from_features(features)
        (distribution.entropy(params) + distribution.logp(params, torch.tensor([[action]]))).backward()
        assert bool(features.grad.isfinite().all())


def test_ppo_trains_with_little_noise():
    given = {"distribution": NoisyDeterministic, "device": "cpu", "num_envs": 8, "horizon": 8, "execution": "eager"}
    algorithm = PPOConfig(**given, entropy_coeff=0.01, seed=0).build(Pendulum)
    before = [weight.clone() for weight in algorithm.policy.parameters()]
    for _ in range(2):
        algorithm.collect()
        algorithm.step()
    after = list(algorithm.policy.parameters())
    assert all(bool(weight.isfinite().all()) for weight in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_only_td3_trains_with_spreads_that_differ_between_copies():
    """In a minibatch another copy's spread would be taken for a row's, so that old and new log-probabilities differ."""
    given = {"distribution": NoisyDeterministic, "device": "cpu", "num_envs": 4, "horizon": 4, "execution": "eager"}
    spread = {"noise_std": 0.5, "noise_std_min": 0.1}
    with pytest.raises(ValueError, match=r"PPO needs .* NoisyDeterministic differs between them.* use TD3"):
        PPOConfig(**given, distribution_config=spread).build(Pendulum)
    algorithm = PPOConfig.rl8(**given, distribution_config={"noise_std": 0.5}).build(Pendulum)
    algorithm.collect()
    assert abs(algorithm.step()["monitors/kl_div"]) < 1e-2
    assert TD3Config(device="cpu", num_envs=4, exploration_noise_min=0.01).build(Pendulum).policy.distribution.by_copy


def test_what_does_not_fit_is_refused():
    with pytest.raises(TypeError, match="NoisyDeterministic needs a Box action space; got Discrete"):
        NoisyDeterministic(Discrete(2))
    with pytest.raises(ValueError, match=r"finite bounds; got Box.*or use Normal"):
        NoisyDeterministic(Box(-np.inf, 1.0, (2,)))
    for options in ({"noise_std": 0.0}, {"noise_std": 0.1, "noise_std_min": 0.2}, {"noise_std": math.nan}):
        with pytest.raises(ValueError, match="`noise_std` must be greater than 0"):
            NoisyDeterministic(ONE, **options)
    with pytest.raises(NotImplementedError, match="NoisyDeterministic defines no `kl`"):
        NoisyDeterministic(ONE).kl(None, None)

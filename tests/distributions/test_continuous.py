"""Distributions over continuous actions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tests.probes import noise_of

from rl8x import PPOConfig, TD3Config
from rl8x.distributions import NoisyDeterministic, Normal, SquashedNormal
from rl8x.distributions.continuous import NormalParams
from rl8x.envs import Pendulum


def box(*shape: int) -> Box:
    return Box(-1.0, 1.0, shape, np.float32)


def test_free_standard_deviations_are_parameters_and_state_ones_features():
    free, state = Normal(box(3)), Normal(box(3), std="state", initial_std=0.5)
    assert (free.num_features, free.num_noise) == (3, 3)
    assert (state.num_features, state.num_noise) == (6, 3)
    assert [name for name, _ in free.named_parameters()] == ["log_std"]
    assert list(state.parameters()) == []
    features = torch.tensor([[1.0, 2.0, 3.0, 0.0, 0.5, -0.5]])
    params = state.from_features(features)
    assert params.mean.tolist() == [[1.0, 2.0, 3.0]]
    assert torch.allclose(params.log_std, torch.tensor([[0.0, 0.5, -0.5]]) + math.log(0.5))
    assert torch.equal(free.from_features(features[:, :3]).log_std, torch.zeros(1, 3))
    begun = Normal(box(2), initial_std=0.25).from_features(torch.zeros(5, 2))
    assert torch.allclose(begun.log_std.exp(), torch.full((5, 2), 0.25))
    bounded = Normal(box(1), std="state", log_std_bounds=(-2.0, 1.0))
    params = bounded.from_features(torch.tensor([[0.0, -50.0], [0.0, 50.0], [0.0, 0.3]]))
    assert params.log_std.squeeze(-1).tolist() == pytest.approx([-2.0, 1.0, 0.3])


def test_kl_of_nearly_equal_distributions_keeps_its_digits():
    distribution, one = Normal(box(1)), NormalParams(torch.zeros(1, 1), torch.zeros(1, 1))
    assert distribution.kl(one, one).item() == 0.0
    # KL of two normals that differ by d in log std is d^2 to leading order.
    near = NormalParams(torch.zeros(1, 1), torch.full((1, 1), 1e-4))
    assert distribution.kl(one, near).item() == pytest.approx(1e-8, rel=0.1)


def test_the_environment_gets_clipped_actions_where_there_are_bounds():
    space = Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, 5.0], np.float32))
    actions = torch.tensor([[3.0, 7.0], [-3.0, -70.0], [0.5, 0.5]])
    assert Normal(space).env_actions(actions).tolist() == [[1.0, 5.0], [-1.0, -70.0], [0.5, 0.5]]
    unbounded = Normal(Box(-np.inf, np.inf, (2,), np.float32))
    assert unbounded.env_actions(actions) is actions
    assert (Normal(space).clips, unbounded.clips) == (True, False)


SPACE = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))


def test_samples_lie_in_the_box_and_each_dimension_has_its_own_bounds():
    distribution = SquashedNormal(SPACE, std="free", initial_std=7.0)
    params = distribution.from_features(torch.zeros(5000, 2))
    actions, logp = drawn(distribution, torch.zeros(5000, 2))
    assert all(SPACE.contains(action) for action in actions.detach().numpy())
    assert bool((actions.amax(0) > torch.tensor([1.99, 9.99])).all())
    assert bool((actions.amin(0) < torch.tensor([-1.99, 0.01])).all())
    assert bool(logp.isfinite().all())
    assert distribution.mode(params)[0].tolist() == [0.0, 5.0]
    assert list(distribution.state_dict()) == ["log_std"]  # the bounds are not saved, and follow the module
    assert distribution.double().action_low.dtype == torch.float64


def test_logp_agrees_with_torch():
    distribution = SquashedNormal(SPACE)
    features = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    params = distribution.from_features(features)
    actions, logp = distribution.sample(params, noise_of(distribution, (200,), torch.Generator().manual_seed(1), "cpu"))
    of_torch, middle = torch.distributions.transforms, torch.tensor([0.0, 5.0], dtype=torch.float64)
    transforms = [of_torch.TanhTransform(), of_torch.AffineTransform(middle, torch.tensor([2.0, 5.0]))]
    base = torch.distributions.Normal(params.mean.double(), params.log_std.double().exp())
    reference = torch.distributions.TransformedDistribution(base, transforms).log_prob(actions.double()).sum(-1)
    inside = (actions - torch.tensor([0.0, 5.0])).div(torch.tensor([2.0, 5.0])).abs().amax(-1) < 0.999
    assert inside.sum() > 150
    assert torch.allclose(logp[inside].double(), reference[inside], atol=2e-3)
    assert torch.equal(logp, distribution.logp(params, actions))


@pytest.mark.parametrize(("std", "tolerance"), [(0.05, 1e-5), (0.5, 1e-5), (1.0, 1e-5), (2.0, 2e-4), (7.3, 0.1)])
@pytest.mark.parametrize("mean", [0.0, 0.3, -2.0, 8.0])
def test_the_entropy_is_as_exact_as_it_says(mean, std, tolerance):
    distribution = SquashedNormal(Box(-1.0, 1.0, (1,)))
    params = NormalParams(torch.tensor([[mean]]), torch.tensor([[math.log(std)]]))
    z = np.linspace(-12, 12, 100_001)
    u = mean + std * z
    log_derivative = 2 * (np.log(2) - u - np.logaddexp(0, -2 * u))
    weights = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    exact = 0.5 + 0.5 * math.log(2 * math.pi) + math.log(std) + np.trapezoid(weights * log_derivative, z)
    assert distribution.entropy(params).item() == pytest.approx(exact, abs=tolerance + 2e-6)
    wide = SquashedNormal(Box(0.0, 10.0, (1,))).entropy(params).item()
    assert wide == pytest.approx(exact + math.log(5.0), abs=tolerance + 2e-6)


def test_reparameterised_samples_are_scored_before_rounding():
    distribution = SquashedNormal(Box(-1.0, 1.0, (1,)), std="state")
    features = torch.tensor([[20.0, math.log(0.5)]], requires_grad=True)
    params = distribution.from_features(features)
    noise = torch.tensor([[0.3]])
    actions, logp = distribution.rsample(params, noise)
    assert torch.equal(actions, distribution.sample(params, noise)[0])
    # u = 20.15: log N = -0.045 - log 0.5 - 0.918939; log da/du = 2 (log 2 - u) = -38.913706 -> logp = 38.64291.
    assert logp.item() == pytest.approx(-0.045 + math.log(2) - 0.918939 + 38.913706, abs=1e-4)
    # The first term depends on the noise alone; d logp / d mean = -d log (da/du) / du = 2 tanh(u) = 2.
    (gradient,) = torch.autograd.grad(logp.sum(), features)
    assert gradient[0, 0].item() == pytest.approx(2.0, abs=1e-4)
    features = torch.tensor([[0.5, -1.0]], requires_grad=True)
    actions, _ = distribution.rsample(distribution.from_features(features), torch.tensor([[1.0]]))
    (gradient,) = torch.autograd.grad(actions.sum(), features)
    derivative = 1 - math.tanh(0.5 + math.exp(-1.0)) ** 2
    assert gradient[0].tolist() == pytest.approx([derivative, derivative * math.exp(-1.0)], rel=1e-5)
    (gradient,) = torch.autograd.grad(distribution.entropy(distribution.from_features(features)).sum(), features)
    step = torch.tensor([[1e-2, 0.0]])
    ahead, behind = (distribution.entropy(distribution.from_features(features + way * step)) for way in (1, -1))
    assert gradient[0, 0].item() == pytest.approx(((ahead - behind) / 2e-2).item(), abs=1e-3)


def drawn(distribution, features, seed=0):
    noise = noise_of(distribution, (len(features),), torch.Generator().manual_seed(seed))
    return distribution.sample(distribution.from_features(features), noise)


def test_the_mode_is_tanh_scaled_to_the_box_with_gradients():
    distribution = NoisyDeterministic(SPACE, noise_std=0.3)
    features = torch.tensor([[0.0, 0.0], [0.5, -1.0], [50.0, -50.0]], requires_grad=True)
    expected = [[0.0, 5.0], [2 * math.tanh(0.5), 5 + 5 * math.tanh(-1.0)], [2.0, 0.0]]
    found = distribution.mode(distribution.from_features(features))
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-6)
    (gradient,) = torch.autograd.grad(distribution.means(features).sum(), features)
    expected = [2 * (1 - math.tanh(0.5) ** 2), 5 * (1 - math.tanh(-1.0) ** 2)]
    np.testing.assert_allclose(gradient[1].numpy(), expected, rtol=1e-5)


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


@pytest.mark.parametrize("std", [0.001, 0.1, 0.5, 3.0])
@pytest.mark.parametrize("feature", [-40.0, -1.0, 0.0, 2.0, 40.0])
def test_scores_and_gradients_are_finite_where_a_bound_has_no_probability(std, feature):
    distribution = NoisyDeterministic(Box(-1.0, 3.0, (1,)), noise_std=std)
    features = torch.full((500, 1), feature)
    actions, logp = drawn(distribution, features)
    assert torch.equal(logp, distribution.logp(distribution.from_features(features), actions))
    assert bool(logp.isfinite().all())
    for action in (-1.0, 0.9, 3.0):
        features = torch.tensor([[feature]], requires_grad=True)
        params = distribution.from_features(features)
        (distribution.entropy(params) + distribution.logp(params, torch.tensor([[action]]))).backward()
        assert bool(features.grad.isfinite().all())


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

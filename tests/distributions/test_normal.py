from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tests.probes import noise_of

from rl8x.distributions import Normal
from rl8x.distributions.normal import NormalParams


def box(*shape: int) -> Box:
    return Box(-1.0, 1.0, shape, np.float32)


def random_params(*shape: int, seed: int = 0) -> NormalParams:
    generator = torch.Generator().manual_seed(seed)
    return NormalParams(torch.randn(*shape, generator=generator), 0.5 * torch.randn(*shape, generator=generator))


def reference(params: NormalParams) -> torch.distributions.Independent:
    return torch.distributions.Independent(torch.distributions.Normal(params.mean, params.log_std.exp()), 1)


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


def test_initial_std_is_what_a_free_standard_deviation_starts_from():
    params = Normal(box(2), initial_std=0.25).from_features(torch.zeros(5, 2))
    assert torch.allclose(params.log_std.exp(), torch.full((5, 2), 0.25))


def test_standard_deviations_stay_within_their_bounds():
    distribution = Normal(box(1), std="state", log_std_bounds=(-2.0, 1.0))
    params = distribution.from_features(torch.tensor([[0.0, -50.0], [0.0, 50.0], [0.0, 0.3]]))
    assert params.log_std.squeeze(-1).tolist() == pytest.approx([-2.0, 1.0, 0.3])


def test_logp_entropy_and_kl_agree_with_torch():
    distribution = Normal(box(3))
    params, other = random_params(6, 5, 3), random_params(6, 5, 3, seed=1)
    actions = torch.randn(6, 5, 3)
    assert torch.allclose(distribution.logp(params, actions), reference(params).log_prob(actions), rtol=1e-5, atol=1e-5)
    assert torch.allclose(distribution.entropy(params), reference(params).entropy(), atol=1e-5)
    kl = torch.distributions.kl_divergence(reference(params), reference(other))
    assert torch.allclose(distribution.kl(params, other), kl, rtol=1e-5, atol=1e-5)
    assert torch.equal(distribution.mode(params), params.mean)


def test_kl_by_hand_and_of_nearly_equal_distributions():
    # KL(N(0, 1) || N(1, 2^2)) = log 2 + (1 + 1) / 8 - 1/2 = 0.443147.
    distribution = Normal(box(1))
    one = NormalParams(torch.zeros(1, 1), torch.zeros(1, 1))
    two = NormalParams(torch.ones(1, 1), torch.full((1, 1), math.log(2.0)))
    assert distribution.kl(one, two).item() == pytest.approx(0.443147, abs=1e-6)
    assert distribution.kl(one, one).item() == 0.0
    # KL of two normals that differ by d in log std is d^2 to leading order.
    near = NormalParams(torch.zeros(1, 1), torch.full((1, 1), 1e-3))
    assert distribution.kl(one, near).item() == pytest.approx(1e-6, rel=0.1)


def test_samples_are_mean_plus_std_times_noise_scored_to_the_bit_like_stored_actions():
    distribution = Normal(box(2))
    params = random_params(4, 7, 2)
    noise = noise_of(distribution, (4, 7), torch.Generator().manual_seed(0), "cpu")
    assert noise.shape == (4, 7, 2)
    actions, logp = distribution.sample(params, noise)
    assert actions.dtype == torch.float32
    assert torch.allclose(actions, params.mean + params.log_std.exp() * noise, atol=1e-6)
    assert torch.equal(logp, distribution.logp(params, actions))


def test_noise_is_standard_normal_and_decided_by_its_generator():
    distribution = Normal(box(4))
    noise = noise_of(distribution, (50_000,), torch.Generator().manual_seed(0), "cpu")
    again = noise_of(distribution, (50_000,), torch.Generator().manual_seed(0), "cpu")
    assert torch.equal(noise, again)
    assert noise.mean(0).abs().max().item() < 0.02
    assert (noise.std(0) - 1).abs().max().item() < 0.02
    assert noise.pow(4).mean().item() == pytest.approx(3.0, abs=0.1)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_any_shape_of_box(shape):
    distribution = Normal(box(*shape), std="state")
    size = math.prod(shape)
    params = distribution.from_features(torch.randn(4, 5, 2 * size))
    actions, logp = distribution.sample(params, noise_of(distribution, (4, 5), None, "cpu"))
    assert actions.shape == (4, 5, *shape)
    entropy, kl = distribution.entropy(params), distribution.kl(params, params)
    for value in (logp, distribution.logp(params, actions), entropy, kl):
        assert value.shape == (4, 5)
    flat = torch.distributions.Normal(params.mean, params.log_std.exp()).log_prob(actions).reshape(4, 5, size).sum(-1)
    assert torch.allclose(logp, flat, atol=1e-5)


def test_gradients_flow_to_means_and_free_standard_deviations():
    distribution = Normal(box(2))
    mean = torch.zeros(3, 2, requires_grad=True)
    params = distribution.from_features(mean)
    distribution.logp(params, torch.ones(3, 2)).sum().backward()
    # For each of 3 rows: d logp / d mean = (a - mean) / std^2 = 1, d logp / d log std = z^2 - 1 = 0; entropy's is 1.
    assert torch.equal(mean.grad, torch.ones(3, 2))
    assert torch.equal(distribution.log_std.grad, torch.zeros(2))
    distribution.entropy(distribution.from_features(mean)).sum().backward()
    assert torch.equal(distribution.log_std.grad, torch.full((2,), 3.0))


def test_reparameterised_samples_carry_gradients():
    distribution = Normal(box(2), std="state")
    features = torch.zeros(3, 4, requires_grad=True)
    noise = torch.tensor([[1.0, -2.0]]).expand(3, 2)
    actions, _ = distribution.rsample(distribution.from_features(features), noise)
    actions.sum().backward()
    # da / d mean = 1, da / d log std = std * noise = noise.
    assert torch.allclose(features.grad, torch.tensor([[1.0, 1.0, 1.0, -2.0]]).expand(3, 4))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_extreme_features_give_finite_values_and_gradients(scale):
    distribution = Normal(box(2), std="state")
    features = (torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) * scale).requires_grad_()
    params = distribution.from_features(features)
    actions, logp = distribution.sample(params, noise_of(distribution, (64,), None, "cpu"))
    (logp + distribution.entropy(params) + distribution.kl(params, params)).sum().backward()
    for value in (actions, logp, features.grad):
        assert bool(value.isfinite().all())


@pytest.mark.parametrize(
    ("space", "config", "error", "says"),
    [
        (Discrete(2), {}, TypeError, "Box"),
        (Box(0, 255, (2,), np.uint8), {}, TypeError, "floating-point"),
        (box(1), {"std": "fixed"}, ValueError, "'free' or 'state'"),
        (box(1), {"initial_std": 0.0}, ValueError, "initial_std"),
        (box(1), {"initial_std": 100.0}, ValueError, "initial_std"),
        (box(1), {"log_std_bounds": (1.0, -1.0)}, ValueError, "smaller first"),
        (box(1), {"log_std_bounds": 3.0}, ValueError, "two numbers"),
    ],
)
def test_what_is_wrong_is_said(space, config, error, says):
    with pytest.raises(error, match=says):
        Normal(space, **config)


def test_the_environment_gets_clipped_actions_where_there_are_bounds():
    space = Box(np.array([-1.0, -np.inf], np.float32), np.array([1.0, 5.0], np.float32))
    actions = torch.tensor([[3.0, 7.0], [-3.0, -70.0], [0.5, 0.5]])
    assert Normal(space).env_actions(actions).tolist() == [[1.0, 5.0], [-1.0, -70.0], [0.5, 0.5]]
    unbounded = Normal(Box(-np.inf, np.inf, (2,), np.float32))
    assert unbounded.env_actions(actions) is actions
    assert (Normal(space).clips, unbounded.clips) == (True, False)

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tests.probes import noise_of

from rl8x.distributions import Normal, SquashedNormal
from rl8x.distributions.normal import NormalParams

SPACE = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))


def one(mean: float, std: float) -> tuple[SquashedNormal, NormalParams]:
    distribution = SquashedNormal(Box(-1.0, 1.0, (1,)))
    return distribution, NormalParams(torch.tensor([[mean]]), torch.tensor([[math.log(std)]]))


def test_a_box_without_bounds_is_refused():
    with pytest.raises(ValueError, match="finite bounds"):
        SquashedNormal(Box(-np.inf, 1.0, (2,)))


def test_samples_lie_in_the_box_and_each_dimension_has_its_own_bounds():
    distribution = SquashedNormal(SPACE, std="free", initial_std=7.0)
    params = distribution.from_features(torch.zeros(5000, 2))
    actions, logp = distribution.sample(
        params, noise_of(distribution, (5000,), torch.Generator().manual_seed(0), "cpu")
    )
    assert all(SPACE.contains(action) for action in actions.detach().numpy())
    assert bool((actions.amax(0) > torch.tensor([1.99, 9.99])).all())
    assert bool((actions.amin(0) < torch.tensor([-1.99, 0.01])).all())
    assert bool(logp.isfinite().all())
    assert distribution.mode(params)[0].tolist() == [0.0, 5.0]


def test_logp_agrees_with_torch():
    distribution = SquashedNormal(SPACE)
    features = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    params = distribution.from_features(features)
    actions, logp = distribution.sample(params, noise_of(distribution, (200,), torch.Generator().manual_seed(1), "cpu"))
    transforms = [
        torch.distributions.transforms.TanhTransform(),
        torch.distributions.transforms.AffineTransform(
            torch.tensor([0.0, 5.0], dtype=torch.float64), torch.tensor([2.0, 5.0])
        ),
    ]
    base = torch.distributions.Normal(params.mean.double(), params.log_std.double().exp())
    reference = torch.distributions.TransformedDistribution(base, transforms).log_prob(actions.double()).sum(-1)
    inside = (actions - torch.tensor([0.0, 5.0])).div(torch.tensor([2.0, 5.0])).abs().amax(-1) < 0.999
    assert inside.sum() > 150
    assert torch.allclose(logp[inside].double(), reference[inside], atol=2e-3)
    assert torch.equal(logp, distribution.logp(params, actions))


def test_the_density_integrates_to_one_and_gives_the_entropy_by_quadrature():
    for mean, std in [(0.0, 1.0), (0.7, 0.4), (-1.5, 0.8)]:
        distribution, params = one(mean, std)
        actions = torch.linspace(-1, 1, 200_001)[1:-1].unsqueeze(-1)
        wide = NormalParams(params.mean.expand_as(actions), params.log_std.expand_as(actions))
        logp = distribution.logp(wide, actions).double()
        mass = logp.exp().sum() * 1e-5
        entropy = -(logp.exp() * logp).sum() * 1e-5
        assert mass.item() == pytest.approx(1.0, abs=1e-3)
        assert distribution.entropy(params).item() == pytest.approx(entropy.item(), abs=2e-3)


@pytest.mark.parametrize(("std", "tolerance"), [(0.05, 1e-5), (0.5, 1e-5), (1.0, 1e-5), (2.0, 2e-4), (7.3, 0.1)])
@pytest.mark.parametrize("mean", [0.0, 0.3, -2.0, 8.0])
def test_the_entropy_is_as_exact_as_it_says(mean, std, tolerance):
    distribution, params = one(mean, std)
    z = np.linspace(-12, 12, 100_001)
    u = mean + std * z
    log_derivative = 2 * (np.log(2) - u - np.logaddexp(0, -2 * u))
    weights = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    exact = 0.5 + 0.5 * math.log(2 * math.pi) + math.log(std) + np.trapezoid(weights * log_derivative, z)
    assert distribution.entropy(params).item() == pytest.approx(exact, abs=tolerance + 2e-6)


def test_the_entropy_counts_the_width_of_the_box_and_has_gradients():
    features = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    wide, unit = SquashedNormal(SPACE), SquashedNormal(Box(-1.0, 1.0, (2,)))
    difference = wide.entropy(wide.from_features(features)) - unit.entropy(unit.from_features(features))
    assert torch.allclose(difference, torch.full((8,), math.log(2.0) + math.log(5.0)), atol=1e-5)
    (gradient,) = torch.autograd.grad(wide.entropy(wide.from_features(features)).sum(), features)
    step = torch.zeros_like(features)
    step[:, 0] = 1e-2
    with torch.no_grad():
        ahead, behind = (wide.entropy(wide.from_features(features + sign * step)) for sign in (1, -1))
    assert torch.allclose(gradient[:, 0], (ahead - behind) / 2e-2, atol=1e-3)


def test_kl_is_that_of_the_normal_distributions():
    squashed, normal = SquashedNormal(SPACE), Normal(SPACE, std="state", log_std_bounds=(-5.0, 2.0))
    features = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(0))
    first, second = (squashed.from_features(each) for each in features)
    assert torch.equal(squashed.kl(first, second), normal.kl(first, second))


def test_saturated_actions_have_finite_scores_and_gradients():
    distribution = SquashedNormal(Box(-1.0, 1.0, (1,)), std="state")
    for mean in (-1e4, -30.0, -9.0, 9.0, 30.0, 1e4):
        features = torch.tensor([[mean, 0.0]], requires_grad=True)
        params = distribution.from_features(features)
        actions, logp = distribution.sample(params, torch.zeros(1, 1))
        assert abs(actions.item()) <= 1.0
        (logp + distribution.entropy(params)).sum().backward()
        assert math.isfinite(logp.item())
        assert bool(features.grad.isfinite().all())


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


def test_gradient_of_a_reparameterised_action():
    distribution = SquashedNormal(Box(0.0, 10.0, (1,)), std="state")
    features = torch.tensor([[0.5, -1.0]], requires_grad=True)
    actions, _ = distribution.rsample(distribution.from_features(features), torch.tensor([[1.0]]))
    (gradient,) = torch.autograd.grad(actions.sum(), features)
    u = 0.5 + math.exp(-1.0)
    derivative = 5.0 * (1 - math.tanh(u) ** 2)
    assert gradient[0].tolist() == pytest.approx([derivative, derivative * math.exp(-1.0)], rel=1e-5)


def test_bounds_follow_the_module_and_stay_out_of_what_is_saved():
    distribution = SquashedNormal(SPACE, std="free")
    assert list(distribution.state_dict()) == ["log_std"]
    assert distribution.double().action_low.dtype == torch.float64

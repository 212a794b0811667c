from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete, MultiDiscrete

from rl8x.distributions import Categorical, MultiCategorical

SIZES = [3, 1, 5, 2]
BOUNDS = [0, 3, 4, 9, 11]


def parts(features: torch.Tensor) -> list[torch.distributions.Categorical]:
    """The plain reference: one torch distribution a choice."""
    return [torch.distributions.Categorical(logits=features[..., low:high]) for low, high in itertools.pairwise(BOUNDS)]


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(2, 6, 40, 11, generator=torch.Generator().manual_seed(0)) * 2


def test_widths():
    distribution = MultiCategorical(MultiDiscrete(SIZES))
    assert (distribution.num_features, distribution.num_noise) == (11, 4)
    assert list(distribution.state_dict()) == []


def test_logp_entropy_and_kl_are_sums_over_the_choices(features):
    distribution = MultiCategorical(MultiDiscrete(SIZES))
    params, other = (distribution.from_features(each) for each in features)
    actions, logp = distribution.sample(params, torch.rand(6, 40, 4))
    assert actions.shape == (6, 40, 4)
    assert actions.dtype == torch.int64
    mine, theirs = parts(features[0]), parts(features[1])
    expected = sum(part.log_prob(actions[..., i]) for i, part in enumerate(mine))
    assert torch.allclose(logp, expected, atol=1e-5)
    assert torch.allclose(distribution.entropy(params), sum(part.entropy() for part in mine), atol=1e-5)
    kl = sum(torch.distributions.kl_divergence(*pair) for pair in zip(mine, theirs, strict=True))
    assert torch.allclose(distribution.kl(params, other), kl, atol=1e-5)
    modes = torch.stack([part.logits.argmax(-1) for part in mine], -1)
    assert torch.equal(distribution.mode(params), modes)


@pytest.mark.parametrize("sizes", [SIZES, [4, 4]])
def test_each_choice_is_sampled_as_a_categorical_is(sizes):
    distribution = MultiCategorical(MultiDiscrete(sizes))
    features, noise = torch.randn(500, sum(sizes)), torch.rand(500, len(sizes))
    actions, _ = distribution.sample(distribution.from_features(features), noise)
    for i, piece in enumerate(features.split(sizes, -1)):
        one = Categorical(Discrete(sizes[i]))
        assert torch.equal(actions[:, i], one.sample(one.from_features(piece), noise[:, i : i + 1])[0])


@pytest.mark.parametrize("value", [0.0, 0.5, 1 - 2.0**-24, 1.0])
def test_no_choice_leaves_its_own_range(value, features):
    distribution = MultiCategorical(MultiDiscrete(SIZES))
    actions, logp = distribution.sample(distribution.from_features(features), torch.full((2, 6, 40, 4), value))
    assert bool(((actions >= 0) & (actions < torch.tensor(SIZES))).all())
    assert bool(logp.isfinite().all())


def test_masks_are_laid_out_like_the_logits(features):
    distribution = MultiCategorical(MultiDiscrete(SIZES))
    mask = torch.tensor([True, False, False, True, False, True, False, True, False, False, True])
    params = distribution.from_features(features[0], mask.expand(6, 40, 11))
    actions, logp = distribution.sample(params, torch.rand(6, 40, 4))
    assert set(actions[..., 0].flatten().tolist()) == {0}
    assert set(actions[..., 2].flatten().tolist()) == {1, 3}
    assert set(actions[..., 3].flatten().tolist()) == {1}
    # Only the third choice is open, between its logits 1 and 3 (features 5 and 7).
    reference = torch.distributions.Categorical(logits=features[0][..., [5, 7]])
    assert torch.allclose(distribution.entropy(params), reference.entropy(), atol=1e-5)
    assert torch.allclose(logp, reference.log_prob((actions[..., 2] == 3).long()), atol=1e-5)


def test_gradients_are_finite_and_reach_every_logit_that_matters(features):
    distribution = MultiCategorical(MultiDiscrete(SIZES))
    logits = features[0].requires_grad_()
    params = distribution.from_features(logits)
    actions, logp = distribution.sample(params, torch.rand(6, 40, 4))
    (gradient,) = torch.autograd.grad((logp + distribution.entropy(params)).sum(), logits)
    expected = sum(part.log_prob(actions[..., i]) + part.entropy() for i, part in enumerate(parts(logits)))
    (reference,) = torch.autograd.grad(expected.sum(), logits)
    assert torch.allclose(gradient, reference, atol=1e-5)


def test_starts_and_choices_in_two_dimensions():
    space = MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[5, 0], [-1, 1]]))
    distribution = MultiCategorical(space)
    params = distribution.from_features(torch.randn(200, 11))
    actions, logp = distribution.sample(params, torch.rand(200, 4))
    assert actions.shape == (200, 2, 2)
    assert all(space.contains(action) for action in actions.numpy())
    assert torch.equal(distribution.logp(params, actions), logp)
    assert set(actions[:, 1, 0].tolist()) == {-1, 0, 1, 2}


def test_a_space_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="MultiDiscrete"):
        MultiCategorical(Discrete(3))


def test_a_choice_of_which_a_mask_allows_nothing_stays_in_its_range():
    distribution = MultiCategorical(MultiDiscrete([2, 5]))
    mask = torch.tensor([[0, 0, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0]]).bool()
    params = distribution.from_features(torch.linspace(-1, 1, 14).view(2, 7), mask)
    probs = params.log_probs.exp()
    assert probs[0, 0].tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]
    assert torch.allclose(probs[1, 1], torch.full((5,), 0.2))
    assert distribution.entropy(params)[1].item() == pytest.approx(np.log(5), rel=1e-5)
    actions, _ = distribution.sample(params, torch.full((2, 2), 0.99))
    assert actions.tolist() == [[1, 2], [0, 4]]

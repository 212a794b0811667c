from __future__ import annotations

import pytest
import torch
from gymnasium.spaces import Discrete
from tests.probes import noise_of

from rl8x.distributions import Distribution


class Fair(Distribution):
    """A distribution of one's own: two actions, equally likely, whatever the features."""

    def __init__(self, space):
        super().__init__(space)
        self.num_features, self.num_noise = 1, 2

    def from_features(self, features, mask=None):
        return features

    def sample(self, params, noise):
        actions = (noise[..., 0] < 0.5).long()
        return actions, self.logp(params, actions)

    def mode(self, params):
        return torch.zeros_like(params[..., 0], dtype=torch.int64)

    def logp(self, params, actions):
        return torch.full(actions.shape, 0.5).log()

    def entropy(self, params):
        return torch.full(params.shape[:-1], 2.0).log()


def test_noise_is_uniform_and_decided_by_its_generator():
    fair = Fair(Discrete(2))
    noise = noise_of(fair, (3, 10_000), torch.Generator().manual_seed(0), "cpu")
    assert noise.shape == (3, 10_000, 2)
    assert noise.dtype == torch.float32
    assert bool(((noise >= 0) & (noise < 1)).all())
    assert abs(noise.mean().item() - 0.5) < 0.01
    assert torch.equal(noise, noise_of(fair, (3, 10_000), torch.Generator().manual_seed(0), "cpu"))
    assert not torch.equal(noise, noise_of(fair, (3, 10_000), torch.Generator().manual_seed(1), "cpu"))


def test_the_environment_gets_the_actions_as_they_are():
    fair = Fair(Discrete(2))
    actions, _ = fair.sample(torch.zeros(4, 1), torch.rand(4, 2))
    assert fair.env_actions(actions) is actions
    assert not fair.clips


def test_a_divergence_is_optional():
    with pytest.raises(NotImplementedError, match="Fair defines no `kl`"):
        Fair(Discrete(2)).kl(torch.zeros(1, 1), torch.zeros(1, 1))


def test_who_defines_what_the_environment_gets_need_not_say_that_it_clips():
    class Flipped(Fair):
        def env_actions(self, actions):
            return 1 - actions

    assert Flipped(Discrete(2)).clips

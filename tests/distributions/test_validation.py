"""A distribution of one's own is tried before training: each fault is named, with both shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl8x import PPOConfig
from rl8x.distributions import Categorical, Distribution, Normal
from rl8x.envs import CartPole, Pendulum

SMALL = {"num_envs": 2, "horizon": 2, "device": "cpu", "model_config": {"hidden_sizes": [4]}}


class Triangular(Distribution):
    """Over [-2, 2], with the most likely action in the middle, whatever the features."""

    num_features, num_noise = 1, 2

    def from_features(self, features, mask=None):
        return features

    def sample(self, params, noise):
        actions = 2 * (noise.sum(-1, keepdim=True) - 1)
        return actions, self.logp(params, actions)

    def mode(self, params):
        return torch.zeros_like(params)

    def logp(self, params, actions):
        return (0.5 - actions.abs() / 4).clamp(min=1e-6).log().sum(-1)

    def entropy(self, params):
        return torch.full(params.shape[:-1], 0.5 + np.log(2.0))


def build(distribution, env=Pendulum):
    return PPOConfig(**SMALL, distribution=distribution).build(env)


def test_one_that_does_what_it_must_is_taken():
    algorithm = build(Triangular)
    algorithm.collect()
    algorithm.step()
    assert build(type("Sharper", (Categorical,), {}), CartPole).policy.distribution.num_features == 2


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"num_features": None}, "Mine.num_features must be a whole number, at least 0, .*; got None"),
        ({"num_noise": -1}, "Mine.num_noise must be .*; got -1"),
        ({"from_features": lambda self, features, mask=None: {}["a"]}, r"Mine.from_features raised KeyError: 'a'"),
        (
            {"sample": lambda self, params, noise: noise[..., :1]},
            r"sample must return actions and .*; got \[2, 1\] alone",
        ),
        (
            {"sample": lambda self, params, noise: (noise, noise[..., 0])},
            r"Mine.sample must return actions \[..., \*action\], here \[2, 1\]; got \[2, 2\]",
        ),
        (
            {"sample": lambda self, params, noise: (noise[..., :1], noise[..., :1])},
            r"Mine.sample must return log-probabilities \[...\], here \[2\]; got \[2, 1\]",
        ),
        ({"mode": lambda self, params: params[..., 0]}, r"Mine.mode must return actions .* here \[2, 1\]; got \[2\]"),
        ({"logp": lambda self, params, actions: actions}, r"log-probabilities \[...\], here \[2\]; got \[2, 1\]"),
        ({"entropy": lambda self, params: 0.0}, r"Mine.entropy must return entropies \[...\], here \[2\]; got float"),
        (
            {"sample": lambda self, params, noise: (noise[..., :1], noise[..., 0] + 5)},
            "Mine.sample must return the log-probabilities that Mine.logp gives for the same actions",
        ),
    ],
)
def test_what_does_not_fit_is_named_before_training(parts, words):
    with pytest.raises(ValueError, match=words):
        build(type("Mine", (Triangular,), parts))


def test_parts_of_a_dict_have_their_names():
    class Wrong(Distribution):
        num_features, num_noise = 1, 1

        def from_features(self, features, mask=None):
            return features

        def sample(self, params, noise):
            return {"push": noise}, noise[..., 0]

    space = spaces.Dict({"push": spaces.Box(-1.0, 1.0, (3,)), "gear": spaces.Discrete(2)})
    env = type("Two", (Pendulum,), {"single_action_space": space, "transition": drifting})
    with pytest.raises(ValueError, match=r"'actions/gear': \[2\], 'actions/push': \[2, 3\]}; got {'push': \[2, 1\]}"):
        build(Wrong, env)


def drifting(self, state, actions, parameters, noise):
    return Pendulum.transition(self, state, actions["push"][..., :1], parameters, noise)


def test_a_built_in_one_is_not_tried(monkeypatch):
    def fails(*_):
        raise AssertionError

    monkeypatch.setattr("rl8x.policy.check_distribution", fails)
    build(Normal)

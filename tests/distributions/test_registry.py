"""Distributions by name, and their check."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.probes import noise_of
from torch import distributions

from rl8x import Distribution, PPOConfig
from rl8x.distributions import BUILTIN, Bernoulli, Categorical, Composite, MultiCategorical, Normal, make_distribution
from rl8x.envs import CartPole, Pendulum

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def test_the_space_picks_a_distribution():
    picked = {
        Categorical: spaces.Discrete(3),
        Normal: BOX,
        MultiCategorical: spaces.MultiDiscrete([2, 3]),
        Bernoulli: spaces.MultiBinary(3),
        Composite: spaces.Dict({"a": BOX}),
    }
    assert [type(make_distribution(None, space)) for space in picked.values()] == [*picked]
    assert type(make_distribution(None, spaces.Tuple([BOX]))) is Composite


CASES = [
    ("categorical", spaces.Discrete(4), {}),
    ("categorical", spaces.Discrete(40, start=-1), {}),
    ("normal", BOX, {"std": "free"}),
    ("normal", BOX, {"std": "state"}),
    ("normal", spaces.Box(-1.0, 1.0, ()), {"std": "state"}),
    ("normal", spaces.Box(-1.0, 1.0, (2, 3)), {"std": "state"}),
    ("squashed_normal", BOX, {}),
    ("multi_categorical", spaces.MultiDiscrete([3, 3]), {}),
    ("multi_categorical", spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[5, 0], [-1, 1]])), {}),
    ("bernoulli", spaces.MultiBinary(4), {}),
    ("epsilon_greedy", spaces.Discrete(5, start=-2), {"epsilon": 0.3}),
    ("composite", spaces.Dict({"go": spaces.Discrete(3), "steer": BOX}), {}),
]

CONTINUOUS = ("normal", "squashed_normal", "composite")  # which take no mask of all features


def leaves(tree):
    return [tree] if isinstance(tree, torch.Tensor) else [leaf for part in tree.values() for leaf in leaves(part)]


def everything(distribution, features, noise, mask=None):
    """Actions, their log-probabilities, the mode and its, entropy, and divergence from itself."""
    params = distribution.from_features(features, mask)
    mode = distribution.mode(params)
    scores = distribution.logp(params, mode), distribution.entropy(params), distribution.kl(params, params)
    return (*distribution.sample(params, noise), mode, *scores)


def test_every_built_in_distribution_is_among_the_cases():
    assert {name for name, _, _ in CASES} == set(BUILTIN)


@pytest.mark.parametrize(("name", "space", "config"), CASES)
def test_nothing_depends_on_values_that_the_host_would_have_to_see(name, space, config):
    # Tensors on the meta device have shapes only: reading a value, or a shape that depends on one, raises.
    distribution = make_distribution(name, space, config).to("meta")
    features = torch.empty(3, 5, distribution.num_features, device="meta")
    noise = noise_of(distribution, (3, 5), None, "meta")
    for mask in (None, torch.ones_like(features, dtype=torch.bool))[: 1 if name in CONTINUOUS else 2]:
        actions, logp, mode, *rest = everything(distribution, features, noise, mask)
        for tensor in (*leaves(actions), *leaves(mode)):
            assert tensor.shape[:2] == (3, 5)
        assert all(value.shape == (3, 5) for value in (logp, *rest))


def by_torch(name, space, features, mask):
    """Torch's own distributions of an action's choices; its log-probability, entropy and divergence are their sums."""
    if name == "normal":
        mean, log_std = (each.view(*each.shape[:-1], *space.shape) for each in features.chunk(2, -1))
        return [distributions.Independent(distributions.Normal(mean, log_std.exp()), len(space.shape))]
    if name == "bernoulli":
        logits = torch.where(mask, features, -1e5).view(*features.shape[:-1], *space.shape)
        return [distributions.Independent(distributions.Bernoulli(logits=logits), len(space.shape))]
    sizes = space.nvec.flatten().tolist() if name == "multi_categorical" else [int(space.n)]
    choices = zip(features.split(sizes, -1), mask.split(sizes, -1), strict=True)
    # Where nothing of a choice is allowed, all of it is as likely.
    choices = [torch.where(legal, each, -1e5 * legal.any(-1, keepdim=True)) for each, legal in choices]
    return [distributions.Categorical(logits=each) for each in choices]


COMPARED = ("categorical", "multi_categorical", "bernoulli", "normal")
OF_TORCH = [case for case in CASES if case[0] in COMPARED and case[2] != {"std": "free"}]
OF_TORCH += [("categorical", spaces.Discrete(1), {}), ("multi_categorical", spaces.MultiDiscrete([3, 1, 5, 2]), {})]
OF_TORCH += [("bernoulli", spaces.MultiBinary([2, 3]), {})]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "space", "config"), OF_TORCH)
def test_scores_modes_and_gradients_are_those_of_torch(name, space, config, masked):
    """Under a mask as if what it forbids were all but impossible."""
    distribution, generator = make_distribution(name, space, config), torch.Generator().manual_seed(1)
    one, other = 0.5 * torch.randn(2, 7, 4, distribution.num_features, generator=generator)
    features, mask = one.requires_grad_(), torch.rand(one.shape, generator=generator) < (0.6 if masked else 1.0)
    given = mask if masked and name != "normal" else None
    params, others = (distribution.from_features(each, given) for each in (features, other))
    actions = distribution.sample(params, noise_of(distribution, (7, 4)))[0].detach()
    parts, theirs = by_torch(name, space, features, mask), by_torch(name, space, other, mask)
    first = getattr(space, "start", 0)  # from which torch's do not count
    counted = actions - torch.as_tensor(first) if name.endswith("categorical") else actions.to(one.dtype)
    columns = counted.flatten(2).unbind(-1) if name == "multi_categorical" else [counted]
    expected = [
        sum(part.log_prob(column) for part, column in zip(parts, columns, strict=True)),
        sum(part.entropy() for part in parts),
        sum(distributions.kl_divergence(*pair) for pair in zip(parts, theirs, strict=True)),
    ]
    found = [distribution.logp(params, actions), distribution.entropy(params), distribution.kl(params, others)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found[0].min() > -100, "what is forbidden was drawn"
    modes = [part.mode for part in parts]
    modes = torch.stack(modes, -1).view(7, 4, *space.shape) if name == "multi_categorical" else modes[0]
    assert torch.equal(distribution.mode(params).to(modes.dtype), modes + torch.as_tensor(first).to(modes.dtype))
    gradients = [torch.autograd.grad(sum(each).sum(), features, allow_unused=True)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4, 1e30])
@pytest.mark.parametrize(("name", "space", "config"), CASES)
def test_extreme_features_give_finite_values_and_gradients(name, space, config, scale, masked):
    if name in CONTINUOUS:
        scale = min(scale, 1e4)  # of larger means float32 does not hold the squares
    distribution = make_distribution(name, space, config)
    noise = noise_of(distribution, (64,), torch.Generator().manual_seed(0))
    features = torch.randn(64, distribution.num_features, generator=torch.Generator().manual_seed(0)) * scale
    mask = torch.rand_like(features) < 0.5 if masked and name not in CONTINUOUS else None
    _, logp, _, _, entropy, kl = everything(distribution, features.requires_grad_(), noise, mask)
    total = (logp + entropy + kl).sum()
    if total.requires_grad:  # greedy actions do not change with their values
        total.backward()
    for value in (logp, entropy, features.grad):
        assert value is None or bool(value.isfinite().all())


@pytest.mark.parametrize(("name", "space", "config"), CASES)
def test_samples_are_elements_of_the_space_scored_to_the_bit_like_stored_actions(name, space, config):
    distribution = make_distribution(name, space, config)
    features = torch.randn(3, 50, distribution.num_features)
    params = distribution.from_features(features)
    actions, logp = distribution.sample(params, noise_of(distribution, (3, 50), None, "cpu"))
    assert torch.equal(logp, distribution.logp(params, actions))
    for each, copy in itertools.product((actions, distribution.mode(params)), range(50)):
        one = keyed(distribution.env_actions(each), lambda leaf, copy=copy: leaf[1, copy].detach().numpy())
        # Gymnasium takes numpy integers for Discrete, not arrays without a dimension.
        assert space.contains(keyed(one, lambda leaf: leaf[()] if leaf.dtype == np.int64 else leaf))


def keyed(tree, function):
    return {key: keyed(part, function) for key, part in tree.items()} if isinstance(tree, dict) else function(tree)


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
    flipped = type("Flipped", (Triangular,), {"env_actions": lambda self, actions: -actions})
    assert (algorithm.policy.clips, build(flipped).policy.clips) == (False, True)


def sampling(give):
    return {"sample": lambda self, params, noise: give(noise)}


class Parts(Pendulum):
    single_action_space = spaces.Dict({"push": spaces.Box(-1.0, 1.0, (3,)), "gear": spaces.Discrete(2)})

    def transition(self, state, actions, parameters, noise):
        return super().transition(state, actions["push"][..., :1], parameters, noise)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        ({"from_features": lambda self, features, mask=None: {}["a"]}, r"\.from_features raised KeyError: 'a'"),
        (sampling(lambda noise: noise[..., :1]), r"\.sample must return actions and .*; got \[2, 1\] alone"),
        (sampling(lambda noise: (noise, noise[..., 0])), r"actions \[..., \*action\], here \[2, 1\]; got \[2, 2\]"),
        (
            sampling(lambda noise: (noise[..., :1], noise[..., :1])),
            r"\.sample must return log-probabilities \[...\], here \[2\]; got \[2, 1\]",
        ),
        ({"mode": lambda self, params: params[..., 0]}, r"\.mode must return actions .* here \[2, 1\]; got \[2\]"),
        ({"logp": lambda self, params, actions: actions}, r"log-probabilities \[...\], here \[2\]; got \[2, 1\]"),
        ({"entropy": lambda self, params: 0.0}, r"\.entropy must return entropies \[...\], here \[2\]; got float"),
        (
            sampling(lambda noise: (noise[..., :1], noise[..., 0] + 5)),
            r"\.sample must return the log-probabilities that Mine.logp gives for the same actions",
        ),
        (
            sampling(lambda noise: (torch.rand_like(noise[..., :1]), noise[..., 0])),
            r"\.sample gives two results for the same arguments: .* draws no random numbers",
        ),
        (
            sampling(lambda noise: (noise.add_(1.0)[..., :1], noise[..., 0])),
            r"\.sample gives two results for the same arguments: .* changes nothing",
        ),
        (
            {"entropy": lambda self, params: torch.rand(params.shape[:-1])},
            r"\.entropy gives two results for the same arguments",
        ),
        (
            sampling(lambda noise: ({"push": noise[..., :1]}, noise[..., 0])) | {"env": Parts},
            r"'gear': \[2\], 'push': \[2, 3\]}; got {'push': \[2, 1\]}",
        ),
    ],
)
def test_what_does_not_fit_is_named_before_training(methods, words):
    with pytest.raises(ValueError, match=f"Mine.*{words}"):
        build(type("Mine", (Triangular,), methods), methods.get("env", Pendulum))

"""For each kind of space: sample actions, store and replay them; log-probabilities are equal, an update runs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl8x import Env, PPOConfig, keys
from rl8x.spaces import named_parts, torch_dtype
from rl8x.trees import flatten_tree, unflatten_tree

OBSERVATIONS = {
    "vector": spaces.Box(-1, 1, (3,), np.float32),
    "number": spaces.Box(0, 2, (), np.float32),
    "tensor": spaces.Box(-1, 1, (2, 3, 2), np.float32),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "grey image": spaces.Box(0, 255, (40, 40), np.uint8),
    "discrete": spaces.Discrete(4, start=2),
    "multi-discrete": spaces.MultiDiscrete([2, 3], start=[1, 0]),
    "bits": spaces.MultiBinary([2, 2]),
    "dict": spaces.Dict({"x": spaces.Box(-1, 1, (2,), np.float32), "n": spaces.Discrete(3)}),
    "dict with an image": spaces.Dict(
        {"image": spaces.Box(0, 255, (6, 7, 3), np.uint8), "x": spaces.Box(-1, 1, (2,), np.float32)}
    ),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)]),
    "nested": spaces.Dict(
        {"a": spaces.Tuple([spaces.Dict({"b.c": spaces.Box(-1, 1, (2,), np.float32)}), spaces.MultiBinary(2)])}
    ),
}
ACTIONS = {
    "discrete": spaces.Discrete(3),
    "discrete from 5": spaces.Discrete(3, start=5),
    "multi-discrete": spaces.MultiDiscrete([2, 4]),
    "multi-discrete of rank 2": spaces.MultiDiscrete([[2, 4], [3, 2]]),
    "bits": spaces.MultiBinary(3),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "bounded": spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 0.5], np.float32)),
    "of rank 2": spaces.Box(-1, 1, (2, 2), np.float32),
    "dict": spaces.Dict({"steer": spaces.Box(-1, 1, (1,), np.float32), "gear": spaces.Discrete(4)}),
    "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(2)]),
    "nested": spaces.Dict({"a": spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.Discrete(2)])}),
}


@functools.cache
def constant(content, shape, device):
    """Make a tensor of float32 numbers, once: what is captured may copy nothing to the device."""
    return torch.tensor(np.frombuffer(content, np.float32), device=device).view(shape)


def from_uniform(space, noise):
    """Make elements of a space from uniform numbers `[num_envs, 1]`: all of an element say the same number."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return {key: from_uniform(part, noise) for key, part in named_parts(space)}
    low, high = {
        spaces.Discrete: lambda: (space.start, space.start + space.n),
        spaces.MultiDiscrete: lambda: (space.start, space.start + space.nvec),
        spaces.MultiBinary: lambda: (0, 2),
        spaces.Box: lambda: (space.low, space.high),
    }[type(space)]()
    low, high = (
        constant(np.asarray(bound, np.float32).tobytes(), np.shape(bound), noise.device) for bound in (low, high)
    )
    noise = noise.view(-1, *(1,) * len(space.shape)).expand(-1, *space.shape)
    values = low + noise * (high - low)
    return (values if torch_dtype(space).is_floating_point else values.floor()).to(torch_dtype(space))


class Any_(Env):
    """Shows a random number in the form of any space; the reward is the sum of all numbers of the action."""

    default_time_limit = 5
    terminates = True
    reset_noise = step_noise = 1

    def __init__(self, num_envs, *, observations, actions, **kwargs):
        self.single_observation_space, self.single_action_space = observations, actions
        super().__init__(num_envs, **kwargs)

    def initial_state(self, parameters, noise):
        return {"x": noise}

    def transition(self, state, actions, parameters, noise):
        check_actions(actions, self.single_action_space, self.num_envs)
        parts = flatten_tree("", actions).values()
        rewards = sum(part.to(torch.float32).flatten(1).sum(1) if part.ndim > 1 else part.float() for part in parts)
        return {"x": noise}, rewards, noise[:, 0] < 0.1

    def observe(self, state, parameters):
        return from_uniform(self.single_observation_space, state["x"])


def check_actions(actions, space, num_envs):
    """Raise where actions do not belong to a space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        assert sorted(actions) == sorted(key for key, _ in named_parts(space))
        for key, part in named_parts(space):
            check_actions(actions[key], part, num_envs)
        return
    assert actions.shape == (num_envs, *space.shape)
    assert actions.dtype == torch_dtype(space)
    for row in actions.numpy():
        assert space.contains(row if row.ndim else row[()]), (row, space)


def build(observations, actions, **options):
    config = {"num_envs": 6, "horizon": 8, "sgd_minibatch_size": 16, "num_sgd_iters": 2, "seed": 1, "device": "cpu"}
    return PPOConfig.rl8(**(config | options)).build(Any_, observations=observations, actions=actions)


def check_round_trip(algorithm):
    """Collect, score what was stored with the same weights, compare, and update."""
    algorithm.collect()
    rollout, horizon = algorithm.rollout, algorithm.config.horizon
    stored = {name: tensor[:horizon].flatten(0, 1) for name, tensor in rollout.tensors.items()}
    policy = algorithm.policy
    with torch.no_grad():
        obs, actions = unflatten_tree(keys.OBS, stored), unflatten_tree(keys.ACTIONS, stored)
        one = {name: part.unsqueeze(0) for name, part in flatten_tree("obs", obs).items()}
        two = {name: part.unsqueeze(0) for name, part in flatten_tree("actions", actions).items()}
        starts = stored[keys.STARTS].unsqueeze(0)
        again = policy.evaluate(unflatten_tree("obs", one), unflatten_tree("actions", two), {}, starts)
    torch.testing.assert_close(again.logp[0], stored[keys.LOGP], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again.values[0], stored[keys.VALUES], rtol=1e-5, atol=1e-5)
    before = [weights.detach().clone() for weights in policy.parameters()]
    stats = algorithm.step()
    assert all(np.isfinite(value) for value in stats.values()), dict(stats)
    assert any(not torch.equal(old, new) for old, new in zip(before, policy.parameters(), strict=True))


def check_first_update(algorithm):
    """Collect; in the first update the ratio of new and old probabilities is 1: the packed data are what was stored."""
    algorithm.collect()
    stats = algorithm.step()
    assert stats["monitors/kl_div"] == pytest.approx(0.0, abs=1e-9)
    assert all(np.isfinite(value) for value in stats.values()), dict(stats)


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations(name):
    space = OBSERVATIONS[name]
    options = {"model_config": {"hidden_sizes": [16]}}
    algorithm = build(space, spaces.Discrete(3), **options)
    expected = "CNNModel" if "image" in name else "MLPModel"
    assert type(algorithm.policy.model).__name__ == expected
    check_round_trip(algorithm)
    check_first_update(build(space, spaces.Discrete(3), num_sgd_iters=1, sgd_minibatch_size=None, **options))
    # The buffer keeps each part as the environment gave it: bytes stay bytes.
    kept = {key for key in algorithm.rollout.tensors if key.split("/")[0] == keys.OBS}
    given = flatten_tree(keys.OBS, algorithm.horizons.collector.cursor.obs)
    assert kept == set(given)
    assert all(algorithm.rollout[key].dtype == part.dtype for key, part in given.items())


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, {}) for name in ACTIONS),
        ("bounded", {"distribution": "squashed_normal"}),
        ("of rank 2", {"distribution": "squashed_normal", "distribution_config": {"std": "free"}}),
        ("bounded", {"distribution_config": {"std": "state"}}),
        ("dict", {"distribution_config": {"steer": {"distribution": "squashed_normal"}}}),
    ],
)
def test_actions(name, config):
    check_round_trip(build(OBSERVATIONS["vector"], ACTIONS[name], model_config={"hidden_sizes": [16]}, **config))


RECURRENT = {
    "lstm": {"hidden_size": 8},
    "gru": {"hidden_size": 8, "encoder_sizes": [8]},
    "attention": {"window": 3, "width": 8, "num_heads": 2},
}


@pytest.mark.parametrize("model", RECURRENT)
@pytest.mark.parametrize("name", ["vector", "dict with an image", "grey image", "nested"])
def test_models_with_memory_in_any_space(name, model):
    options = {"model": model, "model_config": RECURRENT[model], "seq_len": 4}
    check_first_update(build(OBSERVATIONS[name], ACTIONS["tuple"], num_sgd_iters=1, sgd_minibatch_size=None, **options))
    algorithm = build(OBSERVATIONS[name], ACTIONS["tuple"], **options)
    for _ in range(2):
        algorithm.collect()
        assert all(np.isfinite(value) for value in algorithm.step().values())


def test_normalised_observations_in_nested_spaces():
    algorithm = build(OBSERVATIONS["nested"], ACTIONS["dict"], normalize_observations=True)
    algorithm.collect()
    seen = algorithm.rollout["obs/a/0/b.c"][:8].flatten(0, 1).double()
    algorithm.step()
    moments = algorithm.policy.obs_moments["a/0/b%2Ec"]
    torch.testing.assert_close(moments.mean, seen.mean(0))
    torch.testing.assert_close(moments.var, seen.var(0, unbiased=False))
    assert list(algorithm.policy.obs_moments) == ["a/0/b%2Ec"]  # bits are not normalised

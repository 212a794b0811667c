"""Masks, and what critics alone see; values of actions are compared in algorithms/test_dqn.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl8x.keys import ACTION_MASK
from rl8x.policy import Policy
from rl8x.spaces import leaves, only_legal
from rl8x.trees import flatten_tree, unflatten_tree

X = spaces.Box(-1, 1, (2,), np.float32)
SMALL = {
    "mlp": {"hidden_sizes": [4]},
    "lstm": {"hidden_size": 4},
    "gru": {"hidden_size": 4},
    "attention": {"window": 3, "width": 4, "num_heads": 1},
}


def flags(width):
    return spaces.Box(0, 1, (width,), np.int8)


def masked_policy(actions, mask, model="mlp"):
    torch.manual_seed(0)
    policy = Policy(spaces.Dict({"x": X, ACTION_MASK: mask}), actions, model=model, model_config=SMALL[model])
    # Far from uniform, so that what is illegal is often what the logits prefer.
    policy.model.policy_head.weight.data.normal_(std=30.0)
    return policy


MIXED = spaces.Dict({"gear": spaces.Discrete(4), "legs": spaces.MultiDiscrete([2, 3]), "on": spaces.MultiBinary(2)})
CASES = {
    "discrete": (spaces.Discrete(5), flags(5)),
    "many": (spaces.Discrete(40), spaces.MultiBinary(40)),
    "multi-discrete": (spaces.MultiDiscrete([2, 3]), flags(5)),
    "bits": (spaces.MultiBinary(3), flags(3)),
    "mixed": (MIXED, spaces.Dict({"gear": flags(4), "legs": flags(5), "on": flags(2)})),
    "mixed, one part": (MIXED, spaces.Dict({"legs": flags(5)})),
    "tuple": (spaces.Tuple([spaces.Discrete(3), X]), spaces.Tuple([flags(3)])),
}


@pytest.mark.parametrize("name", CASES)
def test_masked_actions_are_never_sampled(name):
    actions, mask_space = CASES[name]
    policy = masked_policy(actions, mask_space)
    generator = torch.Generator().manual_seed(1)
    rows = 250_000
    starts = torch.zeros(rows, dtype=torch.bool)
    flags = {
        "/".join((ACTION_MASK, *path)): torch.rand(rows, *leaf.shape, generator=generator) < 0.4
        for path, leaf in leaves(mask_space)
    }
    mask = unflatten_tree(ACTION_MASK, flags)
    obs = {"x": torch.rand(rows, 2, generator=generator) * 2 - 1, ACTION_MASK: mask}
    noise = policy.noise(1, rows, generator)[0]
    noise[:100], noise[100:200] = 0.0, 1.0 - 2.0**-24
    with torch.no_grad():
        act, mode = policy.act(obs, {}, starts, noise), policy.act(obs, {}, starts).actions
    for taken in (act.actions, mode):
        legal = flatten_tree("", only_legal(taken, mask, actions))
        assert all(torch.equal(legal[name], part) for name, part in flatten_tree("", taken).items())
    assert act.logp.isfinite().all()


def test_the_mask_is_part_of_what_is_scored():
    policy = masked_policy(spaces.Discrete(3), flags(3))
    x, starts = torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.bool)
    policy.model.policy_head.weight.data.zero_()
    for legal, p in (([1, 1, 1], 1 / 3), ([0, 1, 1], 1 / 2), ([0, 0, 1], 1.0)):
        obs = {"x": x, ACTION_MASK: torch.tensor([[legal]], dtype=torch.int8)}
        result = policy.evaluate(obs, torch.tensor([[2]]), {}, starts)
        assert result.logp.exp().item() == pytest.approx(p)
        assert result.entropy.item() == pytest.approx(np.log(1 / p), abs=1e-6)


def critic_space():
    return spaces.Dict({"x": X, "hidden": spaces.Box(-1, 1, (3,), np.float32), "kind": spaces.Discrete(2)})


@pytest.mark.parametrize("model", SMALL)
def test_what_only_the_critic_sees_has_no_influence_on_the_actor(model):
    torch.manual_seed(3)
    config = SMALL[model] | {"critic_obs": ["hidden", "kind"], "policy_gain": 1.0}
    policy = Policy(critic_space(), spaces.Discrete(3), model=model, model_config=config)
    state, starts = policy.initial_state(4), torch.zeros(5, 4, dtype=torch.bool)
    obs = {"x": torch.randn(5, 4, 2), "hidden": torch.randn(5, 4, 3), "kind": torch.randint(2, (5, 4))}
    other = obs | {"hidden": torch.randn(5, 4, 3), "kind": 1 - obs["kind"]}
    features, values, _ = policy.model(obs, state, starts)
    features_2, values_2, _ = policy.model(other, state, starts)
    assert torch.equal(features, features_2)
    assert (values != values_2).all()
    nan = policy.model(obs | {"hidden": torch.full((5, 4, 3), torch.nan)}, state, starts)
    assert torch.equal(nan[0], features)
    assert (features != policy.model(obs | {"x": obs["x"] + 1}, state, starts)[0]).any()
    torch.testing.assert_close(policy.model.values(obs, state, starts), values)
    # No weight of the actor depends on it by the gradient either.
    other["hidden"].requires_grad_()
    features_2 = policy.model(other, state, starts)[0]
    gradient = torch.autograd.grad(features_2.sum(), other["hidden"], allow_unused=True)[0]
    assert gradient is None or not gradient.any()

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl8x.algorithms import DQNConfig, PPOConfig
from rl8x.envs import CartPole
from rl8x.keys import ACTION_MASK
from rl8x.policy import Policy
from rl8x.spaces import check_mask, leaves, only_legal
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


@pytest.mark.parametrize(
    ("mask", "actions", "says"),
    [
        (flags(4), spaces.Discrete(3), r"'action_mask' must be shaped \[3\].*got Box\(\[4\]"),
        (flags(4), spaces.MultiDiscrete([2, 3]), r"shaped \[5\]"),
        (flags(2), X, "needs discrete actions"),
        (flags(4), MIXED, "must be a Dict with masks for some of gear, legs, on"),
        (spaces.Dict({"leg": flags(5)}), MIXED, "'leg'.*legs"),
        (spaces.Dict({"legs": flags(4)}), MIXED, r"'action_mask/legs' must be shaped \[5\]"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, actions, says):
    with pytest.raises(ValueError, match=says):
        Policy(spaces.Dict({"x": X, ACTION_MASK: mask}), actions)
    with pytest.raises(ValueError, match=r"action_mask|action space"):
        check_mask(mask, actions, ACTION_MASK)


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


@pytest.mark.parametrize(
    ("space", "config", "says"),
    [
        (critic_space(), {"critic_obs": ["hiden"]}, "'hiden'.*hidden"),
        (critic_space(), {"critic_obs": ["hidden"], "shared": True}, "shared=False"),
        (critic_space(), {"critic_obs": ["x", "hidden", "kind"]}, "nothing to see"),
        (critic_space(), {"critic_obs": "hidden"}, r"Try \['hidden'\]"),
        (X, {"critic_obs": ["x"]}, "parts of a Dict"),
        (spaces.Dict({ACTION_MASK: flags(3)}), {}, "beside 'action_mask'"),
    ],
)
def test_observations_that_leave_nothing_to_see_are_refused(space, config, says):
    with pytest.raises(ValueError, match=says):
        Policy(space, spaces.Discrete(3), model_config=config)


def test_what_acts_in_other_libraries_is_answered_with_decide_and_load_algorithm(tmp_path):
    policy = PPOConfig(num_envs=2, device="cpu", model_config={"hidden_sizes": [8]}).build(CartPole).policy
    obs = np.zeros(4, dtype=np.float32)
    for call in (
        lambda: policy.predict(obs),
        lambda: policy.predict(obs, deterministic=True),
        lambda: policy.predict(obs, None, episode_start=True),
    ):
        with pytest.raises(TypeError, match=r"^to act, call `policy.decide\(obs\)`"):
            call()
    for source, error in (("my-run", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error, match=rf"^there is no file '{source}' .*: rl8x.load_algorithm\('{source}'\).policy$"):
            Policy.load(source)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "must be a path, without NUL; got ''"),
        ("a\0b", r"must be a path, without NUL; got 'a\\x00b'"),
        *((folder, f"must be a file; got the folder '{folder}'") for folder in (".", "..", "/")),
    ],
)
def test_paths_that_name_no_file_are_refused(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = Policy(X, spaces.Discrete(2))
    calls = [("Policy.save: `path`", lambda: policy.save(path))]
    if "NUL" in message:
        config = DQNConfig(num_envs=2, device="cpu", buffer_path=path)
        calls += [("Policy.load: `path`", lambda: Policy.load(path)), ("`buffer_path`", lambda: config.build(CartPole))]
    for name, call in calls:
        with pytest.raises(ValueError, match=f"{name} {message}"):
            call()
    assert not list(tmp_path.iterdir())

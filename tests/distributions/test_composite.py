from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.probes import noise_of

from rl8x.distributions import Categorical, Composite, Normal, SquashedNormal

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
SPACE = spaces.Dict({"go": spaces.Discrete(3), "steer": BOX})


def test_parts_lie_side_by_side_and_sums_are_taken():
    distribution = Composite(SPACE, steer={"std": "state"})
    go, steer = Categorical(SPACE["go"]), Normal(BOX, std="state")
    assert (distribution.num_features, distribution.num_noise) == (3 + 4, 1 + 2)
    features, noise = torch.randn(2, 6, 5, 7), noise_of(distribution, (6, 5), torch.Generator().manual_seed(0), "cpu")
    params, other = (distribution.from_features(each) for each in features)
    go_params, go_other = (go.from_features(each[..., :3]) for each in features)
    steer_params, steer_other = (steer.from_features(each[..., 3:]) for each in features)
    actions, logp = distribution.sample(params, noise)
    go_actions, go_logp = go.sample(go_params, noise[..., :1])
    steer_actions, steer_logp = steer.sample(steer_params, noise[..., 1:])
    assert list(actions) == ["go", "steer"]
    assert torch.equal(actions["go"], go_actions)
    assert torch.equal(actions["steer"], steer_actions)
    assert torch.equal(logp, go_logp + steer_logp)
    assert torch.equal(distribution.logp(params, actions), logp)
    assert torch.equal(distribution.entropy(params), go.entropy(go_params) + steer.entropy(steer_params))
    assert torch.equal(distribution.kl(params, other), go.kl(go_params, go_other) + steer.kl(steer_params, steer_other))
    assert torch.equal(distribution.mode(params)["go"], go.mode(go_params))
    assert torch.equal(distribution.mode(params)["steer"], steer_params.mean)


def test_each_part_gets_its_own_kind_of_noise():
    noise = noise_of(Composite(SPACE), (20_000,), torch.Generator().manual_seed(0), "cpu")
    assert bool(((noise[:, 0] >= 0) & (noise[:, 0] < 1)).all())
    assert noise[:, 1:].min().item() < -3
    assert noise[:, 1:].std().item() == pytest.approx(1.0, abs=0.02)
    assert [name for name, _ in Composite(SPACE).named_parameters()] == ["parts.1.log_std"]


def test_masks_and_bounds_go_to_their_parts():
    distribution = Composite(SPACE)
    features = torch.randn(100, 5) * 3
    mask = {"go": torch.tensor([False, True, False]).expand(100, 3)}
    params = distribution.from_features(features, mask)
    actions, _ = distribution.sample(params, noise_of(distribution, (100,), None, "cpu"))
    assert set(actions["go"].tolist()) == {1}
    clipped = distribution.env_actions(actions)
    assert torch.equal(clipped["go"], actions["go"])
    assert clipped["steer"].abs().max().item() == 1.0
    assert actions["steer"].abs().max().item() > 1.0
    assert distribution.clips
    assert not Composite(spaces.Dict({"go": SPACE["go"]})).clips


def test_a_tuple_has_numbers_as_keys_and_parts_may_have_parts():
    space = spaces.Tuple([spaces.MultiBinary(2), spaces.Dict({"in": spaces.Discrete(2), "out": BOX})])
    distribution = Composite(space, **{"1": {"out": {"distribution": "squashed_normal"}}})
    params = distribution.from_features(torch.randn(4, distribution.num_features))
    actions, logp = distribution.sample(params, noise_of(distribution, (4,), None, "cpu"))
    assert {key: value.shape for key, value in actions["1"].items()} == {"in": (4,), "out": (4, 2)}
    assert actions["0"].shape == (4, 2)
    assert logp.shape == (4,)
    assert isinstance(distribution.parts[1].parts[1], SquashedNormal)


def test_reparameterised_where_every_part_is():
    mixed, smooth = Composite(SPACE), Composite(spaces.Dict({"a": BOX, "b": BOX}))
    features = torch.zeros(3, 4, requires_grad=True)
    actions, logp = smooth.rsample(smooth.from_features(features), torch.ones(3, 4))
    (gradient,) = torch.autograd.grad(actions["a"].sum() + 2 * actions["b"].sum(), features)
    assert gradient.tolist() == [[1.0, 1.0, 2.0, 2.0]] * 3
    assert logp.shape == (3,)
    with pytest.raises(TypeError, match="Categorical"):
        mixed.rsample(mixed.from_features(torch.zeros(3, 5)), torch.zeros(3, 3))

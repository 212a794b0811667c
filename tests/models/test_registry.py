"""Models by name, and their check."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict
from tests.probes import weights_of
from torch import nn

from rl8x import DQNConfig, NullTracker, Policy, PPOConfig, Trainer
from rl8x.envs import CartPole
from rl8x.models import BUILTIN, MLPModel, Model, make_model

OBS = Box(-1.0, 1.0, (5,), np.float32)
IMAGE = Box(0, 255, (6, 7, 3), np.uint8)
SMALL = {
    "mlp": {"hidden_sizes": (8,)},
    "lstm": {"hidden_size": 8},
    "gru": {"hidden_size": 8},
    "cnn": {"hidden_sizes": (8,), "convolutions": [(4, 3, 1)]},
    "attention": {"window": 4, "width": 8, "num_heads": 2},
}


def test_what_is_built_from_an_instance_has_its_weights_in_memory_of_its_own():
    model = MLPModel(CartPole(1).single_observation_space, 2, hidden_sizes=[4])
    for weights in model.parameters():
        weights.data.fill_(0.125)
    config = PPOConfig(num_envs=4, horizon=4, model=model, seed=0, device="cpu")
    first, second = config.build(CartPole), config.build(CartPole)
    untouched = DQNConfig(num_envs=4, model=model, seed=0, device="cpu").build(CartPole)
    first.collect()
    first.step()
    for trained, *kept in zip(*(each.policy.model.parameters() for each in (first, second, untouched)), strict=True):
        assert (trained != 0.125).any()
        assert all((weights == 0.125).all() for weights in kept)
    assert all((weights == 0.125).all() for weights in model.parameters())
    Trainer(second, tracker=NullTracker(), eval_env=False).step()
    for one, other in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(one, other)


def make(name):
    space = IMAGE if name == "cnn" else OBS
    model = make_model(name, space, 2, SMALL[name])
    obs = torch.randint(256, (3, 4, *IMAGE.shape), dtype=torch.uint8) if name == "cnn" else torch.randn(3, 4, 5)
    return model, obs, model.initial_state(4), torch.zeros(3, 4, dtype=torch.bool)


@pytest.mark.parametrize("name", BUILTIN)
def test_every_model_keeps_the_contract(name):
    model, obs, state, starts = make(name)
    assert type(model).__name__.lower() == f"{name}model"
    features, values, last = model(obs, state, starts)
    assert features.shape == (3, 4, 2)
    assert values.shape == (3, 4)
    assert {key: value.shape for key, value in last.items()} == {key: value.shape for key, value in state.items()}
    assert bool(state) is model.recurrent
    assert not any(part.any() for part in state.values())
    torch.testing.assert_close(model.values(obs, state, starts), values)
    copy = make_model(name, model.observation_space, 2, SMALL[name])
    copy.load_state_dict(model.state_dict())
    assert torch.equal(copy(obs, state, starts)[0], features)


@pytest.mark.parametrize("name", BUILTIN)
def test_nothing_depends_on_values_that_the_host_would_have_to_see(name):
    model, obs, state, starts = make(name)
    state = {key: value.to("meta") for key, value in state.items()}
    features, values, _ = model.to("meta")(obs.to("meta"), state, starts.to("meta"))
    assert features.shape == (3, 4, 2)
    assert model.values(obs.to("meta"), state, starts.to("meta")).shape == values.shape == (3, 4)


@pytest.mark.parametrize("name", BUILTIN)
def test_the_last_layer_of_every_model_has_the_gain_that_is_asked_for(name):
    """By default 0.01, as Tianshou and CleanRL have it: a policy begins near uniform."""
    space = IMAGE if name == "cnn" else OBS

    def features(**options):
        torch.manual_seed(0)
        model = make_model(name, space, 3, SMALL[name] | options)
        obs = torch.rand(1, 7, *space.shape) if name != "cnn" else torch.randint(0, 256, (1, 7, *space.shape)).byte()
        with torch.no_grad():
            return model(obs, model.initial_state(7), torch.ones(1, 7, dtype=torch.bool))[0]

    small, large = features(policy_gain=0.02), features(policy_gain=2.0)
    assert large.abs().max() > 0.1
    torch.testing.assert_close(100.0 * small, large, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features(), 0.5 * small, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BUILTIN)
def test_actor_and_critic_share_nothing_unless_they_are_to(name):
    for shared in (False, True):
        space = IMAGE if name == "cnn" else OBS
        model = make_model(name, space, 2, SMALL[name] | {"shared": shared})
        _, obs, *_ = make(name)
        features, values, _ = model(obs, model.initial_state(4), torch.zeros(3, 4, dtype=torch.bool))
        options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        gradients = [torch.autograd.grad(each.sum(), [*model.parameters()], **options) for each in (features, values)]
        both = [bool(((one != 0) & (other != 0)).any()) for one, other in zip(*gradients, strict=True)]
        assert any(both) == shared
        assert all(bool(one.any() or other.any()) for one, other in zip(*gradients, strict=True))


class Net(Model):
    def __init__(self, observation_space, num_features):
        super().__init__(observation_space, num_features)
        self.hidden, self.policy, self.value = nn.Linear(4, 8), nn.Linear(8, num_features), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, obs, state, starts):
        hidden = self.hidden(obs)
        hidden = nn.functional.dropout(self.norm(hidden.flatten(0, 1)), 0.1, self.training).view_as(hidden)
        return self.policy(hidden), self.value(hidden).squeeze(-1), state


def giving(change, base=Net, **attributes):
    """A model that gives something else than another."""
    return type("Mine", (base,), {"forward": lambda self, *given: change(*base.forward(self, *given)), **attributes})


class OneObservationAtATime(Net):
    def forward(self, obs, state, starts):
        if obs.dim() != 2:
            raise RuntimeError("one row a copy")
        return super().forward(obs, state, starts)


class Counts(Net):
    recurrent = True

    def initial_state(self, num_envs):
        return {"seen": torch.zeros(num_envs)}

    def forward(self, obs, state, starts):
        features, values, _ = super().forward(obs, {}, starts)
        return features, values, {"seen": state["seen"] + len(obs)}


CONFIG = {"num_envs": 4, "device": "cpu", "seed": 0}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (giving(lambda features, values, state: (features, values)), r"forward must return .* got 2 values\."),
        (
            giving(lambda features, values, state: (features, values.unsqueeze(-1), state)),
            r"Mine\.forward must return values \[T, B\], here \[1, 2\]; got \[1, 2, 1\].",
        ),
        (
            giving(lambda features, values, state: (torch.cat([features, features[..., :1]], -1), values, state)),
            r"must return features \[T, B, num_features\], here \[1, 2, 2\]; got \[1, 2, 3\].",
        ),
        (OneObservationAtATime, r"raised RuntimeError: one row a copy.*\[T, B, \*obs\], here obs \[1, 2, 4\]"),
        (giving(lambda *results: results, Counts, recurrent=False), r"write `recurrent = True` in the class Mine\."),
        (
            giving(lambda features, values, state: (features, values, {}), Counts),
            r"a state like the one before, here {'seen': \[2\]}; got {}.",
        ),
    ],
)
def test_a_model_that_gives_something_else_is_refused_before_training(model, says):
    with pytest.raises(ValueError, match=says):
        PPOConfig(model=model, **CONFIG).build(CartPole)
    if not model.recurrent:  # DQN takes none that is
        with pytest.raises(ValueError, match=says):
            DQNConfig(model=model, **CONFIG).build(CartPole)


FIRST = 2**33 + 3  # of such numbers float32 would leave no digit


class Floors(CartPole):
    """Shows one of seven whole numbers beside an action mask."""

    single_observation_space = Dict(floor=Box(FIRST, FIRST + 6, (1,), np.int64), action_mask=Box(0, 1, (2,), np.int8))

    def observe(self, state, parameters):
        floor = state["physics"][:, :1].long().clamp(0, 6) + FIRST
        return {"floor": floor, "action_mask": torch.ones(len(floor), 2, dtype=torch.int8)}


class PerFloor(Model):
    def __init__(self, observation_space, num_features):
        super().__init__(observation_space, num_features)
        self.table = nn.Embedding(7, num_features + 1)

    def forward(self, obs, state, starts):
        rows = self.table(obs["floor"][..., 0] - FIRST)
        return rows[..., 1:], rows[..., 0], state


def test_what_it_is_tried_on_and_learns_from_are_observations_of_the_space():
    algorithm = PPOConfig(model=PerFloor, **CONFIG, num_sgd_iters=1).build(Floors)
    algorithm.collect()
    assert algorithm.step()["monitors/kl_div"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.filterwarnings("ignore:Net gives other outputs in training mode")
def test_trying_a_model_leaves_no_trace():
    torch.manual_seed(3)
    algorithm, again = PPOConfig(model=Net, **CONFIG).build(CartPole), torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(again, torch.get_rng_state())
    assert torch.equal(algorithm.policy.model.norm.running_mean, torch.zeros(8))


class Lazy(Model):
    """Layers that learn their widths from what they first read."""

    def __init__(self, observation_space, num_features):
        super().__init__(observation_space, num_features)
        self.hidden, self.heads = nn.LazyLinear(8), nn.LazyLinear(num_features + 1)

    def forward(self, obs, state, starts):
        outputs = self.heads(self.hidden(obs).relu())
        return outputs[..., 1:], outputs[..., 0], state


@pytest.mark.parametrize("config", [PPOConfig, DQNConfig])
def test_weights_that_are_made_late_follow_the_seed(config, tmp_path):
    drawn = {}
    for seed, before in ((0, 3), (0, 4), (1, 3)):
        torch.manual_seed(before)
        drawn[seed, before] = config(model=Lazy, **{**CONFIG, "seed": seed}).build(CartPole)
    assert torch.equal(weights_of(drawn[0, 3]), weights_of(drawn[0, 4]))
    assert not torch.equal(weights_of(drawn[0, 3]), weights_of(drawn[1, 3]))
    path = drawn[0, 3].policy.save(tmp_path / "policy")
    assert all(map(torch.equal, drawn[0, 3].policy.parameters(), Policy.load(path).parameters()))

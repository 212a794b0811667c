from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from rl8x import NullTracker, PPOConfig, Trainer
from rl8x.algorithms import DQNConfig
from rl8x.envs import CartPole
from rl8x.models import BUILTIN, GRUModel, LSTMModel, MLPModel, Model, make_model

OBS = Box(-1.0, 1.0, (5,), np.float32)
IMAGE = Box(0, 255, (6, 7, 3), np.uint8)
SMALL = {
    "mlp": {"hidden_sizes": (8,)},
    "lstm": {"hidden_size": 8},
    "gru": {"hidden_size": 8},
    "cnn": {"hidden_sizes": (8,), "convolutions": [(4, 3, 1)]},
    "attention": {"window": 4, "width": 8, "num_heads": 2},
}


class Mine(Model):
    def __init__(self, observation_space, num_features, width=3):
        super().__init__(observation_space, num_features)
        self.width = width


def test_names_classes_and_instances():
    assert type(make_model("mlp", OBS, 2)) is MLPModel
    assert type(make_model("lstm", OBS, 2)) is LSTMModel
    gru = make_model("gru", OBS, 2, {"hidden_size": 7})
    assert isinstance(gru, GRUModel)
    assert gru.hidden_size == 7
    mine = make_model(Mine, OBS, 2, {"width": 9})
    assert isinstance(mine, Mine)
    assert mine.width == 9
    copied = make_model(mine, OBS, 2)
    assert isinstance(copied, Mine)
    assert copied.width == 9


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


def test_an_instance_that_cannot_be_copied_is_refused_in_one_line():
    mine = Mine(OBS, 2)
    mine.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"a copy of the Mine given, .*lock.*: give the class, and its arguments"):
        make_model(mine, OBS, 2)


def test_the_users_config_stays_as_it_is():
    config = {"hidden_sizes": [8]}
    make_model("mlp", OBS, 2, config)
    assert config == {"hidden_sizes": [8]}


@pytest.mark.parametrize(
    ("spec", "config", "error", "says"),
    [
        ("lsmt", None, ValueError, "Did you mean 'lstm'.*mlp, lstm, gru, cnn, attention"),
        ("LSTM", None, ValueError, "Did you mean 'lstm'"),
        ("mlp", {"hidden_size": 3}, ValueError, "'hidden_size' of MLPModel.*Did you mean 'hidden_sizes'"),
        ("lstm", {"hidden_sizes": 3}, ValueError, "Did you mean 'hidden_size'"),
        (Mine, {"depth": 3}, ValueError, "width"),
        (Mine(OBS, 2), {"width": 3}, ValueError, "not an instance of Mine"),
        (Mine(OBS, 3), None, ValueError, "num_features=3.*needs 2"),
        (torch.nn.Linear, None, TypeError, "subclass of Model"),
        (5, None, TypeError, "subclass of Model"),
    ],
)
def test_what_is_wrong_is_said(spec, config, error, says):
    with pytest.raises(error, match=says):
        make_model(spec, OBS, 2, config)


def make(name):
    space = IMAGE if name == "cnn" else OBS
    model = make_model(name, space, 2, SMALL[name])
    obs = torch.randint(256, (3, 4, *IMAGE.shape), dtype=torch.uint8) if name == "cnn" else torch.randn(3, 4, 5)
    return model, obs, model.initial_state(4), torch.zeros(3, 4, dtype=torch.bool)


@pytest.mark.parametrize("name", BUILTIN)
def test_every_model_keeps_the_contract(name):
    model, obs, state, starts = make(name)
    features, values, last = model(obs, state, starts)
    assert features.shape == (3, 4, 2)
    assert values.shape == (3, 4)
    assert {key: value.shape for key, value in last.items()} == {key: value.shape for key, value in state.items()}
    assert bool(state) is model.recurrent
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
def test_every_model_traces_as_one_graph(name):
    model, obs, state, starts = make(name)
    torch.compiler.reset()
    traced = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(traced(obs, state, starts)[0], model(obs, state, starts)[0])


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

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl8x import PPOConfig
from rl8x.algorithms import DQNConfig
from rl8x.envs import CartPole
from rl8x.models import Model


class Net(Model):
    def __init__(self, observation_space, num_features):
        super().__init__(observation_space, num_features)
        self.hidden, self.policy, self.value = nn.Linear(4, 8), nn.Linear(8, num_features), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, obs, state, starts):
        hidden = self.hidden(obs)
        hidden = nn.functional.dropout(self.norm(hidden.flatten(0, 1)), 0.1).view_as(hidden)
        return self.policy(hidden), self.value(hidden).squeeze(-1), state


class TwoValues(Net):
    def forward(self, obs, state, starts):
        return super().forward(obs, state, starts)[:2]


class ValuesWithAnAxis(Net):
    def forward(self, obs, state, starts):
        features, values, state = super().forward(obs, state, starts)
        return features, values.unsqueeze(-1), state


class OneActionMore(Net):
    def forward(self, obs, state, starts):
        features, values, state = super().forward(obs, state, starts)
        return torch.cat([features, features[..., :1]], -1), values, state


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


class FeedforwardWithAState(Counts):
    recurrent = False


class LosesItsState(Counts):
    def forward(self, obs, state, starts):
        return (*super().forward(obs, state, starts)[:2], {})


CONFIG = {"num_envs": 4, "device": "cpu", "seed": 0}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (TwoValues, r"TwoValues.forward must return features, values and the state after; got 2 values."),
        (ValuesWithAnAxis, r"must return values \[T, B\], here \[1, 2\]; got \[1, 2, 1\]."),
        (OneActionMore, r"must return features \[T, B, num_features\], here \[1, 2, 2\]; got \[1, 2, 3\]."),
        (OneObservationAtATime, r"raised RuntimeError: one row a copy.*\[T, B, \*obs\], here \[1, 2, 4\]"),
        (FeedforwardWithAState, r"write `recurrent = True` in the class FeedforwardWithAState."),
    ],
)
def test_a_model_that_gives_something_else_is_refused_before_training(model, says):
    for config in (PPOConfig, DQNConfig):
        with pytest.raises(ValueError, match=says):
            config(model=model, **CONFIG).build(CartPole)


def test_a_state_that_gets_lost_is_refused():
    PPOConfig(model=Counts, **CONFIG).build(CartPole)
    with pytest.raises(ValueError, match=r"a state like the one before, {'seen': \[2\]}; got {}."):
        PPOConfig(model=LosesItsState, **CONFIG).build(CartPole)


def test_trying_a_model_leaves_no_trace():
    torch.manual_seed(3)
    algorithm, again = PPOConfig(model=Net, **CONFIG).build(CartPole), torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(again, torch.get_rng_state())
    assert torch.equal(algorithm.policy.model.norm.running_mean, torch.zeros(8))

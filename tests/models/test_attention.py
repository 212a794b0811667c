from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from rl8x.models import AttentionModel

OBS = Box(-1.0, 1.0, (5,), np.float32)
STEPS, BATCH, WINDOW = 11, 4, 4
SHARED = pytest.mark.parametrize("shared", [False, True])


def sequence() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(STEPS, BATCH, 5, generator=generator), torch.rand(STEPS, BATCH, generator=generator) < 0.25


def make(**options) -> AttentionModel:
    torch.manual_seed(0)
    return AttentionModel(OBS, 3, window=WINDOW, width=8, num_heads=2, num_layers=2, policy_gain=1.0, **options)


def state_in_the_middle(model: AttentionModel) -> dict[str, torch.Tensor]:
    obs = torch.randn(2, BATCH, 5, generator=torch.Generator().manual_seed(9))
    return model(obs, model.initial_state(BATCH), torch.zeros(2, BATCH, dtype=torch.bool))[2]


@SHARED
def test_a_sequence_gives_what_its_steps_give_one_by_one(shared):
    model = make(shared=shared)
    obs, starts = sequence()
    state = state_in_the_middle(model)
    features, values, last = model(obs, state, starts)
    for t in range(STEPS):
        step_features, step_values, state = model(obs[t : t + 1], state, starts[t : t + 1])
        assert torch.allclose(step_features[0], features[t], atol=1e-5)
        assert torch.allclose(step_values[0], values[t], atol=1e-5)
    assert all(torch.equal(last[name], state[name]) for name in state)
    assert torch.allclose(model.values(obs, state_in_the_middle(model), starts), values, atol=1e-6)


def test_each_step_sees_its_window_of_its_episode_and_nothing_else():
    model = make()
    obs, starts = sequence()
    features, _, _ = model(obs, model.initial_state(BATCH), starts)
    for b in range(BATCH):
        begin = 0
        for t in range(STEPS):
            begin = t if starts[t, b] else begin
            # The same observations as an episode of their own, without anything before.
            seen = obs[max(begin, t - WINDOW + 1) : t + 1, b : b + 1]
            alone, _, _ = model(seen, model.initial_state(1), torch.zeros(len(seen), 1, dtype=torch.bool))
            assert torch.allclose(features[t, b], alone[-1, 0], atol=1e-5)


def test_the_state_holds_the_last_observations_and_counts_those_of_the_episode():
    model = make()
    obs, starts = sequence()
    starts[:] = False
    starts[STEPS - 2, 1] = True
    _, _, state = model(obs, model.initial_state(BATCH), starts)
    assert torch.equal(state["history"], obs[-3:].transpose(0, 1))
    assert state["length"].tolist() == [3.0, 2.0, 3.0, 3.0]
    _, _, state = model(obs[:1], model.initial_state(BATCH), starts[:1])
    assert state["length"].tolist() == [1.0] * 4


def test_the_order_of_the_window_matters():
    model = make()
    obs, starts = sequence()
    starts[:] = False
    swapped = obs.clone()
    swapped[[STEPS - 2, STEPS - 3]] = obs[[STEPS - 3, STEPS - 2]]
    state = model.initial_state(BATCH)
    assert not torch.allclose(model(obs, state, starts)[0][-1], model(swapped, state, starts)[0][-1], atol=1e-4)


def test_actor_and_critic_share_nothing_by_default():
    model = make()
    obs, starts = sequence()
    features, values, _ = model(obs, model.initial_state(BATCH), starts)
    features.sum().backward(retain_graph=True)
    assert all(weights.grad is None for weights in model.critic.parameters())
    values.sum().backward()
    assert all(weights.grad is not None for weights in model.parameters())

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from torch import nn

from rl8x.models import AttentionModel, GRUModel, LSTMModel, RecurrentModel

OBS = Box(-1.0, 1.0, (5,), np.float32)
STEPS, BATCH, UNITS, WINDOW = 9, 4, 6, 4
BOTH = pytest.mark.parametrize("model_class", [LSTMModel, GRUModel])
SHARED = pytest.mark.parametrize("shared", [False, True])


def sequence(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(STEPS, BATCH, 5, generator=generator), torch.rand(STEPS, BATCH, generator=generator) < 0.3


def random_state(model: RecurrentModel) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(value) for name, value in model.initial_state(BATCH).items()}


def make(model_class: type[RecurrentModel], **options) -> RecurrentModel:
    torch.manual_seed(0)
    model = model_class(OBS, 3, hidden_size=UNITS, policy_gain=1.0, **options)
    with torch.no_grad():
        for weights in model.parameters():  # biases that are not 0, so that a lost one shows
            weights.add_(0.1 * torch.randn_like(weights))
    return model


def attention(**options) -> AttentionModel:
    torch.manual_seed(0)
    return AttentionModel(OBS, 3, window=WINDOW, width=8, num_heads=2, num_layers=2, policy_gain=1.0, **options)


@pytest.mark.parametrize("model_class", [LSTMModel, GRUModel, AttentionModel])
@SHARED
@pytest.mark.parametrize("options", [{}, {"encoder_sizes": (8, 7)}], ids=str)
def test_a_sequence_gives_what_its_steps_give_one_by_one(model_class, shared, options):
    model = attention(shared=shared) if model_class is AttentionModel else make(model_class, shared=shared, **options)
    obs, starts = sequence()
    # A state in the middle of episodes.
    before = model(sequence(9)[0][:2], model.initial_state(BATCH), torch.zeros(2, BATCH, dtype=torch.bool))[2]
    features, values, last = model(obs, before, starts)
    assert features.shape == (STEPS, BATCH, 3)
    assert values.shape == (STEPS, BATCH)
    state, kept = before, {name: value.clone() for name, value in before.items()}
    for t in range(STEPS):
        step_features, step_values, state = model(obs[t : t + 1], state, starts[t : t + 1])
        assert torch.allclose(step_features[0], features[t], atol=1e-5)
        assert torch.allclose(step_values[0], values[t], atol=1e-5)
    assert list(last) == list(state)
    assert all(torch.allclose(last[name], state[name], atol=1e-6) for name in state)
    assert all(torch.equal(before[name], value) for name, value in kept.items())  # it is left alone
    assert torch.allclose(model.values(obs, before, starts), values, atol=1e-6)


@BOTH
@SHARED
def test_nothing_from_before_a_start_reaches_what_comes_after(model_class, shared):
    model = make(model_class, shared=shared)
    obs, _ = sequence()
    starts = torch.zeros(STEPS, BATCH, dtype=torch.bool)
    starts[4, 1] = True
    state = random_state(model)
    for value in state.values():
        value[1] = torch.nan  # not even what is not finite
    features, values, _ = model(obs, state, starts)
    fresh, fresh_values, _ = model(obs[4:], model.initial_state(BATCH), starts[4:])
    assert torch.allclose(features[4:, 1], fresh[:, 1], atol=1e-6)
    assert torch.allclose(values[4:, 1], fresh_values[:, 1], atol=1e-6)
    assert not torch.allclose(features[4:, 0], fresh[:, 0], atol=1e-3)


def with_weights_of(model: RecurrentModel, trunk: int, cell: nn.RNNBase) -> nn.RNNBase:
    """Copy one trunk's weights into a module of torch, which has the gates in the same order."""
    with torch.no_grad():
        cell.weight_ih_l0.copy_(model.inputs.weight[trunk].T)
        cell.weight_hh_l0.copy_(model.recurrence[trunk].T)
        cell.bias_ih_l0.copy_(model.inputs.bias[trunk, 0])
        cell.bias_hh_l0.zero_()
        if isinstance(model, GRUModel):
            cell.bias_hh_l0[-UNITS:] = model.candidate_bias[trunk, 0]
    return cell


@BOTH
def test_a_cell_agrees_with_torchs(model_class):
    model = make(model_class)
    obs, _ = sequence()
    state = random_state(model)
    starts = torch.zeros(STEPS, BATCH, dtype=torch.bool)
    hidden, last = model._run(obs, state, starts, slice(None))
    with torch.autocast("cpu", torch.bfloat16):  # the state keeps its digits where products lose theirs
        rounded = model(obs, state, starts)[2]
    assert all(value.dtype == torch.float32 for value in rounded.values())
    for trunk, name in enumerate(("actor", "critic")):
        cell = with_weights_of(model, trunk, (nn.LSTM if model_class is LSTMModel else nn.GRU)(5, UNITS))
        before = [state[f"{name}_{part}"][None] for part in model.state_names]
        outputs, after = cell(obs, tuple(before) if len(before) > 1 else before[0])
        assert torch.allclose(hidden[trunk], outputs, atol=1e-6)
        for part, tensor in zip(model.state_names, after if len(before) > 1 else [after], strict=True):
            assert torch.allclose(last[f"{name}_{part}"], tensor[0], atol=1e-6)


@BOTH
def test_every_gate_begins_orthogonal_and_an_lstm_remembers(model_class):
    model = model_class(OBS, 3, hidden_size=UNITS)
    for trunk in range(2):
        for gate in model.recurrence[trunk].T.chunk(model.num_gates):
            assert torch.allclose(gate @ gate.T, torch.eye(UNITS), atol=1e-5)
    bias = model.inputs.bias.reshape(2, model.num_gates, UNITS)
    expected = torch.zeros_like(bias)
    if model_class is LSTMModel:
        expected[:, 1] = 1.0
    assert torch.equal(bias, expected)


# -- attention


def test_each_step_sees_its_window_of_its_episode_and_nothing_else():
    model = attention()
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
    # The order within a window matters.
    starts[:] = False
    swapped = obs[[*range(STEPS - 3), STEPS - 2, STEPS - 3, STEPS - 1]]
    last, other = (model(each, model.initial_state(BATCH), starts)[0][-1] for each in (obs, swapped))
    assert not torch.allclose(last, other, atol=1e-4)

"""Returns, running moments and projected distributions against their definitions."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.by_hand import projected
from torch import Tensor

from rl8x.functional import (
    ObsMoments,
    RunningMoments,
    expectation,
    explained_variance,
    generalized_advantages,
    project,
    running_returns,
)

# One column of an episode step: reward, value, final value, terminated, truncated.
numbers = st.floats(-10, 10, width=32)
steps = st.tuples(numbers, numbers, numbers, st.booleans(), st.booleans())


def oracle(rewards, values, finals, terminated, truncated, gamma, gae_lambda):
    """The definition, in O(T^2): A_t = sum over k of (gamma lambda)^k delta_{t+k}, up to the episode's last step."""
    horizon = len(rewards)
    advantages = []
    for t in range(horizon):
        total, weight = 0.0, 1.0
        for k in range(t, horizon):
            following = 0.0 if terminated[k] else finals[k] if truncated[k] else values[k + 1]
            total += weight * (rewards[k] + gamma * following - values[k])
            if terminated[k] or truncated[k]:
                break
            weight *= gamma * gae_lambda
        advantages.append(total)
    return advantages


def column(numbers_: list[float], dtype=torch.float64) -> Tensor:
    return torch.tensor(numbers_, dtype=dtype).unsqueeze(1)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(steps, min_size=1, max_size=12), last=numbers, gamma=st.floats(0, 1), gae_lambda=st.floats(0, 1))
def test_equals_the_definition(rows, last, gamma, gae_lambda):
    rewards, values, finals, terminated, truncated = map(list, zip(*rows, strict=True))
    values.append(last)
    unread = [end or not cut for end, cut in zip(terminated, truncated, strict=True)]
    finals = [math.nan if never else final for never, final in zip(unread, finals, strict=True)]
    expected = oracle(rewards, values, finals, terminated, truncated, gamma, gae_lambda)
    inputs = [column(numbers) for numbers in (rewards, values, finals)]
    inputs += [column(flags, torch.bool) for flags in (terminated, truncated)]
    before = [tensor.clone() for tensor in inputs]
    advantages, returns = generalized_advantages(*inputs, gamma=gamma, gae_lambda=gae_lambda)
    assert advantages.squeeze(1).tolist() == pytest.approx(expected, abs=1e-9)
    assert returns.squeeze(1).tolist() == pytest.approx(
        [a + v for a, v in zip(expected, values, strict=False)], abs=1e-9
    )
    for tensor, old in zip(inputs, before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


def test_copies_do_not_mix_and_gradients_stop():
    values = torch.rand(5, 3, requires_grad=True)
    no = torch.zeros(4, 3, dtype=torch.bool)
    inputs = (torch.rand(4, 3), values, torch.rand(4, 3), torch.rand(4, 3) < 0.3, no)
    together, _ = generalized_advantages(*inputs, gamma=0.9, gae_lambda=0.8)
    alone, _ = generalized_advantages(*(tensor[:, 1:2] for tensor in inputs), gamma=0.9, gae_lambda=0.8)
    assert torch.equal(together[:, 1:2], alone)
    assert not together.requires_grad


def returns_oracle(rewards, cuts, gamma):
    """R_t = sum of gamma^(t-k) r_k over the episode's steps k up to t, in O(T^2)."""
    returns = []
    for t in range(len(rewards)):
        total, weight = 0.0, 1.0
        for k in range(t, -1, -1):
            if k < t and cuts[k]:
                break
            total += weight * rewards[k]
            weight *= gamma
        returns.append(total)
    return returns


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=14),
    gamma=st.floats(0, 1),
    split=st.integers(1, 13),
)
def test_running_returns_equal_the_definition_however_it_is_split_into_rollouts(rows, gamma, split):
    rewards = torch.tensor([[reward] for reward, _ in rows], dtype=torch.float64)
    cuts = torch.tensor([[cut] for _, cut in rows])
    before = rewards.clone(), cuts.clone()
    carry = torch.zeros(1, dtype=torch.float64)
    pieces = []
    for begin in range(0, len(rows), split):
        piece, carry = running_returns(rewards[begin : begin + split], cuts[begin : begin + split], carry, gamma)
        pieces.append(piece)
    expected = returns_oracle([reward for reward, _ in rows], [cut for _, cut in rows], gamma)
    assert torch.cat(pieces).squeeze(1).tolist() == pytest.approx(expected, abs=1e-9)
    assert torch.equal(rewards, before[0])
    assert torch.equal(cuts, before[1])


# -- running moments


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    offset=st.sampled_from([0.0, 1.0, -1e4, 1e6]),
    masked=st.booleans(),
)
def test_any_split_gives_numpys_moments(seed, sizes, offset, masked):
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(size, 2, 3, generator=generator, dtype=torch.float64) + offset for size in sizes]
    masks = [torch.rand(size, generator=generator) < 0.5 for size in sizes]
    running = RunningMoments((2, 3))
    for batch, mask in zip(batches, masks, strict=True):
        spoilt = torch.where(mask.view(-1, 1, 1), batch, torch.nan) if masked else batch
        axes = (1, len(batch))  # any number of them
        running.update(spoilt.view(*axes, 2, 3), mask.view(axes) if masked else None)
    rows = torch.cat([batch[mask] if masked else batch for batch, mask in zip(batches, masks, strict=True)]).numpy()
    assert running.count == len(rows)
    if len(rows):
        assert running.mean.numpy() == pytest.approx(rows.mean(0), rel=1e-12, abs=1e-9)
        assert running.var.numpy() == pytest.approx(rows.var(0), rel=1e-8, abs=1e-9)
    else:
        assert running.mean.eq(0).all()
        assert running.var.eq(1).all()


def test_float32_rows_with_a_large_offset_keep_their_digits():
    rows = torch.randint(0, 9, (5000,), generator=torch.Generator().manual_seed(1)).float() + 1e7
    running = RunningMoments()
    for batch in rows.split(700):
        running.update(batch)
    assert float(running.mean) == pytest.approx(rows.double().mean().item(), rel=1e-12)
    assert float(running.var) == pytest.approx(rows.double().var(correction=0).item(), rel=1e-6)


def test_normalising_by_hand():
    running = RunningMoments(epsilon=0.0)
    running.update(torch.tensor([1.0, 3.0]))  # mean 2, variance 1
    assert running.normalize(torch.tensor([2.0, 4.0, -8.0])).tolist() == [0.0, 2.0, -10.0]
    assert running.normalize(torch.tensor([2.0, 4.0, -8.0]), 1.5).tolist() == [0.0, 1.5, -1.5]
    assert running.normalize(torch.tensor([2.0, 4.0]), center=False).tolist() == [2.0, 4.0]
    assert running.denormalize(torch.tensor([0.0, 2.0])).tolist() == [2.0, 4.0]
    assert running.normalize(torch.tensor([2.0])).dtype == torch.float32
    values = torch.tensor([1.0, -2.0])
    assert torch.allclose(RunningMoments().normalize(values), values)  # before the first row
    constant = RunningMoments((1,))
    constant.update(torch.full((4, 1), 7.0))
    assert constant.normalize(torch.full((2, 1), 7.0)).eq(0).all()


def test_updates_are_in_place_and_the_state_survives_in_float64():
    running, batch = RunningMoments((2,)), torch.rand(9, 2)
    pointers, before = [buffer.data_ptr() for buffer in running.buffers()], batch.clone()
    running.update(batch)
    running.update(batch, torch.ones(9, dtype=torch.bool))
    saved = copy.deepcopy(running.state_dict())
    running.update(torch.empty(0, 2))
    assert [buffer.data_ptr() for buffer in running.buffers()] == pointers
    assert torch.equal(batch, before)
    assert torch.equal(copy.deepcopy(running).to(torch.bfloat16).mean, running.mean)
    again = RunningMoments((2,))
    again.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(again.buffers(), running.buffers(), strict=True))
    assert {buffer.dtype for buffer in again.buffers()} == {torch.float64}


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_compiled_update_counts_too(shape):
    # torch.compile 2.13 drops writes into 0-d float64 tensors on the CPU
    compiled, eager = RunningMoments(shape), RunningMoments(shape)
    batch, mask = torch.rand(6, *shape), torch.tensor([True, False, True, True, True, False])
    update = torch.compile(compiled.update, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        update(batch, mask)
        eager.update(batch, mask)
    assert compiled.count == eager.count == 8
    assert torch.equal(compiled.mean, eager.mean)
    assert torch.equal(compiled.var, eager.var)


def test_ranks_exchange_the_moments_of_parts_in_one_order(monkeypatch):
    sent = []
    monkeypatch.setattr("rl8x.functional._of_all_ranks", lambda own: sent.append(own.mean) or [own])
    box, rows = spaces.Box(-1.0, 1.0, (2,)), {name: torch.rand(9, 2) for name in ("/b", "/a/x", "/a/c")}
    of_parts = ObsMoments(spaces.Dict({"b": box, "a": spaces.Dict({"x": box, "c": box})}))
    for parts in (rows, dict(reversed(rows.items()))):
        of_parts.observe(parts, None)
    assert len(sent) == 6
    assert all(torch.equal(one, other) for one, other in zip(sent[:3], sent[3:], strict=True))


def test_explained_variance_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])  # variance 1.25
    assert float(explained_variance(returns, returns)) == 1.0
    assert float(explained_variance(torch.full((4,), 7.0), returns)) == 0.0
    assert float(explained_variance(-returns, returns)) == pytest.approx(-3.0)  # errors 2 * returns: 1 - 4
    # a constant offset is not variance
    assert float(explained_variance(returns + 5, returns)) == pytest.approx(1.0)
    assert float(explained_variance(returns, torch.ones(4))) == 0.0
    values = torch.tensor([0.5, -0.3, 0.0, 0.25])
    rounded = (1.0 - values) + values  # as the sum of advantages and values is
    assert float(explained_variance(values, rounded)) == 0.0 != rounded.var()
    # a spread of a millionth is one
    assert float(explained_variance(torch.zeros(4), 1 + 1e-6 * returns)) == pytest.approx(0.0, abs=1e-6)
    assert float(explained_variance(1 + 1e-6 * returns, 1 + 1e-6 * returns)) == 1.0
    # kept: errors 0, 0, 1 with variance 2/9; returns 1, 2, 4 with variance 14/9
    values, mask = torch.tensor([[1.0, 2.0], [3.0, math.nan]]), torch.tensor([[True, True], [True, False]])
    returns = torch.tensor([[1.0, 2.0], [4.0, 9.0]])
    assert float(explained_variance(values, returns, mask)) == pytest.approx(1 - 2 / 14)
    assert float(explained_variance(values, returns, mask & False)) == 0.0


# -- distributions over atoms


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.floats(-20, 0), st.floats(0.5, 20), st.sampled_from([0.3, 3.0]), st.integers(0, 2**30))
def test_probability_is_shared_by_the_two_atoms_beside_a_value(num_atoms, low, width, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    atoms = torch.linspace(low, low + width, num_atoms, dtype=torch.float64)
    probs, values = torch.randn(2, 4, num_atoms, generator=generator, dtype=torch.float64)
    values = low + width * (0.5 + spread * values)  # with 3.0 most are beyond the first or the last atom
    values[0, 0] = atoms[1]
    expected = projected(probs.softmax(-1), values, atoms)
    torch.testing.assert_close(project(probs.softmax(-1), values, atoms), expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(expected.sum(-1), torch.ones(4, dtype=torch.float64))


def test_the_expectation_is_the_mean():
    logits = torch.tensor([[0.0, 0.0, 0.0], [0.0, -1e9, 0.0], [-1e9, 0.0, 0.0]])
    torch.testing.assert_close(expectation(logits, torch.tensor([-1.0, 0.0, 4.0])), torch.tensor([1.0, 1.5, 2.0]))

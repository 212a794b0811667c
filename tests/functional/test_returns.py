from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl8x.functional import generalized_advantages, running_returns

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
    for tensor, copy in zip(inputs, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


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

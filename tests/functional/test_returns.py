from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.functional.returns import running_returns

numbers = st.floats(-10, 10, width=32)


def oracle(rewards, cuts, gamma):
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
def test_equals_the_definition_however_it_is_split_into_rollouts(rows, gamma, split):
    rewards = torch.tensor([[reward] for reward, _ in rows], dtype=torch.float64)
    cuts = torch.tensor([[cut] for _, cut in rows])
    before = rewards.clone(), cuts.clone()
    carry = torch.zeros(1, dtype=torch.float64)
    pieces = []
    for begin in range(0, len(rows), split):
        piece, carry = running_returns(rewards[begin : begin + split], cuts[begin : begin + split], carry, gamma)
        pieces.append(piece)
    expected = oracle([reward for reward, _ in rows], [cut for _, cut in rows], gamma)
    assert torch.cat(pieces).squeeze(1).tolist() == pytest.approx(expected, abs=1e-9)
    assert torch.equal(rewards, before[0])
    assert torch.equal(cuts, before[1])


def test_by_hand():
    # gamma 0.5, carry 8: R_0 = 1 + 0.5 * 8 = 5, the episode ends; R_1 = 2; R_2 = 3 + 0.5 * 2 = 4; the carry is 4
    rewards = torch.tensor([[1.0], [2.0], [3.0]])
    cuts = torch.tensor([[True], [False], [False]])
    returns, carry = running_returns(rewards, cuts, torch.tensor([8.0]), 0.5)
    assert returns.squeeze(1).tolist() == [5.0, 2.0, 4.0]
    assert carry.tolist() == [4.0]


def test_an_end_in_the_last_row_leaves_nothing_to_carry():
    returns, carry = running_returns(
        torch.ones(2, 2), torch.tensor([[False, False], [True, False]]), torch.zeros(2), 0.5
    )
    assert returns.tolist() == [[1.0, 1.0], [1.5, 1.5]]
    assert carry.tolist() == [0.0, 1.5]


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"`carry` \[3\]; got \[4, 3\] and \[4\]"):
        running_returns(torch.rand(4, 3), torch.zeros(4, 3, dtype=torch.bool), torch.zeros(4), 0.9)

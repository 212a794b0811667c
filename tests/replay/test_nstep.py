import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.replay.nstep import NStep


def expected_rows(stream, n, gamma):
    """Make the rows of one copy by a plain loop.

    `stream` has (step number, reward, terminated, truncated, valid, whether a gap follows), in order.
    """
    rows = []
    for t, (number, *_, valid, _) in enumerate(stream):
        if not valid:
            continue
        total, discount, last = 0.0, 1.0, number
        for j in range(n):
            if t + j == len(stream):
                rows.append(None)  # not complete yet
                break
            number_j, reward, terminated, truncated, valid_j, gap = stream[t + j]
            if not valid_j:
                rows.append((number, total, discount, last))
                break
            total += discount * reward
            discount *= gamma
            last = number_j
            if terminated:
                discount = 0.0
            if terminated or truncated or gap or j == n - 1:
                rows.append((number, total, discount, last))
                break
    return rows


@st.composite
def experiences(draw):
    """Draw horizons of random episodes with gaps between some, masked steps after ends where a simulator has them."""
    num_envs, n = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    horizons = draw(st.lists(st.tuples(st.integers(1, 7), st.booleans()), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    masked, ends = draw(st.booleans()), draw(st.sampled_from([0.0, 0.1, 0.5]))
    gamma = draw(st.sampled_from([0.0, 0.9, 0.99, 1.0]))
    blocks, number, over = [], 0, torch.zeros(num_envs, dtype=torch.bool)
    for horizon, cut in horizons:
        shape = horizon, num_envs
        number_of = (torch.arange(horizon * num_envs) + number).view(shape).double()
        number += horizon * num_envs
        block = {
            "obs": number_of.unsqueeze(-1),
            "actions/a": number_of + 0.25,
            "next_obs": number_of.unsqueeze(-1) + 0.5,
            "rewards": torch.randn(shape, generator=generator),
            "terminated": torch.rand(shape, generator=generator) < ends,
            "truncated": torch.rand(shape, generator=generator) < ends,
            "episode_lengths": torch.zeros(shape),
        }
        if masked:
            block["valid"] = torch.ones(shape, dtype=torch.bool)
            for t in range(horizon):
                for each in (block["terminated"], block["truncated"]):
                    each[t] &= ~over
                block["valid"][t] = ~over
                block["rewards"][t] = torch.where(over, math.nan, block["rewards"][t])
                over = block["terminated"][t] | block["truncated"][t]
        if cut:
            over = torch.zeros_like(over)
        blocks.append((block, horizon, cut))
    return blocks, n, gamma


def made_rows(blocks, n, gamma, *, resumed=False):
    made, nstep = [], NStep(n, gamma)
    for block, horizon, cut in blocks:
        # A rollout has a slot more, and is written again in the next horizon.
        rollout = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in block.items()}
        made.append({name: tensor.clone() for name, tensor in nstep.rows(rollout, horizon).items()})
        for tensor in rollout.values():
            tensor.zero_()
        if cut:
            nstep.cut()
        if resumed:
            state = nstep.state_dict()
            nstep = NStep(n, gamma)
            nstep.load_state_dict(state)
    return made


@given(experiences())
@settings(max_examples=80, deadline=None)
def test_rows_are_those_of_a_plain_loop(drawn):
    blocks, n, gamma = drawn
    num_envs = blocks[0][0]["rewards"].shape[1]
    expected = []
    for copy in range(num_envs):
        stream = []
        for block, horizon, cut in blocks:
            for t in range(horizon):
                valid = bool(block["valid"][t, copy]) if "valid" in block else True
                flags = [bool(block[name][t, copy]) for name in ("terminated", "truncated")]
                gap = cut and t == horizon - 1
                stream.append((block["obs"][t, copy, 0].item(), block["rewards"][t, copy].item(), *flags, valid, gap))
        complete = max(0, len(stream) - (n - 1))
        rows = expected_rows(stream, n, gamma)
        valid_before = sum(valid for *_, valid, _ in stream[:complete])
        assert None not in rows[:valid_before]
        expected += rows[:valid_before]
    actual = []
    for rows in made_rows(blocks, n, gamma):
        if rows:
            columns = [rows[name].flatten().double().tolist() for name in ("obs", "returns", "discounts", "next_obs")]
            actual += zip(*columns, strict=True)
            assert torch.equal(rows["actions/a"], rows["obs"][:, 0] + 0.25)
            assert set(rows) == {"obs", "actions/a", "returns", "discounts", "next_obs"}
    assert len(actual) == len(expected)
    for one, other in zip(sorted(actual), sorted(expected), strict=True):
        number, total, discount, last = other
        assert one == pytest.approx((number, total, discount, last + 0.5), rel=1e-6, abs=1e-6)


@given(experiences())
@settings(max_examples=40, deadline=None)
def test_a_resume_between_horizons_changes_no_bit(drawn):
    for rows, others in zip(made_rows(*drawn), made_rows(*drawn, resumed=True), strict=True):
        assert rows.keys() == others.keys()
        assert all(torch.equal(rows[name], others[name]) for name in rows)


def horizon_of(steps, num_envs=2, **flags):
    numbers = torch.arange(steps).unsqueeze(1) + 10.0 * torch.arange(num_envs)
    false = torch.zeros(steps, num_envs, dtype=torch.bool)
    block = {"obs": numbers, "actions": numbers, "next_obs": numbers + 1, "rewards": numbers * 0 + 1}
    return block | {"terminated": false, "truncated": false} | flags


def test_another_n_takes_what_waits():
    nstep = NStep(4, 0.9)
    nstep.rows(horizon_of(4), 4)
    shorter = NStep(1, 0.9)
    shorter.load_state_dict(nstep.state_dict())
    assert len(shorter.rows(horizon_of(1), 1)["obs"]) == 2 * 4
    assert len(shorter.rows(horizon_of(1), 1)["obs"]) == 2


def test_what_waits_goes_where_the_rollout_is():
    """A checkpoint has all on the CPU, wherever the run was; the meta device stands for an accelerator."""
    nstep, resumed = NStep(3, 0.9), NStep(3, 0.9)
    nstep.rows(horizon_of(2), 2)
    resumed.load_state_dict(nstep.state_dict())
    rows = resumed.rows({name: tensor.to("meta") for name, tensor in horizon_of(2).items() if name != "valid"}, 2)
    assert {(len(tensor), tensor.device.type) for tensor in rows.values()} == {(2 * 2, "meta")}

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.combinations.ledger import Horizon, rows_of

from rl8x.replay.nstep import NStep


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


def made_rows(blocks, n, gamma):
    made, nstep = [], NStep(n, gamma)
    for block, horizon, cut in blocks:
        # A rollout has a slot more, and is written again in the next horizon.
        rollout = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in block.items()}
        made.append({name: tensor.clone() for name, tensor in nstep.rows(rollout, horizon).items()})
        for tensor in rollout.values():
            tensor.zero_()
        if cut:
            nstep.cut()
    return made


@given(experiences())
@settings(max_examples=80, deadline=None)
def test_rows_are_those_of_a_plain_loop(drawn):
    blocks, n, gamma = drawn
    follows = [False, *(not cut for *_, cut in blocks)]
    told = [block | {"rewards": block["rewards"].nan_to_num()} for block, *_ in blocks]  # NaN where nothing is valid
    expected = rows_of([Horizon(0, *each, False) for each in zip(told, follows, strict=False)], n, gamma)
    made = [rows for rows in made_rows(blocks, n, gamma) if rows]
    assert sum(len(rows["obs"]) for rows in made) == len(expected["returns"])
    for rows in made:
        assert rows.keys() == expected.keys()
        for name, part in rows.items():
            torch.testing.assert_close(part, expected[name][: len(part)].to(part.dtype), rtol=1e-6, atol=1e-6)
            expected[name] = expected[name][len(part) :]


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

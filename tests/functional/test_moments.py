from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.functional import RunningMoments, explained_variance


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


def test_explained_variance_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])  # variance 1.25
    assert float(explained_variance(returns, returns)) == 1.0
    assert float(explained_variance(torch.full((4,), 7.0), returns)) == 0.0
    assert float(explained_variance(-returns, returns)) == pytest.approx(-3.0)  # errors 2 * returns: 1 - 4
    # a constant offset is not variance
    assert float(explained_variance(returns + 5, returns)) == pytest.approx(1.0)
    assert float(explained_variance(returns, torch.ones(4))) == 0.0
    # kept: errors 0, 0, 1 with variance 2/9; returns 1, 2, 4 with variance 14/9
    values, mask = torch.tensor([[1.0, 2.0], [3.0, math.nan]]), torch.tensor([[True, True], [True, False]])
    returns = torch.tensor([[1.0, 2.0], [4.0, 9.0]])
    assert float(explained_variance(values, returns, mask)) == pytest.approx(1 - 2 / 14)
    assert float(explained_variance(values, returns, mask & False)) == 0.0

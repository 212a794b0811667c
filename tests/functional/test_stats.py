from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.functional.stats import explained_variance, masked_summary, moments, summary

numbers = st.floats(-1e3, 1e3, width=32)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(numbers, st.booleans()), min_size=1, max_size=30))
def test_summaries_equal_numpys(rows):
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    mask = torch.tensor([kept for _, kept in rows])
    array = values.numpy()
    expected = [array.min(), array.max(), array.mean(), array.std()]
    assert [float(figure) for figure in summary(values)] == pytest.approx(expected, abs=1e-9)
    kept = array[mask.numpy()]
    figures = [float(figure) for figure in masked_summary(values, mask)]
    if len(kept):
        assert figures == pytest.approx([kept.min(), kept.max(), kept.mean(), kept.std()], abs=1e-9)
    else:
        assert all(math.isnan(figure) for figure in figures)


def test_what_is_masked_out_has_no_influence():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf])
    mask = torch.tensor([True, False, True, False])
    assert [float(figure) for figure in masked_summary(values, mask)] == [1.0, 3.0, 2.0, 1.0]
    count, mean, var = moments(values, mask)
    assert (float(count), float(mean), float(var)) == (2.0, 2.0, 1.0)


def test_whole_numbers_are_summarised_too():
    lengths = torch.tensor([[1, 2], [3, 6]])
    assert [float(figure) for figure in summary(lengths)[:3]] == [1.0, 6.0, 3.0]
    assert float(summary(lengths)[3]) == pytest.approx(math.sqrt(3.5))  # (4 + 1 + 0 + 9) / 4
    assert [float(figure) for figure in masked_summary(lengths, lengths > 1)[:2]] == [2.0, 6.0]


def test_moments_keep_their_digits_next_to_a_large_offset():
    # float32 sums of squares would lose all of the variance: 1e7 has a spacing of 1
    batch = torch.randint(0, 9, (1000, 3), generator=torch.Generator().manual_seed(0)).float() + 1e7
    _, mean, var = moments(batch)
    array = batch.double().numpy()
    assert mean.numpy() == pytest.approx(array.mean(0), rel=1e-12)
    assert var.numpy() == pytest.approx(array.var(0), rel=1e-6)


def test_explained_variance_by_hand():
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])  # variance 1.25
    assert float(explained_variance(returns, returns)) == 1.0
    assert float(explained_variance(torch.full((4,), 7.0), returns)) == 0.0
    assert float(explained_variance(-returns, returns)) == pytest.approx(-3.0)  # errors 2 * returns: 1 - 4
    # a constant offset is not variance
    assert float(explained_variance(returns + 5, returns)) == pytest.approx(1.0)
    assert float(explained_variance(returns, torch.ones(4))) == 0.0


def test_explained_variance_under_a_mask():
    values = torch.tensor([[1.0, 2.0], [3.0, math.nan]])
    returns = torch.tensor([[1.0, 2.0], [4.0, 9.0]])
    mask = torch.tensor([[True, True], [True, False]])
    # kept: errors 0, 0, 1 with variance 2/9; returns 1, 2, 4 with variance 14/9
    assert float(explained_variance(values, returns, mask)) == pytest.approx(1 - 2 / 14)
    assert np.isclose(float(explained_variance(values, returns, torch.zeros(2, 2, dtype=torch.bool))), 0.0)

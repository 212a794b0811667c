from __future__ import annotations

import dataclasses
import json
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.randomization import KINDS, Choice, Grid, LogUniform, Normal, Uniform, from_dict

LEVELS = torch.tensor([0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])


@pytest.mark.parametrize(
    ("distribution", "levels", "expected"),
    [
        # The draw is the inverse CDF: the value at level q is low + q (high - low).
        (Uniform(2, 6), LEVELS, [2.04, 2.4, 3.0, 4.0, 5.0, 5.6, 5.96]),
        # Over three decades, a third of the probability a decade: level 1/3 is 0.1.
        (LogUniform(0.01, 10), torch.tensor([0.0, 1 / 3, 2 / 3, 1 - 2**-24]), [0.01, 0.1, 1.0, 10.0]),
        (Normal(3, 0.5), LEVELS, [NormalDist(3.0, 0.5).inv_cdf(float(level)) for level in LEVELS]),
        # A third of the probability for each value, and none for those of weight 0.
        (Choice([3, 1, 2]), torch.tensor([0.0, 0.333, 0.334, 0.666, 0.667, 0.999]), [3.0, 3.0, 1.0, 1.0, 2.0, 2.0]),
        (Choice([3, 1, 2, 7], [0, 1, 0, 3]), torch.tensor([0.0, 0.24999, 0.25, 1 - 2**-24]), [1.0, 1.0, 7.0, 7.0]),
        (Grid([1, 2, 3]), LEVELS, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0]),  # whatever the noise
    ],
)
def test_quantiles(distribution, levels, expected):
    torch.testing.assert_close(distribution.draw(levels), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_normal_is_finite_at_the_ends_and_clipped():
    ends = torch.tensor([0.0, 1 - 2**-24])
    values = Normal(0, 1).draw(ends)
    assert values.isfinite().all()
    low, high = Normal(0, 1).support
    assert low < float(values[0]) < -5
    assert 5 < float(values[1]) < high
    assert Normal(0, 1, low=-1, high=2).draw(ends).tolist() == [-1.0, 2.0]
    assert Normal(0, 1, low=-1, high=9).support == (-1.0, 5.5)
    assert Normal(-11, 1, low=-5).support == (-5.0, -5.0)  # all of it is clipped
    assert Normal(0, 1).clipped(-3, 4) == Normal(0, 1, low=-3, high=4)
    assert Normal(0, 1, low=-1).clipped(-3, 4) == Normal(0, 1, low=-1, high=4)


finite = st.floats(-1e3, 1e3, allow_nan=False)
positive = st.floats(1e-3, 1e3)


bounds = st.sampled_from([(None, None), (-5.0, None), (None, 5.0), (-5.0, 5.0)])
values = st.lists(finite, min_size=1, max_size=6)
weighted = st.lists(st.tuples(finite, positive), min_size=1, max_size=6)
distributions = st.one_of(
    st.builds(lambda ends: Uniform(*sorted(ends)), st.tuples(finite, finite)),
    st.builds(lambda ends: LogUniform(*sorted(ends)), st.tuples(positive, positive)),
    st.builds(lambda mean, std, bounds: Normal(mean, std, *bounds), finite, positive, bounds),
    st.builds(Grid, values),
    st.builds(Choice, values),
    st.builds(lambda pairs: Choice(*zip(*pairs, strict=True)), weighted),
)


@settings(max_examples=150, deadline=None)
@given(distribution=distributions, seed=st.integers(0, 2**31))
def test_draws_stay_in_the_support_and_the_json_form_is_the_same_distribution(distribution, seed):
    noise = torch.rand(64, generator=torch.Generator().manual_seed(seed))
    noise[:2] = torch.tensor([0.0, 1 - 2**-24])
    kept = noise.clone()
    values = distribution.draw(noise)
    assert values.shape == (64,)
    assert values.dtype == torch.float32
    assert torch.equal(noise, kept)
    low, high = (torch.tensor(bound, dtype=torch.float32) for bound in distribution.support)
    assert bool((values >= low).all())
    assert bool((values <= high).all())
    again = from_dict(json.loads(json.dumps(distribution.to_dict())))
    assert again == distribution
    names = [field.name for field in dataclasses.fields(distribution) if field.init]
    assert from_dict({distribution.kind: {name: getattr(distribution, name) for name in names}}) == distribution
    assert hash(again) == hash(distribution)
    assert torch.equal(again.draw(noise), values)


def test_representations_and_what_numbers_may_be_given_as():
    shown = [Uniform(0.1, 0.5), Normal(1.0, 2.0), Normal(1.0, 2.0, high=3.0), Choice([1.0, 2.0]), Grid([1.0, 2.0])]
    text = "[Uniform(0.1, 0.5), Normal(1.0, 2.0), Normal(1.0, 2.0, high=3.0), Choice([1.0, 2.0]), Grid([1.0, 2.0])]"
    assert repr(shown) == text
    assert Choice([1, 2], [3, 4]).to_dict() == {"choice": {"values": [1.0, 2.0], "weights": [3.0, 4.0]}}
    assert set(KINDS) == {"uniform", "log_uniform", "normal", "choice", "grid", "scheduled", "adaptive", "learnable"}
    values = [0.25, 0.5, 1.0]
    for make in (np.array, torch.tensor, tuple):
        assert Grid(make(values)) == Grid(values)
        assert Choice(make(values), make([1.0, 2.0, 1.0])) == Choice(values, [1.0, 2.0, 1.0])
    assert json.dumps(Uniform(np.float32(0.25), np.int64(1)).to_dict()) == '{"uniform": [0.25, 1.0]}'

"""Statistics against plain formulations, hand arithmetic, and the `rliable` package."""

import importlib
import importlib.util
import itertools
import sys
import types
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rl8x.studies import statistics
from rl8x.studies.statistics import align, bootstrap, cvar, iqm, mean, mean_curve, of_policies

SCORES = np.random.default_rng(3).normal(100, 30, (5, 12))
OTHERS = np.random.default_rng(4).normal(90, 20, (4, 12)).round(-1)
THRESHOLDS = np.linspace(0, 200, 9)
scores_arrays = hnp.arrays(
    np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=7), elements=st.integers(-20, 20).map(float)
)


@pytest.fixture(scope="module")
def rliable():
    """Import rliable without the rest of `arch`, whose models take seconds to import and fail with pandas 3."""
    reason = "the packages rliable and arch are not installed (extra `dev`)"
    arch = importlib.util.find_spec("arch")
    if arch is None or importlib.util.find_spec("rliable") is None:
        pytest.skip(reason)
    package = types.ModuleType("arch")
    package.__path__ = list(arch.submodule_search_locations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "arch", package)
        library, metrics = importlib.import_module("rliable.library"), importlib.import_module("rliable.metrics")
    return library, metrics


def plain_cvar(scores, fraction):
    """Give each cell one unit of weight, worst first, until the fraction is used up."""
    of_policies = []
    for row in scores:
        left = total = max(fraction * len(row), 1.0)
        weighted = 0.0
        for score in sorted(row):
            weighted += min(left, 1.0) * score
            left -= min(left, 1.0)
        of_policies.append(weighted / total)
    return sum(of_policies) / len(of_policies)


@settings(max_examples=50, deadline=None)
@given(scores_arrays, st.floats(0.01, 1.0), st.integers(1, 5))
def test_the_worst_cells_equal_a_plain_formulation(scores, fraction, seeds):
    others = np.roll(scores[:1], 1, axis=1).repeat(seeds, axis=0)
    assert cvar(scores, fraction) == pytest.approx(plain_cvar(scores, fraction), abs=1e-9)
    improvement = statistics.probability_of_improvement
    assert improvement(scores, others) + improvement(others, scores) == pytest.approx(1)
    assert scores.min(axis=-1).mean() <= cvar(scores, fraction) + 1e-9
    assert cvar(scores, 1.0) == pytest.approx(mean(scores))


def test_gap_is_inside_less_outside():
    scores = np.array([[1.0, 2.0, 3.0], [3.0, 4.0, 8.0]])
    # The first policy was trained on one cell, the second on two.
    each = of_policies(scores, np.array([[True, False, False], [True, True, False]]))
    assert each["gap"].tolist() == [1.0 - 2.5, 3.5 - 8.0]
    assert np.isnan(of_policies(scores, np.ones((2, 3), bool))["gap"]).all()


def test_point_estimates_equal_rliable(rliable):
    _, metrics = rliable
    assert mean(SCORES) == pytest.approx(metrics.aggregate_mean(SCORES), abs=1e-6)
    for runs, cells in ((5, 12), (3, 3), (1, 2), (2, 7)):
        assert iqm(SCORES[:runs, :cells]) == pytest.approx(metrics.aggregate_iqm(SCORES[:runs, :cells]), abs=1e-6)
    for x, y in ((SCORES.round(-1), OTHERS), (OTHERS, OTHERS), (OTHERS, OTHERS[::-1])):
        expected = metrics.probability_of_improvement(x, y)
        assert statistics.probability_of_improvement(x, y) == pytest.approx(expected, abs=1e-6)


STATISTICS = {"mean": mean, "iqm": iqm, "cvar": partial(cvar, fraction=0.1)}


def same_draws(monkeypatch, library, num_arrays):
    """Have rliable draw what `bootstrap` draws with the seed 7, array by array in turn."""
    generators = itertools.cycle([np.random.default_rng((7, index)) for index in range(num_arrays)])
    monkeypatch.setattr(
        library.np.random, "choice", lambda count, shape, replace: next(generators).integers(0, count, shape)
    )


@pytest.mark.parametrize("name", STATISTICS)
def test_intervals_equal_rliable_on_the_same_draws(name, rliable, monkeypatch):
    library, _ = rliable
    same_draws(monkeypatch, library, 1)
    statistic = STATISTICS[name]
    value, interval = library.get_interval_estimates(
        {"a": SCORES}, lambda scores: np.array([statistic(scores)]), reps=200
    )
    ours = bootstrap(statistic, SCORES, over="cells", resamples=200, seed=7)
    assert [ours.value, ours.low, ours.high] == pytest.approx([*value["a"], *interval["a"][:, 0]], abs=1e-6)


def test_intervals_of_improvement_and_profiles_equal_rliable_on_the_same_draws(rliable, monkeypatch):
    library, metrics = rliable
    same_draws(monkeypatch, library, 2)
    value, interval = library.get_interval_estimates(
        {"a": [SCORES.round(-1), OTHERS]}, lambda x, y: np.array([metrics.probability_of_improvement(x, y)]), reps=100
    )
    ours = bootstrap(
        statistics.probability_of_improvement, SCORES.round(-1), OTHERS, over="cells", resamples=100, seed=7
    )
    assert [ours.value, ours.low, ours.high] == pytest.approx([*value["a"], *interval["a"][:, 0]], abs=1e-6)

    same_draws(monkeypatch, library, 1)
    profile, band = library.create_performance_profile({"a": SCORES}, THRESHOLDS, reps=100)
    estimate = bootstrap(
        partial(statistics.performance_profile, thresholds=THRESHOLDS), SCORES, over="cells", resamples=100, seed=7
    )
    np.testing.assert_allclose(estimate.value, profile["a"], atol=1e-6)
    np.testing.assert_allclose([estimate.low, estimate.high], band["a"], atol=1e-6)


def test_resampled_policies_keep_their_scores_together():
    """Each of the 3^3 draws of rows is as likely as any other, and nothing else is drawn."""
    scores = np.array([[0.0, 0.0], [1.0, 5.0], [9.0, 2.0]])
    drawn = []
    bootstrap(lambda batch: drawn.extend(batch) or mean(batch), scores, resamples=2700)
    counts = Counter(resample.tobytes() for resample in drawn[1:])  # the first is the scores themselves
    assert counts.keys() == {scores[list(rows)].tobytes() for rows in itertools.product(range(3), repeat=3)}
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 54  # chi-square of 26, p = 0.001


def test_equal_arguments_give_equal_intervals_however_they_are_batched(monkeypatch):
    for over in ("policies", "cells"):
        first = bootstrap(mean, SCORES, over=over, resamples=50, seed=1)
        assert first == bootstrap(mean, SCORES, over=over, resamples=50, seed=1)
        assert first != bootstrap(mean, SCORES, over=over, resamples=50, seed=2)
        with monkeypatch.context() as patch:
            patch.setattr(statistics, "_MAX_ELEMENTS", 7 * SCORES.size)
            assert first == bootstrap(mean, SCORES, over=over, resamples=50, seed=1)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_have_their_level(level):
    rows = np.random.default_rng((0, 0)).integers(0, 5, (2000, 5))
    expected = np.quantile(SCORES[rows].mean(axis=(1, 2)), [0.5 - level / 2, 0.5 + level / 2])
    estimate = bootstrap(mean, SCORES, level=level)
    assert [estimate.low, estimate.high] == pytest.approx([*expected])


def test_one_seed_has_no_interval():
    estimate = bootstrap(mean, SCORES[:1])
    assert estimate.value == pytest.approx(SCORES[0].mean())
    assert np.isnan([estimate.low, estimate.high]).all()
    curve = mean_curve([([1, 2], [3.0, 4.0])])
    assert curve.mean.tolist() == [3, 4]
    assert np.isnan([curve.low, curve.high]).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bootstrap(mean, SCORES, over="runs"), "'policies' or 'cells'; got 'runs'"),
        (lambda: bootstrap(mean, SCORES, level=95), r"\(0, 1\); got 95"),
    ],
)
def test_bad_input_gets_one_line(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_curves_are_aligned_by_lines_between_their_points():
    steps, values = align([([0, 10, 20], [0.0, 1.0, 3.0]), ([5, 15], [10.0, 20.0])])
    assert steps.tolist() == [5, 10, 15, 20]
    assert values.tolist() == [[0.5, 1, 2, 3], [10, 15, 20, 20]]  # the second has stopped and keeps its last value


def test_a_repeated_step_counts_by_its_last_value_and_nan_is_left_out():
    steps, values = align([([2, 1, 2, 3], [7.0, 1.0, 5.0, np.nan])])
    assert (steps.tolist(), values.tolist()) == ([1, 2], [[1, 5]])

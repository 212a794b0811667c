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
from rl8x.studies.statistics import align, bootstrap, cvar, iqm, mean, mean_curve

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


def plain_cvar(row, fraction):
    """Give each cell of a policy one unit of weight, worst first, until the fraction is used up."""
    left = total = max(fraction * len(row), 1.0)
    weighted = 0.0
    for score in sorted(row):
        weighted += min(left, 1.0) * score
        left -= min(left, 1.0)
    return weighted / total


@settings(max_examples=50, deadline=None)
@given(scores_arrays, st.floats(0.01, 1.0), st.integers(1, 5))
def test_the_worst_cells_equal_a_plain_formulation(scores, fraction, seeds):
    others = np.roll(scores[:1], 1, axis=1).repeat(seeds, axis=0)
    plain = np.mean([plain_cvar(row, fraction) for row in scores])
    assert cvar(scores, fraction) == pytest.approx(plain, abs=1e-9)
    improvement = statistics.probability_of_improvement
    assert improvement(scores, others) + improvement(others, scores) == pytest.approx(1)
    assert scores.min(axis=-1).mean() <= cvar(scores, fraction) + 1e-9
    assert cvar(scores, 1.0) == pytest.approx(mean(scores))


def test_point_estimates_equal_rliable(rliable):
    _, metrics = rliable
    assert mean(SCORES) == pytest.approx(metrics.aggregate_mean(SCORES), abs=1e-6)
    for runs, cells in ((5, 12), (3, 3), (1, 2), (2, 7)):
        assert iqm(SCORES[:runs, :cells]) == pytest.approx(metrics.aggregate_iqm(SCORES[:runs, :cells]), abs=1e-6)
    for x, y in ((SCORES.round(-1), OTHERS), (OTHERS, OTHERS), (OTHERS, OTHERS[::-1])):
        expected = metrics.probability_of_improvement(x, y)
        assert statistics.probability_of_improvement(x, y) == pytest.approx(expected, abs=1e-6)


STATISTICS = {
    "mean": mean,
    "iqm": iqm,
    "cvar": partial(cvar, fraction=0.1),
    "improvement": statistics.probability_of_improvement,
    "profile": partial(statistics.performance_profile, thresholds=THRESHOLDS),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_intervals_equal_rliable_on_the_same_draws(name, rliable, monkeypatch):
    """It draws what `bootstrap` draws with the seed 7, array by array in turn."""
    library, metrics = rliable
    arrays = [SCORES.round(-1), OTHERS] if name == "improvement" else [SCORES]
    generators = itertools.cycle([np.random.default_rng((7, index)) for index in range(len(arrays))])
    draw = lambda count, shape, replace: next(generators).integers(0, count, shape)  # noqa: E731
    monkeypatch.setattr(library.np.random, "choice", draw)
    statistic = STATISTICS[name]
    ours = bootstrap(statistic, *arrays, over="cells", resamples=200, seed=7)
    if name == "profile":
        value, interval = library.create_performance_profile({"a": SCORES}, THRESHOLDS, reps=200)
    else:
        theirs = metrics.probability_of_improvement if name == "improvement" else statistic
        given = {"a": arrays if name == "improvement" else SCORES}
        value, interval = library.get_interval_estimates(given, lambda *each: np.array([theirs(*each)]), reps=200)
    np.testing.assert_allclose(np.atleast_1d(ours.value), value["a"], atol=1e-6)
    np.testing.assert_allclose(np.array([ours.low, ours.high]).reshape(2, -1), interval["a"], atol=1e-6)


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
    ("options", "says"),
    [({"over": "runs"}, "'policies' or 'cells'; got 'runs'"), ({"level": 95}, r"\(0, 1\); got 95")],
)
def test_bad_input_gets_one_line(options, says):
    with pytest.raises(ValueError, match=says):
        bootstrap(mean, SCORES, **options)


def test_curves_are_aligned_by_lines_between_their_points():
    steps, values = align([([0, 10, 20], [0.0, 1.0, 3.0]), ([5, 15], [10.0, 20.0])])
    assert steps.tolist() == [5, 10, 15, 20]
    assert values.tolist() == [[0.5, 1, 2, 3], [10, 15, 20, 20]]  # the second has stopped and keeps its last value
    # A repeated step counts by its last value, and NaN is left out.
    steps, values = align([([2, 1, 2, 3], [7.0, 1.0, 5.0, np.nan])])
    assert (steps.tolist(), values.tolist()) == ([1, 2], [[1, 5]])

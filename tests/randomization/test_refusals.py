"""What distributions and curricula refuse, each in a line that says what is legal."""

import math

import pytest

from rl8x.randomization import Adaptive, Choice, Grid, Learnable, LogUniform, Normal, Scheduled, Uniform, from_dict


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(2, 1), "`low` must not exceed `high`; got 2.0 and 1.0"),
        (lambda: Uniform("a", 1), "`low` must be a finite number; got 'a'"),
        (lambda: Uniform(0, math.inf), "`high` must be a finite number; got inf"),
        (lambda: LogUniform(0, 1), "0 < `low` <= `high`; got 0.0 and 1.0"),
        (lambda: Normal(0, -1), "`std` must not be negative; got -1.0"),
        (lambda: Normal(0, 1, 2, 1), "`low` must not exceed `high`"),
        (lambda: Choice([]), "at least one number; got "),
        (lambda: Choice([1, math.nan]), r"values\[1\]"),
        (lambda: Choice([1, 2], [1]), r"2 numbers >= 0 that do not sum to 0; got \[1.0\]"),
        (lambda: Choice([1, 2], [0, 0]), "do not sum to 0"),
        (lambda: Grid("12"), "list of at least one number; got '12'"),
        (lambda: from_dict({"unifrom": [0, 1]}), "Did you mean 'uniform'"),
        (lambda: from_dict({"uniform": [0, 1], "grid": [1]}), "one entry"),
        (lambda: from_dict({"uniform": [1]}), "takes low, high"),
        (lambda: from_dict({"uniform": {"lo": 1, "high": 2}}), "takes low, high"),
        (lambda: from_dict({"uniform": 3}), "takes low, high, as a list or by name; got 3"),
        *((lambda form=form: from_dict(form), "one entry, like") for form in (None, 5, "uniform", [["uniform"]], {})),
        (lambda: Scheduled([]), "must be a list of .metric, distribution. pairs"),
        (lambda: Scheduled([(0, Uniform(0, 1), 2)]), "must be a list of .metric, distribution. pairs"),
        (lambda: Scheduled([(0, 1.0), (0, 2.0)]), r"must increase; got \[0.0, 0.0\]"),
        (lambda: Scheduled([(0, 1.0), (1, Uniform(0, 1))]), r"must be of one kind.*a number x as Uniform\(x, x\)"),
        (lambda: Scheduled([(0, Normal(0, 1)), (1, 2.0)]), r"a number x as Normal\(x, 0\)"),
        (lambda: Scheduled([(0, Choice([1, 2])), (1, Choice([1]))]), "with as many values in each"),
        (lambda: Scheduled([(0, Grid([1, 2]))]), "cannot be one of `points`"),
        (lambda: Scheduled([(0, Scheduled([(0, 1.0)]))]), "cannot be one of `points`"),
        (lambda: Scheduled([(float("nan"), 1.0)]), "must be a finite number"),
        (lambda: Scheduled([(0, 1.0)], by=3), "must be the name of a metric"),
        (lambda: Scheduled([(0, 1.0)], interpolation="cubic"), "'interp' or 'step'; got 'cubic'"),
        (lambda: Scheduled([(0, 1.0)], goes_back=1), "must be true or false; got 1"),
        (lambda: Adaptive((0.6, 0.4), (1, 2), 0.1), "`start` must be two numbers, the lower first"),
        (lambda: Adaptive(0.5, (2, 2), 0.1), "`thresholds` must be two numbers"),
        (lambda: Adaptive(0.5, (1, 2), 0), "`step` must be more than 0"),
        (lambda: Adaptive(0.5, (1, 2), 0.1, limits=(0.6, 1)), r"must lie in `limits`; got \[0.5, 0.5\] and \[0.6"),
        (lambda: Adaptive(0.5, (1, 2), 0.1, boundary_share=0.0), r"must be in \(0, 1\]"),
        (lambda: Adaptive(0.5, (1, 2), 0.1, episodes=1.5), "whole number, at least 1; got 1.5"),
        (lambda: Adaptive(20.0, (1, 2), 0.1).clipped(0, 10), "its start lies outside"),
        (lambda: Learnable(Uniform(0, 1)), "give either `threshold`"),
        (lambda: Learnable(Uniform(0, 1), threshold=1, bounds=(0, 1)), "give either `threshold`"),
        (lambda: Learnable(Grid([1, 2]), threshold=1), "must be Uniform, LogUniform, Normal or Choice"),
        (lambda: Learnable(3.0, threshold=1), "must be Uniform, LogUniform, Normal or Choice; got 3.0"),
        (lambda: Learnable(Uniform(0, 1), bounds=(1, 1)), "`bounds` must be two numbers"),
        (lambda: Learnable(Uniform(0, 1), threshold=1, episodes=1), "`episodes` must be a whole number, at least 2"),
        (lambda: Learnable(Uniform(0, 1), threshold=1, level_share=1), r"must be in \[0, 1\)"),
        (lambda: from_dict({"learnable": {"bass": 1}}), "'learnable' takes base, metric, threshold"),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)

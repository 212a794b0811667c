"""The forms of an `env_config`: what is read out of each, and what fits another number of copies."""

import pytest

from rl8x.envs import CartPole
from rl8x.envs.env_config import (
    followed_in,
    function_form,
    function_name,
    inherited_config,
    moving_in,
    parsed_value,
    shown_value,
)
from rl8x.randomization import Choice, Grid, Scheduled, Uniform

SCHEDULE = Scheduled([[0, 0.4], [1000, 0.8]], by="eval/returns/mean")


def curriculum(known):
    return {"length": 0.5}


def test_a_distribution_and_its_plain_form_are_the_same_value():
    env = CartPole(2)
    for given in (Uniform(0.4, 0.6), Choice([0.4, 0.5]), Grid([0.4, 0.6]), SCHEDULE):
        (plain,) = env.plain_config({"length": given}).values()
        assert parsed_value(plain) == parsed_value(given) == given
    for number in (0.5, [0.4, 0.6]):
        assert parsed_value(number) is number
    with pytest.raises(ValueError, match=r"unknown distribution .unifrom"):
        parsed_value({"unifrom": [0.0, 1.0]})


def test_moving_parameters_and_their_metrics_are_found_in_the_plain_form():
    config = {"length": SCHEDULE, "gravity": Uniform(9.0, 10.0), "masscart": 1.0, "masspole": [0.1, 0.2]}
    plain = CartPole(2).plain_config(config)
    assert moving_in(plain) == {"length": plain["length"]}
    assert followed_in(plain) == {"length": "eval/returns/mean"}
    assert (moving_in({}), followed_in({})) == ({}, {})


def test_values_for_each_copy_are_fitted_evenly_spaced():
    plain = {"length": [0.1, 0.2, 0.3, 0.4], "gravity": {"grid": [1.0, 2.0, 3.0]}, "masscart": 2.0}
    assert inherited_config(plain, 2) == {"length": [0.2, 0.4], "gravity": [1.0, 3.0], "masscart": 2.0}
    # A grid that has room stays one, and so do as many values as there are copies.
    assert inherited_config(plain, 4) == plain


def test_a_function_is_its_name():
    assert function_name(function_form(curriculum)) == f"{__name__}.curriculum"
    assert [function_name(each) for each in (None, {}, {"length": 0.5})] == [None, None, None]


def test_params_show_a_few_values_and_count_many():
    assert shown_value(0.5) == 0.5
    assert shown_value({"uniform": [0.25, 1.0]}) == "Uniform(0.25, 1.0)"
    assert shown_value([0.25, 0.5]) == "[0.25, 0.5]"
    assert shown_value([i / 100 for i in range(100)]) == "100 values from 0.0 to 0.99"
    assert shown_value({"grid": [i / 100 for i in range(100)]}) == "Grid of 100 values from 0.0 to 0.99"

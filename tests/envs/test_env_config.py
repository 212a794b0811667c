"""The forms of an `env_config`: what is read out of each, and what fits another number of copies."""

import numpy as np
import pytest
import torch

from rl8x import MemoryTracker, PPOConfig, Trainer
from rl8x.envs import CartPole
from rl8x.envs.parameters import (
    followed_in,
    function_form,
    function_name,
    inherited_config,
    moving_in,
    parsed,
    part_of_config,
    plain,
    shown_value,
)
from rl8x.randomization import Adaptive, Choice, Grid, ParameterDistribution, Scheduled, Uniform, distributions

SCHEDULE = Scheduled([[0, 0.4], [1000, 0.8]], by="eval/returns/mean")
ADAPTIVE = Adaptive((0.4, 0.6), thresholds=(2, 5), step=0.1, episodes=2)


def curriculum(known):
    return {"length": 0.5}


@pytest.mark.parametrize(
    "value", [Uniform(0.4, 0.6), Choice([0.4, 0.5]), Grid([0.4, 0.6]), SCHEDULE, ADAPTIVE, 0.5, (0.4, 0.6)], ids=repr
)
def test_a_value_and_its_plain_form_are_the_same(value):
    form = CartPole(2).plain_config({"length": value})
    assert form == plain(parsed({"length": value}))
    assert parsed(form) == parsed({"length": value})


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (1, 1.0),
        (np.float32(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        ([0.5], [0.5]),
        ((1, 2), [1.0, 2.0]),
        (np.array([0.25, 0.5], np.float32), [0.25, 0.5]),
        ({"grid": [1, 2]}, {"grid": [1.0, 2.0]}),
        (Choice([1, 2], weights=[0, 1]), {"choice": {"values": [1.0, 2.0], "weights": [0.0, 1.0]}}),
    ],
    ids=repr,
)
def test_every_value_is_parsed_into_a_distribution_and_has_one_plain_form(value, form):
    parsed_once = parsed({"length": value})
    assert isinstance(parsed_once["length"], ParameterDistribution)
    assert plain(parsed_once) == {"length": form}
    assert parsed({"length": form}) == parsed(parsed_once) == parsed_once


def test_a_grid_may_have_a_legal_bound_as_float32_rounds_it():
    env = CartPole(2, seed=0)  # whose `length` is at most 10 m, and 0.025 m at least
    env.reset(config={"length": Grid(torch.tensor([0.025, 10.0]))})
    with pytest.raises(ValueError, match=r"\['length'\] must be in \[0.025, 10\] m; got 10.1"):
        env.reset(config={"length": Grid([0.5, 10.1])})


def test_moving_parameters_and_their_metrics_are_found_in_both_forms():
    config = {"length": SCHEDULE, "gravity": Uniform(9.0, 10.0), "masscart": 1.0, "masspole": [0.1, 0.2]}
    for form in (config, plain(parsed(config))):
        assert moving_in(form) == {"length": SCHEDULE}
        assert followed_in(form) == {"length": "eval/returns/mean"}
    assert (moving_in({}), followed_in({})) == ({}, {})


def test_values_for_each_copy_are_fitted_evenly_spaced():
    form = {
        "length": np.array([0.1, 0.2, 0.3, 0.4]),
        "gravity": {"grid": [1.0, 2.0, 3.0]},
        "masscart": torch.tensor(2.0),
    }
    assert plain(inherited_config(form, 2)) == {"length": [0.2, 0.4], "gravity": [1.0, 3.0], "masscart": 2.0}
    # A grid that has room stays one, and so do as many values as there are copies.
    assert inherited_config(form, 4) == parsed(form)
    assert plain(part_of_config(form, 4, range(1, 3))) == {"length": [0.2, 0.3], "gravity": [2.0, 3.0]}


def test_a_function_is_its_name():
    assert function_name(function_form(curriculum)) == f"{__name__}.curriculum"
    assert [function_name(each) for each in (None, {}, {"length": 0.5})] == [None, None, None]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.5, 0.5),
        ({"uniform": [0.25, 1.0]}, "Uniform(0.25, 1.0)"),
        ([0.25, 0.5], "[0.25, 0.5]"),
        ([i / 100 for i in range(100)], "100 values from 0.0 to 0.99"),
        ({"grid": [i / 100 for i in range(100)]}, "Grid of 100 values from 0.0 to 0.99"),
        (ADAPTIVE, "Adaptive(start=(0.4, 0.6), thresholds=(2.0, 5.0), step=0.1, episodes=2)"),
    ],
)
def test_params_show_a_few_values_and_count_many(value, shown):
    assert shown_value(value) == shown


@pytest.mark.parametrize(
    "value",
    [{"uniform": [0.4, 0.6]}, {"scheduled": {"points": [[0, 0.4], [100, 0.6]]}}, {"choice": [0.4, 0.5]}],
    ids=lambda form: next(iter(form)),
)
def test_a_run_parses_a_distribution_once(value, monkeypatch):
    forms, made = [], distributions.from_dict
    for module in ("rl8x.randomization", "rl8x.randomization.distributions"):
        monkeypatch.setattr(f"{module}.from_dict", lambda form: forms.append(form) or made(form))
    config = PPOConfig(num_envs=4, horizon=4, device="cpu", execution="eager", model_config={"hidden_sizes": [4]})
    trainer = Trainer(config.build(CartPole, time_limit=5), tracker=MemoryTracker(), checkpoints=False)
    trainer.run(max_steps=3, env_config={"length": value}, steps_per_eval=1, progress="none")
    assert forms == [value]

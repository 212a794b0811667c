"""Test cells: grids and samples, and which of them training can draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl8x.envs import CartPole, Parameter
from rl8x.envs.cells import inside, make_cells, num_cells, support
from rl8x.randomization import Choice, Grid, LogUniform, Normal, Uniform

PARAMETERS = {
    "length": Parameter(default=0.5, low=0.1, high=5.0, unit="m", description=""),
    "gravity": Parameter(default=9.8, low=0.0, high=30.0, unit="", description=""),
}


def test_listed_values_are_crossed_the_last_parameter_fastest():
    cells = make_cells({"length": [1, 2], "gravity": {"linspace": [0, 10, 3]}}, None, 0)
    assert cells["length"].tolist() == [1, 1, 1, 2, 2, 2]
    assert cells["gravity"].tolist() == [0, 5, 10] * 2
    assert make_cells({"length": {"geomspace": [1, 100, 3]}}, None, 0)["length"].tolist() == pytest.approx([1, 10, 100])
    assert [num_cells(make_cells({"length": one}, None, 0)) for one in (0.7, {"linspace": [1, 2, 1]})] == [1, 1]


def test_a_sample_is_drawn_from_its_distributions_and_repeats():
    test = {"length": {"uniform": [1, 3]}, "gravity": 5}
    cells = make_cells(test, 4_000, 3)
    assert num_cells(cells) == 4_000
    assert set(cells["gravity"]) == {5.0}
    np.testing.assert_allclose(np.quantile(cells["length"], [0, 0.25, 0.5, 0.75, 1]), [1, 1.5, 2, 2.5, 3], atol=0.1)
    again, other = make_cells(test, 4_000, 3), make_cells(test, 4_000, 4)
    assert (again["length"] == cells["length"]).all()
    assert (other["length"] != cells["length"]).any()


CELLS = make_cells({"length": [0.25, 0.5, 0.7, 1.0], "gravity": [9.8, 20.0]}, None, 0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # in the order of the cells: length slowly, gravity fast
        ({}, [0, 0, 1, 0, 0, 0, 0, 0]),
        ({"length": 0.7}, [0, 0, 0, 0, 1, 0, 0, 0]),
        ({"length": {"uniform": [0.25, 0.8]}}, [1, 0, 1, 0, 1, 0, 0, 0]),
        ({"length": LogUniform(0.5, 1.0)}, [0, 0, 1, 0, 1, 0, 1, 0]),
        ({"length": Uniform(0.1, 2), "gravity": Uniform(9, 21)}, [1] * 8),
        ({"length": Choice([0.25, 1.0])}, [1, 0, 0, 0, 0, 0, 1, 0]),  # not what lies between
        ({"length": Choice([0.25, 1.0], weights=[1, 0])}, [1, 0, 0, 0, 0, 0, 0, 0]),
        ({"length": Normal(0.5, 0.01)}, [0, 0, 1, 0, 0, 0, 0, 0]),
        # copies 0, 1, 2, 3 have (0.25, 9.8), (1, 20), (0.25, 9.8), (1, 20): the others of the cross are not drawn
        ({"length": Grid([0.25, 1.0]), "gravity": [9.8, 20, 9.8, 20]}, [1, 0, 0, 0, 0, 0, 0, 1]),
        ({"length": [0.25, 0.5, 0.7, 1.0], "gravity": Choice([20])}, [0, 1, 0, 1, 0, 1, 0, 1]),
    ],
)
def test_a_cell_is_inside_where_training_can_draw_it(config, expected):
    assert inside(CELLS, config, PARAMETERS, 4).astype(int).tolist() == expected


def test_what_training_draws_is_inside_and_what_is_not_tested_counts_by_its_default():
    cells = make_cells({"length": [0.5, 1.0]}, None, 0)
    assert inside(cells, {"length": Uniform(0.1, 2)}, PARAMETERS, 2).all()
    assert not inside(cells, {"length": Uniform(0.1, 2), "gravity": 20}, PARAMETERS, 2).any()
    env = CartPole(64, seed=1)
    config = {"length": Uniform(0.3, 0.7), "gravity": Choice([3.0, 9.8]), "masspole": Normal(0.3, 0.1)}
    env.reset(config=config)
    for _ in range(3):
        drawn = {name: value.double().numpy() for name, value in env.carry["parameters"].items()}
        assert inside(drawn, config, CartPole.parameters, 64).all()
        env.reset()


def test_supports_are_the_ends_of_what_is_drawn():
    found = support({"length": Uniform(0.25, 1)}, PARAMETERS, 2)
    assert found == {"length": [0.25, 1.0], "gravity": [9.8, 9.8]}
    assert support({"length": [0.5, 0.25]}, PARAMETERS, 2)["length"] == [0.25, 0.5]
    assert support({"length": Choice([1, 2, 3], weights=[0, 1, 1])}, PARAMETERS, 2)["length"] == [2, 3]
    assert support({"length": torch.tensor(0.6)}, PARAMETERS, 2)["length"] == pytest.approx([0.6, 0.6])

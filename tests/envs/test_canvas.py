"""Environments draw themselves: what is where in a picture follows from the state, by the geometry of the task."""

from __future__ import annotations

import math
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from tests.probes import Probe

from rl8x.envs import NumpyEnv, Parameter
from rl8x.envs.canvas import BLUE, GREEN, GREY, ORANGE, SIZE, Canvas, copy_of, host_arrays, numbers_of, picture_of
from rl8x.envs.registry import BUILTIN

WIDTH, HEIGHT = SIZE


def where(picture, colour):
    """The mean column and row of the pixels of a colour, counted from the middle of the picture, rows upwards."""
    same = np.abs(picture.astype(int) - [*bytes.fromhex(colour[1:])]).max(-1) < 12
    rows, columns = same.nonzero()
    assert len(rows), f"nothing is {colour}"
    return columns.mean() + 0.5 - picture.shape[1] / 2, picture.shape[0] / 2 - rows.mean() - 0.5


def drawn(name, state, **parameters):
    env = BUILTIN[name](1)
    values = {key: parameter.default for key, parameter in env.parameters.items()} | parameters
    return picture_of(env, {key: np.asarray(value) for key, value in state.items()}, values)


def test_a_point_is_where_the_view_has_it():
    canvas = Canvas(200, 100)
    canvas.view((-2.0, 2.0), (0.0, 1.0))  # 50 pixels a unit: x from -2 to 2, y from -0.5 to 1.5
    assert canvas.span == ((-2.0, 2.0), (-0.5, 1.5))
    canvas.circle((1.0, 1.0), 0.1, BLUE)
    assert where(canvas.picture(), BLUE) == pytest.approx((50, 25), abs=0.4)
    canvas.view((0.0, 10.0), (0.0, 1.0), stretch=True)
    canvas.circle((2.5, 0.25), 0.05, GREEN)
    assert where(canvas.picture(), GREEN) == pytest.approx((-50, -25), abs=0.4)


METRE = WIDTH / 5.8
POLE = {"length": 0.8}  # 1.6 m, whose middle lies 0.8 m from the pivot
CAR = WIDTH / 1.94
UP = HEIGHT / 2.7
LINK = HEIGHT / 4.3
HANGING, BENT = {"physics": [0.0] * 4}, {"physics": [math.pi / 2, math.pi / 2, 0.0, 0.0]}


def near(expected, pixels):
    return pytest.approx(expected, abs=pixels)


def cart_at(x, theta):
    return {"physics": [x, 0.0, theta, 0.0]}


@pytest.mark.parametrize(
    ("name", "state", "parameters", "colour", "expected"),
    [
        *[("CartPole", cart_at(x, 0.15), POLE, BLUE, (near(x * METRE, 1.5), ANY)) for x in (-2.0, 0.0, 1.5)],
        *[
            ("CartPole", cart_at(x, 0.15), POLE, ORANGE, (near((x + 0.8 * math.sin(0.15)) * METRE, 2.5), ANY))
            for x in (-2.0, 0.0, 1.5)
        ],
        *[  # to the left by positive angles
            ("Pendulum", {"theta": angle}, {}, BLUE, (near(-math.sin(angle) * UP, 2), near(math.cos(angle) * UP, 2)))
            for angle in (0.0, 1.0, -2.0, math.pi)
        ],
        *[
            (
                name,
                {"position": x},
                {},
                BLUE,
                (near((x + 0.3) * CAR, 0.09 * CAR), near((0.45 * math.sin(3 * x) - 0.1) * CAR, 0.12 * CAR)),
            )
            for name in ("MountainCar", "MountainCarContinuous")
            for x in (-1.1, -0.5, 0.3)
        ],
        ("Acrobot", HANGING, {}, ORANGE, (near(0, 4), near(-1.54 * LINK, 4))),  # the joint covers its upper end
        ("Acrobot", BENT, {}, BLUE, (near(0.5 * LINK, 4), ANY)),
        ("Acrobot", BENT, {}, ORANGE, (near(LINK, 4), near(0.55 * LINK, 4))),
        ("Acrobot", BENT, {}, GREEN, (ANY, near(LINK, 1))),  # the height to reach, 1 m above the upper joint
    ],
)
def test_what_is_drawn_is_where_the_state_has_it(name, state, parameters, colour, expected):
    assert where(drawn(name, state, **parameters), colour) == expected


def test_a_cart_without_limits_stays_in_sight():
    picture = drawn("CartPoleInfinite", cart_at(40.0, math.pi))
    column, row = where(picture, BLUE)
    assert 0 < column < WIDTH / 2
    assert where(picture, ORANGE)[1] < row  # the pole hangs


def test_the_price_is_green_where_the_asset_was_held():
    env = BUILTIN["AlgoTrading"](1)
    states = [{"change": np.float32(0.01 * (-1) ** i), "invested": np.int64(20 <= i < 40)} for i in range(60)]
    parameters = {name: parameter.default for name, parameter in env.parameters.items()}
    picture = picture_of(env, states[-1], parameters, states[:-1])
    chart = picture[40:]  # below the legend
    column = where(chart, GREEN)[0] + WIDTH / 2
    assert column == pytest.approx((29.5 + 2) * WIDTH / 92, abs=6)
    assert where(chart, GREY)[0] > -WIDTH / 2


@pytest.mark.parametrize("name", BUILTIN)
def test_every_built_in_environment_draws_each_of_its_copies(name):
    env = BUILTIN[name](3, seed=1)
    assert (env.render_mode, env.metadata["render_modes"]) == ("rgb_array", ["rgb_array"])
    env.reset(seed=2)
    env.action_space.seed(0)
    before = env.render()
    for _ in range(4):
        env.step(env.action_space.sample())
    pictures = env.render()
    assert [each.shape for each in pictures] == [(HEIGHT, WIDTH, 3)] * 3
    assert {each.dtype for each in pictures} == {np.dtype(np.uint8)}
    assert any((one != two).any() for one, two in zip(before, pictures, strict=True))
    states, parameters = host_arrays(env.carry["state"], env.team), host_arrays(env.carry["parameters"])
    assert (pictures[1] == picture_of(env, copy_of(states, 1), numbers_of(parameters, 1))).all()
    assert (pictures[0] == NumpyEnv(env).render()[0]).all()


class Drawn(Probe):
    """A dot whose size is its parameter."""

    parameters = {"size": Parameter(default=0.2, low=0.0, high=1.0, unit="m", description="of the dot")}  # noqa: RUF012
    default_time_limit = 3

    def transition(self, state, actions, parameters, noise):
        return {"x": state["x"] + 0.25}, torch.ones(self.num_envs), torch.zeros(self.num_envs, dtype=torch.bool)

    def draw(self, canvas, state, parameters, past):
        canvas.circle((float(state["x"][0]), 0.0), parameters["size"], BLUE)


def test_an_own_environment_draws_itself_by_one_function():
    env = Drawn(2, seed=0)
    env.reset(config={"size": [0.2, 0.6]})
    env.step(torch.zeros(2, dtype=torch.int64))
    small, large = env.render()
    assert where(small, BLUE) == pytest.approx((0.25 * HEIGHT / 2, 0), abs=1)
    blues = [np.abs(each.astype(int) - [0, 0x72, 0xB2]).max(-1).__lt__(12).sum() for each in (small, large)]
    assert blues[1] / blues[0] == pytest.approx(9, rel=0.05)

"""The classic tasks against Gymnasium's own classes, one copy at a time; and those that Gymnasium has not, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch

from rl8x.envs import (
    Acrobot,
    AlgoTrading,
    CartPole,
    CartPoleInfinite,
    ContinuousDummy,
    DiscreteDummy,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
)
from rl8x.envs.algo_trading import BUY, SELL

NUM_STATES = 1000


def uniform(rng, *spread):
    return rng.uniform(-1, 1, (NUM_STATES, len(spread))) * spread


def within(*spread):
    return lambda rng: uniform(rng, *spread)


def in_the_valley(goal):
    """Anywhere on the slope; a part of them at the wall and a part at the goal."""

    def states(rng):
        positions = rng.uniform(-1.2, 0.6, NUM_STATES)
        positions[:100] = rng.uniform(-1.2, -1.15, 100)
        positions[100:300] = rng.uniform(goal - 0.05, goal + 0.02, 200)
        return np.stack([positions, rng.uniform(-0.07, 0.07, NUM_STATES)], 1)

    return states


class Task(NamedTuple):
    """An environment, Gymnasium's id, states and actions to compare, and ranges of parameters."""

    env: Any
    id: str
    states: Callable[[Any], Any]
    actions: Callable[[Any], Any]
    ends: tuple[int, int]
    """The least and the most states of which a step terminates."""
    ranges: dict[str, tuple[float, float]]
    parts: tuple[str, ...] = ("physics",)

    def state(self, states):
        states = torch.from_numpy(states)
        return (
            {"physics": states} if self.parts == ("physics",) else dict(zip(self.parts, states.unbind(1), strict=True))
        )


def discrete(count):
    return lambda rng: rng.integers(0, count, NUM_STATES)


def continuous(reach):
    return lambda rng: rng.uniform(-reach, reach, (NUM_STATES, 1)).astype(np.float32)


NEAR = {name: (0.8 * p.default, 1.2 * p.default) for name, p in Acrobot.parameters.items() if name != "gravity"}
POLE = {"gravity": (1, 20), "masscart": (0.5, 3), "masspole": (0.05, 1), "length": (0.2, 2), "force_mag": (5, 20)}
POLE |= {"tau": (0.005, 0.04)}
PENDULUM = {"g": (1, 20), "m": (0.5, 3), "l": (0.5, 3), "dt": (0.01, 0.1)}
CAR = {"goal_velocity": (0, 0.05), "force": (0.0005, 0.005), "gravity": (0.001, 0.005)}
POWERED = {"goal_velocity": (0, 0.05), "power": (0.0005, 0.005)}
OF_CAR, TURN = ("position", "velocity"), math.pi
CONTINUOUS_CAR = "MountainCarContinuous-v0"
TASKS = [
    Task(CartPole, "CartPole-v1", within(3, 3, 0.25, 3), discrete(2), (200, 800), POLE),
    # Faster links multiply float32's rounding beyond 1e-5 within one step: the square of a speed enters.
    Task(Acrobot, "Acrobot-v1", within(TURN, TURN, 2, 2), discrete(3), (50, 800), NEAR | {"dt": (0.16, 0.2)}),
    Task(Pendulum, "Pendulum-v1", within(TURN, 8), continuous(3), (0, 0), PENDULUM, ("theta", "theta_dot")),
    Task(MountainCar, "MountainCar-v0", in_the_valley(0.5), discrete(3), (50, 500), CAR, OF_CAR),
    Task(MountainCarContinuous, CONTINUOUS_CAR, in_the_valley(0.45), continuous(1.5), (50, 500), POWERED, OF_CAR),
]


def set_copy(reference, values, i):
    """Give Gymnasium's environment the parameters of a copy, and what it derives from them."""
    for name, value in values.items():
        own = name if hasattr(reference, name) else name.upper()
        setattr(reference, own, float(value[i]))
    if isinstance(reference, gymnasium.envs.classic_control.CartPoleEnv):
        reference.steps_beyond_terminated = None
        reference.total_mass = reference.masspole + reference.masscart
        reference.polemass_length = reference.masspole * reference.length
    if "torque" in values:
        torque = float(values["torque"][i])
        reference.AVAIL_TORQUE = [-torque, 0.0, torque]


def compare(task, varied, states=None, atol=1e-5):
    """Step every state once in both, each copy under its own parameters if `varied`; return the states after."""
    rng, env, reference = np.random.default_rng(varied), task.env(NUM_STATES, seed=0), gymnasium.make(task.id).unwrapped
    ranges = task.ranges if varied else {}
    values = {name: rng.uniform(*bounds, NUM_STATES).astype(np.float32) for name, bounds in ranges.items()}
    env.reset(config=values)
    states = (task.states(rng) if states is None else states).astype(np.float32)
    actions, expected = task.actions(rng), []
    reference.reset(seed=0)
    for i in range(NUM_STATES):
        set_copy(reference, values, i)
        reference.state = states[i].astype(np.float64)
        expected.append(reference.step(actions[i])[:3])
    parameters = env.carry["parameters"]
    after, rewards, terminated = env.transition(
        task.state(states), torch.from_numpy(actions), parameters, torch.empty(NUM_STATES, 0)
    )
    obs = env.observe(after, parameters)
    assert terminated.tolist() == [bool(ended) for _, _, ended in expected]
    np.testing.assert_allclose(rewards.numpy(), [reward for _, reward, _ in expected], rtol=1e-5, atol=atol)
    np.testing.assert_allclose(obs.numpy(), np.array([each for each, _, _ in expected]), rtol=1e-5, atol=atol)
    assert varied or task.ends[0] <= int(terminated.sum()) <= task.ends[1]
    return after


@pytest.mark.parametrize("varied", [False, True], ids=["defaults", "parameters"])
@pytest.mark.parametrize("task", TASKS, ids=[task.id for task in TASKS])
def test_a_step_equals_gymnasiums_under_the_parameters_of_each_copy(task, varied):
    compare(task, varied)


def test_fast_links_are_held_to_the_speed_limits():
    fast = uniform(np.random.default_rng(2), math.pi, math.pi, 12, 28)
    after = compare(TASKS[1]._replace(ends=(0, NUM_STATES)), False, fast, 5e-3)
    assert float(after["physics"][:, 3].abs().max()) <= 9 * math.pi + 1e-5


@pytest.mark.parametrize("task", TASKS, ids=[task.id for task in TASKS])
def test_the_time_limit_equals_gymnasiums(task):
    assert task.env(3).time_limit == gymnasium.spec(task.id).max_episode_steps


@pytest.mark.parametrize(
    ("env", "config", "ends"),
    [
        (CartPole, {}, {"physics": (-0.05, 0.05)}),
        (Acrobot, {}, {"physics": (-0.1, 0.1)}),
        (Pendulum, {}, {"theta": (-math.pi, math.pi), "theta_dot": (-1, 1)}),
        (MountainCar, {}, {"position": (-0.6, -0.4), "velocity": (0, 0)}),
        (DiscreteDummy, {}, {"position": (-100, 100)}),
        (ContinuousDummy, {"bounds": 0.5}, {"position": (-0.5, 0.5)}),
    ],
)
def test_starts_are_uniform_within_their_spread(env, config, ends):
    made = env(20_000, seed=0)
    made.reset(config=config)
    for name, (low, high) in ends.items():
        values = made.carry["state"][name].view(20_000, -1)[:16_000]
        assert low <= float(values.min()) <= float(values.max()) <= high
        shares = torch.tensor([0.1, 0.5, 0.9])
        expected = (low + (high - low) * shares).unsqueeze(1).expand(3, values.shape[1])
        torch.testing.assert_close(torch.quantile(values, shares, dim=0), expected, atol=0.016 * (high - low), rtol=0)


# -- by hand


def moved(env, state, actions, **config):
    """Make a step without noise; return the state after, rewards and ends."""
    made = env(len(actions), seed=0)
    made.reset(config=config)
    return made.transition(state, torch.as_tensor(actions), made.carry["parameters"], torch.empty(len(actions), 0))


def test_gravity_pulls():
    state = {"physics": torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(2, 1)}
    weak, strong = moved(Acrobot, state, [1, 1], gravity=[0.1, 20.0])[0]["physics"][:, 2].tolist()
    assert strong < 20 * weak < 0
    # At position 0 the slope is steepest: cos(0) = 1, so that one step changes the velocity by the force minus gravity.
    state = {"position": torch.zeros(2), "velocity": torch.zeros(2)}
    after, rewards, _ = moved(MountainCarContinuous, state, [[1.0], [1.0]], gravity=[0.0, 0.004])
    torch.testing.assert_close(after["velocity"], torch.tensor([0.0015, -0.0025]))
    torch.testing.assert_close(rewards, torch.tensor([-0.1, -0.1]))


def test_the_infinite_cartpole_moves_as_the_finite_one_and_never_ends():
    state = {"physics": torch.tensor([[0.1, -0.2, 0.05, 0.3], [2.39, 4.0, -0.2, 1.0]])}
    expected, _, terminated = moved(CartPole, state, [0, 1])
    after, rewards, ended = moved(CartPoleInfinite, state, [0, 2])
    torch.testing.assert_close(after["physics"], expected["physics"], atol=1e-6, rtol=0)
    torch.testing.assert_close(rewards, -expected["physics"].abs().sum(1), atol=1e-5, rtol=0)
    assert (terminated.tolist(), ended.tolist()) == ([False, True], [False, False])
    assert not CartPoleInfinite(1).episodic
    # The middle action does nothing, and the angle is from upright after full turns.
    turned = torch.tensor([[0.0, 0.0, angle, 0.0] for angle in (0.0, 2 * math.pi - 0.1, -0.1)])
    after, (rest, far, near), _ = moved(CartPoleInfinite, {"physics": turned}, [1, 1, 1])
    assert after["physics"][0].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert CartPoleInfinite(3).observe(after, {})[0].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert rest == 0.0
    torch.testing.assert_close(far, near, atol=1e-5, rtol=0)


def test_dummies_move_pay_the_distance_and_never_end():
    start = torch.tensor([3.0, -2.0])
    for env, actions, steps in ((DiscreteDummy, [0, 1], [-1.0, 1.0]), (ContinuousDummy, [[0.5], [2.0]], [0.5, 2.0])):
        after, rewards, ended = moved(env, {"position": start}, actions)
        assert torch.equal(after["position"], start + torch.tensor(steps))
        assert torch.equal(rewards, -after["position"].abs())
        assert not ended.any()
        assert not env(1).episodic


def test_the_price_follows_the_equation():
    env = AlgoTrading(4, seed=0)
    obs, _ = env.reset(config={"fee": 0.01})
    state = env.carry["state"]
    km, kc, f = (state[name].double().numpy() for name in ("trend", "cycle", "frequency"))
    price, invested, total = np.ones(4), np.zeros(4, bool), np.zeros(4)
    portfolio = np.ones(4)
    generator = np.random.default_rng(0)
    for t in range(30):
        actions = generator.integers(0, 3, 4)
        held = invested.astype(int)  # nothing else is legal than to buy where nothing is held, and to sell where it is
        assert obs["action_mask"].T.tolist() == [[1] * 4, (1 - held).tolist(), held.tolist()]
        obs, rewards, terminated, _, _ = env.step(torch.as_tensor(actions))
        after = np.where(actions == BUY, True, np.where(actions == SELL, False, invested))
        growth = (1 + km) * (1 + kc * np.sin(f * t))
        portfolio *= np.where(after, growth, 1.0) * np.where(after != invested, 0.99, 1.0)
        price, invested = price * growth, after
        total += rewards.double().numpy()
        np.testing.assert_allclose(total, 100 * np.log(portfolio), atol=1e-3)
        np.testing.assert_allclose(obs["change"][:, 0].numpy(), 100 * np.log(growth), atol=1e-4)
        assert obs["invested"].tolist() == invested.astype(int).tolist()
        assert not terminated.any()
    assert not env.episodic


def test_the_cycle_keeps_its_digits_however_long_it_goes_on():
    env = AlgoTrading(4, seed=0)
    env.reset()
    frequency = env.carry["state"]["frequency"].double()
    for _ in range(2000):
        env.step(torch.zeros(4, dtype=torch.int64))
    state = env.carry["state"]
    assert all(float(value.abs().max()) < 2 * math.pi + 1e-3 for value in state.values())
    np.testing.assert_allclose(state["phase"].double().sin(), (frequency * 2000).sin(), atol=2e-3)


def test_what_is_drawn_lies_in_its_range():
    env = AlgoTrading(2000, seed=0)
    env.reset(config={"min_period": 4.0, "max_period": 8.0, "max_trend": 0.01})
    state = env.carry["state"]
    period, trend = 2 * math.pi / state["frequency"], state["trend"]
    assert 4.0 <= float(period.min()) < 4.1 < 7.9 < float(period.max()) <= 8.001
    assert -0.01 <= float(trend.min()) < -0.0099 < 0.0099 < float(trend.max()) <= 0.01
    assert float(state["cycle"].min()) >= 0.0

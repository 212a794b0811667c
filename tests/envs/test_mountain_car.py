from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from rl8x.envs.mountain_car import MountainCar, MountainCarContinuous

from .parity import NUM_STATES, check_parity, check_time_limit


def random_states(rng, goal):
    """Anywhere on the slope; a part of them at the wall and a part at the goal."""
    positions = rng.uniform(-1.2, 0.6, NUM_STATES)
    positions[:100] = rng.uniform(-1.2, -1.15, 100)
    positions[100:300] = rng.uniform(goal - 0.05, goal + 0.02, 200)
    return np.stack([positions, rng.uniform(-0.07, 0.07, NUM_STATES)], 1).astype(np.float32)


def to_state(states):
    return {"position": states[:, 0], "velocity": states[:, 1]}


def discrete(rng):
    return rng.integers(0, 3, NUM_STATES)


def continuous(rng):
    return rng.uniform(-1.5, 1.5, (NUM_STATES, 1)).astype(np.float32)


CASES = [
    (MountainCar, "MountainCar-v0", discrete, 0.5),
    (MountainCarContinuous, "MountainCarContinuous-v0", continuous, 0.45),
]


@pytest.mark.parametrize(("env_class", "gymnasium_id", "actions", "goal"), CASES)
def test_step_equals_gymnasiums(env_class, gymnasium_id, actions, goal):
    rng = np.random.default_rng(0)
    env = env_class(NUM_STATES, seed=0)
    env.reset()
    reference = gymnasium.make(gymnasium_id).unwrapped
    _, terminated = check_parity(env, reference, random_states(rng, goal), actions(rng), to_state)
    assert 50 < int(terminated.sum()) < 500


@pytest.mark.parametrize(("env_class", "gymnasium_id", "actions", "goal"), CASES)
def test_parameters_of_each_copy_equal_gymnasiums_attributes(env_class, gymnasium_id, actions, goal):
    rng = np.random.default_rng(1)
    env = env_class(NUM_STATES, seed=0)
    values = {"goal_velocity": rng.uniform(0, 0.05, NUM_STATES).astype(np.float32)}
    if env_class is MountainCar:
        values["force"] = rng.uniform(0.0005, 0.005, NUM_STATES).astype(np.float32)
        values["gravity"] = rng.uniform(0.001, 0.005, NUM_STATES).astype(np.float32)
    else:
        values["power"] = rng.uniform(0.0005, 0.005, NUM_STATES).astype(np.float32)
    env.reset(config=values)

    def set_copy(reference, i):
        for name, value in values.items():
            setattr(reference, name, float(value[i]))

    reference = gymnasium.make(gymnasium_id).unwrapped
    check_parity(env, reference, random_states(rng, goal), actions(rng), to_state, set_copy)


@pytest.mark.parametrize(("env_class", "gymnasium_id", "actions", "goal"), CASES)
def test_time_limit_equals_gymnasiums(env_class, gymnasium_id, actions, goal):
    check_time_limit(env_class, gymnasium_id)


def test_gravity_of_the_continuous_form_pulls():
    # At position 0 the slope is steepest: cos(0) = 1, so that one step changes the velocity by the force minus gravity.
    env = MountainCarContinuous(2, seed=0)
    env.reset(config={"gravity": [0.0, 0.004]})
    state = {"position": torch.zeros(2), "velocity": torch.zeros(2)}
    after, rewards, _ = env.transition(state, torch.ones(2, 1), env.carry["parameters"], torch.empty(2, 0))
    torch.testing.assert_close(after["velocity"], torch.tensor([0.0015, -0.0025]))
    torch.testing.assert_close(rewards, torch.tensor([-0.1, -0.1]))


@pytest.mark.parametrize("env_class", [MountainCar, MountainCarContinuous])
def test_start_is_at_rest_in_the_valley(env_class):
    env = env_class(10_000, seed=0)
    obs, _ = env.reset()
    assert set(obs[:, 1].tolist()) == {0.0}
    quantiles = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    torch.testing.assert_close(torch.quantile(obs[:, 0], quantiles), -0.6 + 0.2 * quantiles, atol=5e-3, rtol=0)

from __future__ import annotations

import math

import gymnasium
import numpy as np
import torch

from rl8x.envs.pendulum import Pendulum

from .parity import NUM_STATES, check_parity, check_time_limit


def random_states(rng):
    return (rng.uniform(-1, 1, (NUM_STATES, 2)) * [math.pi, 8.0]).astype(np.float32)


def to_state(states):
    return {"theta": states[:, 0], "theta_dot": states[:, 1]}


def test_step_equals_gymnasiums():
    rng = np.random.default_rng(0)
    env = Pendulum(NUM_STATES, seed=0)
    env.reset()
    actions = rng.uniform(-3, 3, (NUM_STATES, 1)).astype(np.float32)  # beyond the legal +-2, so that clipping shows
    rewards, _ = check_parity(env, gymnasium.make("Pendulum-v1").unwrapped, random_states(rng), actions, to_state)
    assert float(rewards.min()) < -10
    assert float(rewards.max()) < 0


def test_parameters_of_each_copy_equal_gymnasiums_attributes():
    rng = np.random.default_rng(1)
    env = Pendulum(NUM_STATES, seed=0)
    ranges = {"g": (1, 20), "m": (0.5, 3), "l": (0.5, 3), "dt": (0.01, 0.1)}
    values = {name: rng.uniform(*bounds, NUM_STATES).astype(np.float32) for name, bounds in ranges.items()}
    env.reset(config=values)

    def set_copy(reference, i):
        for name, value in values.items():
            setattr(reference, name, float(value[i]))

    actions = rng.uniform(-2, 2, (NUM_STATES, 1)).astype(np.float32)
    check_parity(env, gymnasium.make("Pendulum-v1").unwrapped, random_states(rng), actions, to_state, set_copy)


def test_time_limit_equals_gymnasiums():
    check_time_limit(Pendulum, "Pendulum-v1")


def test_start_covers_all_angles_and_speeds_up_to_one():
    env = Pendulum(20_000, seed=0)
    env.reset()
    theta, theta_dot = env.carry["state"]["theta"], env.carry["state"]["theta_dot"]
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    torch.testing.assert_close(torch.quantile(theta, quantiles), (quantiles * 2 - 1) * math.pi, atol=0.1, rtol=0)
    torch.testing.assert_close(torch.quantile(theta_dot, quantiles), quantiles * 2 - 1, atol=0.03, rtol=0)

from __future__ import annotations

import math

import gymnasium
import numpy as np
import torch

from rl8x.envs.acrobot import Acrobot
from rl8x.envs.steps import wrapped_angle

from .parity import NUM_STATES, check_parity, check_time_limit


def random_states(rng):
    # Faster ones multiply float32's rounding beyond 1e-5 within one step: the square of a speed enters.
    return (rng.uniform(-1, 1, (NUM_STATES, 4)) * [math.pi, math.pi, 2.0, 2.0]).astype(np.float32)


def reference():
    return gymnasium.make("Acrobot-v1").unwrapped


def test_step_equals_gymnasiums():
    rng = np.random.default_rng(0)
    env = Acrobot(NUM_STATES, seed=0)
    env.reset()
    actions = rng.integers(0, 3, NUM_STATES)
    rewards, terminated = check_parity(
        env, reference(), random_states(rng), actions, lambda states: {"physics": states}
    )
    assert 50 < int(terminated.sum()) < 800
    assert torch.equal(rewards == 0, terminated)


def test_fast_links_are_held_to_the_speed_limits():
    rng = np.random.default_rng(2)
    env = Acrobot(NUM_STATES, seed=0)
    env.reset()
    states = random_states(rng) * np.array([1, 1, 6, 14], dtype=np.float32)
    actions = rng.integers(0, 3, NUM_STATES)
    check_parity(env, reference(), states, actions, lambda states: {"physics": states}, atol=5e-3)
    after, _, _ = env.transition(
        {"physics": torch.from_numpy(states)}, torch.from_numpy(actions), env.carry["parameters"], torch.empty(1, 0)
    )
    assert float(after["physics"][:, 3].abs().max()) <= 9 * math.pi + 1e-5


def test_parameters_of_each_copy_equal_gymnasiums_attributes():
    rng = np.random.default_rng(1)
    env = Acrobot(NUM_STATES, seed=0)
    names = {
        "link_length_1": "LINK_LENGTH_1",
        "link_mass_1": "LINK_MASS_1",
        "link_mass_2": "LINK_MASS_2",
        "link_com_pos_1": "LINK_COM_POS_1",
        "link_com_pos_2": "LINK_COM_POS_2",
        "link_moi": "LINK_MOI",
        "dt": "dt",
        "torque": "",
    }
    defaults = {name: Acrobot.parameters[name].default for name in names}
    # Up to 20% off the defaults, dt only below: its default is its bound.
    values = {
        name: (defaults[name] * rng.uniform(0.8, 1.0 if name == "dt" else 1.2, NUM_STATES)).astype(np.float32)
        for name in names
    }
    env.reset(config=values)

    def set_copy(reference, i):
        for name, attribute in names.items():
            if attribute:
                setattr(reference, attribute, float(values[name][i]))
        torque = float(values["torque"][i])
        reference.AVAIL_TORQUE = [-torque, 0.0, torque]

    actions = rng.integers(0, 3, NUM_STATES)
    check_parity(env, reference(), random_states(rng), actions, lambda states: {"physics": states}, set_copy)


def test_gravity_scales_the_swing():
    # Without gravity and torque, a resting acrobot stays where it is; with it, it falls towards hanging down.
    env = Acrobot(2, seed=0)
    env.reset(config={"gravity": [0.1, 20.0]})
    state = {"physics": torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(2, 1)}
    after, _, _ = env.transition(state, torch.tensor([1, 1]), env.carry["parameters"], torch.empty(2, 0))
    weak, strong = after["physics"][:, 2].tolist()
    assert strong < 20 * weak < 0


def test_time_limit_equals_gymnasiums():
    check_time_limit(Acrobot, "Acrobot-v1")


def test_wrapped_keeps_the_direction():
    angles = torch.linspace(-20, 20, 401)
    turned = wrapped_angle(angles)
    assert float(turned.min()) >= -math.pi - 1e-5
    assert float(turned.max()) <= math.pi + 1e-5
    torch.testing.assert_close(turned.sin(), angles.sin(), atol=1e-5, rtol=0)
    torch.testing.assert_close(turned.cos(), angles.cos(), atol=1e-5, rtol=0)

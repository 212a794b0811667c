from __future__ import annotations

import math

import gymnasium
import numpy as np
import torch

from rl8x.envs.cartpole import CartPole, CartPoleInfinite

from .parity import NUM_STATES, check_parity, check_time_limit


def random_states(rng):
    spread = np.array([3.0, 3.0, 0.25, 3.0])
    return (rng.uniform(-1, 1, (NUM_STATES, 4)) * spread).astype(np.float32)


def reference():
    return gymnasium.make("CartPole-v1").unwrapped


def fresh(env, i):
    env.steps_beyond_terminated = None


def test_step_equals_gymnasiums():
    rng = np.random.default_rng(0)
    env = CartPole(NUM_STATES, seed=0)
    env.reset()
    actions = rng.integers(0, 2, NUM_STATES)
    rewards, terminated = check_parity(
        env, reference(), random_states(rng), actions, lambda states: {"physics": states}, fresh
    )
    assert set(rewards.tolist()) == {1.0}
    assert 200 < int(terminated.sum()) < 800  # both outcomes were compared


def test_parameters_of_each_copy_equal_gymnasiums_attributes():
    rng = np.random.default_rng(1)
    env = CartPole(NUM_STATES, seed=0)
    ranges = {
        "gravity": (1, 20),
        "masscart": (0.5, 3),
        "masspole": (0.05, 1),
        "length": (0.2, 2),
        "force_mag": (5, 20),
        "tau": (0.005, 0.04),
    }
    values = {name: rng.uniform(*bounds, NUM_STATES).astype(np.float32) for name, bounds in ranges.items()}
    env.reset(config=values)

    def set_copy(reference, i):
        fresh(reference, i)
        for name, value in values.items():
            setattr(reference, name, float(value[i]))
        reference.total_mass = reference.masspole + reference.masscart
        reference.polemass_length = reference.masspole * reference.length

    actions = rng.integers(0, 2, NUM_STATES)
    check_parity(env, reference(), random_states(rng), actions, lambda states: {"physics": states}, set_copy)


def test_time_limit_equals_gymnasiums():
    check_time_limit(CartPole, "CartPole-v1")


def test_start_is_uniform_within_its_spread():
    env = CartPole(20_000, seed=0)
    obs, _ = env.reset()
    assert float(obs.abs().max()) <= 0.05
    quantiles = torch.quantile(obs[:16_000], torch.tensor([0.1, 0.5, 0.9]), dim=0)
    expected = torch.tensor([-0.04, 0.0, 0.04]).unsqueeze(1).expand(3, 4)
    torch.testing.assert_close(quantiles, expected, atol=1.5e-3, rtol=0)


def test_infinite_form_moves_as_the_finite_one_and_never_ends():
    infinite, finite = CartPoleInfinite(2, seed=0), CartPole(2, seed=0)
    infinite.reset()
    finite.reset()
    physics = torch.tensor([[0.1, -0.2, 0.05, 0.3], [2.39, 4.0, -0.2, 1.0]])
    no_noise = torch.empty(2, 0)
    parameters = finite.carry["parameters"]
    expected, _, terminated = finite.transition({"physics": physics}, torch.tensor([0, 1]), parameters, no_noise)
    state, rewards, ended = infinite.transition({"physics": physics}, torch.tensor([0, 2]), parameters, no_noise)
    torch.testing.assert_close(state["physics"], expected["physics"], atol=1e-6, rtol=0)
    torch.testing.assert_close(rewards, -expected["physics"].abs().sum(1), atol=1e-5, rtol=0)
    assert terminated.tolist() == [False, True]
    assert ended.tolist() == [False, False]
    assert not infinite.episodic


def test_infinite_form_does_nothing_with_the_middle_action():
    # At rest and upright, nothing moves without a push.
    env = CartPoleInfinite(1, seed=0)
    env.reset()
    state, rewards, _ = env.transition(
        {"physics": torch.zeros(1, 4)}, torch.tensor([1]), env.carry["parameters"], torch.empty(1, 0)
    )
    assert state["physics"].tolist() == [[0.0, 0.0, 0.0, 0.0]]
    assert rewards.tolist() == [0.0]
    assert env.observe(state, {}).tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0]]


def test_infinite_form_measures_the_angle_from_upright_after_full_turns():
    env = CartPoleInfinite(1, seed=0)
    env.reset()
    turned = torch.tensor([[0.0, 0.0, 2 * math.pi - 0.1, 0.0]])
    _, rewards, _ = env.transition({"physics": turned}, torch.tensor([1]), env.carry["parameters"], torch.empty(1, 0))
    plain = torch.tensor([[0.0, 0.0, -0.1, 0.0]])
    _, expected, _ = env.transition({"physics": plain}, torch.tensor([1]), env.carry["parameters"], torch.empty(1, 0))
    torch.testing.assert_close(rewards, expected, atol=1e-5, rtol=0)

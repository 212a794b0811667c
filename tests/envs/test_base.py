from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x.envs import BUILTIN, CartPole, DiscreteDummy, Pendulum
from rl8x.envs.base import Env, Parameter
from rl8x.randomization import Grid, LogUniform, Normal, Uniform
from rl8x.trees import flatten_tree


class Countdown(Env):
    """Count down from a start drawn in 1..`most`; action 1 counts double. Terminates at 0 or below. Adds step noise."""

    single_observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = Discrete(2)
    parameters = {  # noqa: RUF012
        "most": Parameter(default=4.0, low=1.0, high=100.0, unit="steps", description="largest start"),
        "bonus": Parameter(default=0.0, low=-1.0, high=1.0, unit="", description="added to each reward"),
    }
    terminates = True
    reset_noise = 1
    step_noise = 1

    def initial_state(self, parameters, noise):
        count = torch.floor(noise[:, 0] * parameters["most"]) + 1
        return {"count": count, "draws": torch.stack((noise[:, 0], noise[:, 0]), 1)}

    def transition(self, state, actions, parameters, noise):
        count = state["count"] - 1 - actions
        draws = torch.cat((state["draws"][:, 1:], noise), 1)
        return {"count": count, "draws": draws}, count.abs() + parameters["bonus"], count <= 0

    def observe(self, state, parameters):
        return torch.stack((state["count"], state["draws"][:, 1]), 1)


def leaves_of(obs):
    """Return the tensors of an observation in a fixed order."""
    return list(flatten_tree("", obs).values())


def rollout(env, steps, seed=0):
    """Step with random actions; returns all that was seen."""
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for _ in range(steps):
        if isinstance(env.single_action_space, Discrete):
            actions = torch.randint(int(env.single_action_space.n), (env.num_envs,), generator=generator)
        else:
            actions = torch.rand((env.num_envs, *env.single_action_space.shape), generator=generator) * 2 - 1
        obs, rewards, terminated, truncated, info = env.step(actions)
        rest = (rewards, terminated, truncated, info["episode"]["r"], info["episode"]["l"])
        seen.append((*leaves_of(obs), *leaves_of(info["final_obs"]), *rest))
    return seen


class Oracle:
    """One copy of Countdown in plain Python, fed the same noise."""

    def __init__(self, noise, limit):
        self.limit = limit
        self.start(noise)

    def start(self, noise):
        self.count = float(np.floor(noise * 4) + 1)
        self.draw, self.length, self.total = noise, 0, 0.0

    def step(self, action, step_noise, reset_noise):
        self.count -= 1 + action
        self.draw = step_noise
        self.length += 1
        self.total += abs(self.count)
        terminated = self.count <= 0
        truncated = self.limit is not None and self.length >= self.limit
        row = (abs(self.count), terminated, truncated, (self.count, self.draw), self.total, self.length)
        if terminated or truncated:
            self.start(reset_noise)
        return row, (self.count, self.draw)


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_advance_equals_a_loop_over_copies(limit):
    env = Countdown(16, seed=3, time_limit=limit)
    noise = env.noise(31)
    carry, obs = env.restart(noise[0])
    oracles = [Oracle(float(row[1]), limit) for row in noise[0]]
    assert obs.tolist() == [[oracle.count, oracle.draw] for oracle in oracles]
    generator = torch.Generator().manual_seed(0)
    ended = 0
    for t in range(1, 31):
        actions = torch.randint(2, (16,), generator=generator)
        carry, step = env.advance(carry, actions, noise[t])
        for i, oracle in enumerate(oracles):
            row, after = oracle.step(int(actions[i]), float(noise[t, i, 0]), float(noise[t, i, 1]))
            reward, terminated, truncated, final, total, length = row
            assert (float(step.rewards[i]), bool(step.terminated[i])) == (reward, terminated)
            assert bool(step.truncated[i]) == truncated
            assert tuple(step.final_obs[i].tolist()) == final
            assert (float(step.episode_returns[i]), int(step.episode_lengths[i])) == (total, length)
            assert tuple(step.obs[i].tolist()) == after
            assert (float(carry["returns"][i]), int(carry["elapsed"][i])) == (oracle.total, oracle.length)
            ended += terminated or truncated
    assert ended > 50
    assert step.valid is None


@settings(max_examples=20, deadline=None)
@given(horizon=st.integers(1, 9), num_envs=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_noise_of_a_horizon_equals_noise_step_by_step(horizon, num_envs, seed):
    at_once, stepwise = Countdown(num_envs, seed=seed), Countdown(num_envs, seed=seed)
    noise = at_once.noise(horizon)
    assert noise.shape == (horizon, num_envs, 2)
    assert torch.equal(noise, torch.cat([stepwise.noise(1) for _ in range(horizon)]))
    assert float(noise.min()) >= 0
    assert float(noise.max()) < 1


@pytest.mark.parametrize("env_class", [*BUILTIN.values(), Countdown])
def test_a_snapshot_goes_on_with_the_same_bits(env_class):
    limit = None if env_class.default_time_limit is None else 6
    name, parameter = next(iter(env_class.parameters.items()))
    config = {name: LogUniform(parameter.default * 0.9, parameter.default * 1.1)}
    env = env_class(5, seed=0, time_limit=limit)
    env.reset(config=config)
    rollout(env, 9)
    file = io.BytesIO()
    torch.save(env.state_dict(), file)
    expected = rollout(env, 15)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    kept = {key: value.clone() for key, value in state["carry"]["state"].items()}
    other = env_class(5, seed=99, time_limit=limit)
    other.load_state_dict(state)
    assert other.config == env.config
    for row, wanted in zip(rollout(other, 15), expected, strict=True):
        assert all(torch.equal(mine, its) for mine, its in zip(row, wanted, strict=True))
    other.reset()
    env.reset()
    assert torch.equal(other.carry["state"][next(iter(kept))], env.carry["state"][next(iter(kept))])
    assert all(torch.equal(state["carry"]["state"][key], value) for key, value in kept.items())


def test_a_snapshot_keeps_a_configuration_that_waits_for_the_reset():
    env = CartPole(2, seed=0)
    env.reset(config={"length": 1.0})
    env.parameter_state.configure({"length": [0.3, 0.4]})
    other = CartPole(2, seed=1)
    other.load_state_dict(env.state_dict())
    assert other.config == {"length": 1.0}
    other.reset()
    assert other.config == {"length": [0.3, 0.4]}
    torch.testing.assert_close(other.carry["parameters"]["length"], torch.tensor([0.3, 0.4]))


def test_a_snapshot_of_another_size_or_state_is_refused_with_what_differs():
    class Changed(CartPole):
        """CartPole whose author gave it another part of the state."""

        def initial_state(self, parameters, noise):
            return super().initial_state(parameters, noise) | {"tired": torch.zeros(self.num_envs)}

    before, after = CartPole(2, seed=0), Changed(2, seed=0)
    before.reset()
    after.reset()
    with pytest.raises(ValueError, match="the snapshot has 2 copies, this environment 3"):
        CartPole(3).load_state_dict(before.state_dict())
    after.load_state_dict(after.state_dict())
    shapes = r"{'state/physics': \[2, 4\]}", r"{'state/physics': \[2, 4\], 'state/tired': \[2\]}"
    with pytest.raises(ValueError, match=r"Changed: .* the saved state is {}, .* makes {}\. ".format(*shapes)):
        after.load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match=r"CartPole: .* the saved state is {}, .* makes {}\. ".format(*shapes[::-1])):
        before.load_state_dict(after.state_dict())


def test_config_takes_effect_at_the_next_reset_and_stays():
    env = CartPole(2, seed=0)
    env.reset()
    env.parameter_state.configure({"length": 0.7})
    assert env.config == {}
    env.step(torch.tensor([0, 1]))
    assert env.carry["parameters"]["length"].tolist() == [0.5, 0.5]
    env.reset()
    env.reset(config=None)
    assert env.config == {"length": 0.7}
    assert env.carry["parameters"]["length"].tolist() == pytest.approx([0.7, 0.7])
    env.reset(config={})
    assert env.config == {}
    assert env.carry["parameters"]["length"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("num_envs", [1, 3])
def test_every_parameter_has_one_value_a_copy(num_envs):
    env = CartPole(num_envs, seed=0)
    own = [1.0, 2.0, 3.0][:num_envs]
    env.reset(config={"length": 0.4, "gravity": own, "masspole": torch.tensor(own), "tau": Uniform(0.01, 0.02)})
    parameters = env.carry["parameters"]
    assert {(tuple(value.shape), value.dtype) for value in parameters.values()} == {((num_envs,), torch.float32)}
    assert parameters["gravity"].tolist() == own
    assert parameters["length"].tolist() == pytest.approx([0.4] * num_envs)
    assert parameters["masscart"].tolist() == [1.0] * num_envs
    assert env.noise_width == 5


def test_drawn_parameters_change_where_an_episode_ends_and_nowhere_else():
    env = Countdown(64, seed=0, time_limit=3)
    env.reset(config={"most": Uniform(3, 50), "bonus": Grid([0.0, 0.5])})
    assert env.noise_width == 3
    assert env.carry["parameters"]["bonus"].tolist() == [0.0, 0.5] * 32
    changed = 0
    for _ in range(12):
        before = env.carry["parameters"]
        _, _, terminated, truncated, _ = env.step(torch.zeros(64, dtype=torch.int64))
        done = terminated | truncated
        after = env.carry["parameters"]
        assert torch.equal(after["most"] != before["most"], done)
        assert torch.equal(after["bonus"], before["bonus"])
        assert float(after["most"].min()) >= 3
        assert float(after["most"].max()) <= 50
        # The new episode starts under its own new parameter.
        assert bool((env.carry["state"]["count"] <= after["most"].ceil()).all())
        changed += int(done.sum())
    assert changed > 100


def test_drawn_columns_do_not_touch_the_noise_of_resets():
    plain, drawn = CartPole(8, seed=0), CartPole(8, seed=0)
    noise = torch.rand(8, 6)
    plain.restart(noise[:, :4])
    drawn.parameter_state.configure({"length": Uniform(0.2, 0.8), "gravity": Uniform(5, 10)})
    drawn.parameter_state.adopt()
    carry, obs = drawn.restart(noise)
    assert torch.equal(obs, plain.restart(noise[:, :4])[1])
    # One column each, in the order in which the class declares the parameters.
    torch.testing.assert_close(carry["parameters"]["gravity"], 5 + 5 * noise[:, 4])
    torch.testing.assert_close(carry["parameters"]["length"], 0.2 + 0.6 * noise[:, 5])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lenght": 1.0}, "Did you mean 'length'"),
        ({"lenght": 1.0}, r"gravity in \[0.1, 100\] m/s\^2"),
        ({"length": 99.0}, r"env_config\['length'\] must be in \[0.025, 10\] m; got 99"),
        ({"length": [0.5, -1.0]}, "got -1"),
        ({"length": float("nan")}, "got nan"),
        ({"length": [0.5, 0.5, 0.5]}, r"has 3 values for 2 copies \(`num_envs`\)"),
        ({"length": "long"}, "got 'long'"),
        ({"length": None}, "got None"),
        ({"length": True}, "must be a number, .*; got True"),
        ({"length": Uniform(0.1, 50)}, "reaches from 0.1 to 50"),
        ({"length": {"unifrom": [0.1, 0.2]}}, "Did you mean 'uniform'"),
        ({"length": {"uniform": [0.2, 0.1]}}, "must not exceed"),
        ({"length": np.full(3, 0.5)}, r"has 3 values for 2 copies"),
        ({"length": np.full((2, 1), 0.5)}, r"got shape \[2, 1\]"),
        ({"length": Grid([0.1, 0.2, 0.3])}, r"Grid of 3 values, but there are 2 copies \(`num_envs`\).*num_envs=3"),
        ({"length": Normal(20, 1)}, "mean lies outside"),
    ],
)
def test_a_wrong_config_says_what_is_legal(config, message):
    env = CartPole(2, seed=0)
    env.reset(config={"length": 0.6})
    state = env.generator.get_state()
    with pytest.raises(ValueError, match=message) as caught:
        env.reset(config=config)
    assert str(caught.value).startswith("CartPole: env_config")
    assert "\n" not in str(caught.value)
    assert env.config == {"length": 0.6}
    assert torch.equal(env.generator.get_state(), state)


def test_what_a_config_says_is_found_out_anew_where_anything_in_it_has_changed():
    env = CartPole(2, seed=0)
    config = {"length": Uniform(0.2, 0.8), "gravity": 9.0}
    copies = [5.0, 6.0]
    for change in ({}, {"gravity": 8.0}, {"length": Uniform(0.2, 0.7)}, {"length": copies}, {"masspole": 0.2}):
        config |= change
        for _ in range(2):
            assert env.plain_config(config) == CartPole(2).plain_config(config)
    copies[0] = 7.0
    assert env.plain_config(config)["length"] == [7.0, 6.0]
    env.plain_config({"length": 1.0})
    with pytest.raises(ValueError, match="must be a number"):
        env.plain_config({"length": True})  # which equals 1.0
    # Draws take noise in the order of the names.
    one, other = {"length": Uniform(0.2, 0.8), "gravity": Uniform(5, 20)}, {"gravity": Uniform(5, 20)}
    other["length"] = one["length"]
    for config in (one, other):
        _, fresh = env.reset(config=config, seed=1), CartPole(2, seed=1)
        fresh.reset(config=config)
        assert torch.equal(env.carry["parameters"]["length"], fresh.carry["parameters"]["length"])


def test_time_limit_argument():
    assert CartPole(1).time_limit == 500
    assert CartPole(1, time_limit=None).time_limit is None
    assert CartPole(1, time_limit=None).episodic
    assert not Pendulum(1, time_limit=None).episodic
    assert DiscreteDummy(1, time_limit=3).episodic


def test_what_a_user_does_to_an_observation_does_not_reach_the_physics():
    one, two = CartPole(4, seed=0), CartPole(4, seed=0)
    obs, _ = one.reset()
    obs.mul_(100)
    two.reset()
    for row in rollout(one, 5):
        row[0].add_(7)
        row[1].add_(7)
    assert torch.equal(one.step(torch.zeros(4, dtype=torch.int64))[1], torch.ones(4))
    rollout(two, 5)
    two.step(torch.zeros(4, dtype=torch.int64))
    assert torch.equal(one.carry["state"]["physics"], two.carry["state"]["physics"])


def test_the_program_key_tells_what_is_built_in():
    env = CartPole(4, seed=0)
    env.reset()
    key = env.program_key
    env.reset(config={"length": 0.7})
    assert env.program_key == key  # a value is data
    env.reset(config={"length": [0.7] * 4})
    assert env.program_key == key  # so are values for each copy
    env.reset(config={"length": Uniform(0.2, 0.8)})
    assert env.program_key != key


@pytest.mark.parametrize(
    ("kind", "actions"), [(CartPole, np.zeros(4, np.uint8)), (Pendulum, np.full((4, 1), 0.5, np.float64))]
)
def test_actions_of_other_types_do_what_those_of_a_policy_do(kind, actions):
    steps = []
    for taken in (actions, torch.from_numpy(actions).to(torch.int64 if kind is CartPole else torch.float32)):
        env = kind(4, seed=0)
        env.reset()
        steps.append(env.step(taken)[:2])
    (obs, rewards), (expected, expected_rewards) = steps
    assert (obs.dtype, rewards.dtype) == (torch.float32, torch.float32)
    assert torch.equal(obs, expected)
    assert torch.equal(rewards, expected_rewards)

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from rl8x.envs import CartPole, ContinuousDummy, DiscreteDummy, MountainCar
from rl8x.envs.base import Env, Parameter
from rl8x.randomization import Grid, Uniform


class Countdown(Env):
    """Count down from a start drawn in 1..`most`; action 1 counts double. Terminates at 0 or below. Adds step noise."""

    single_observation_space = Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = Discrete(2)
    parameters = {  # noqa: RUF012
        "most": Parameter(default=4.0, low=1.0, high=100.0, unit="steps", description="largest start"),
        "bonus": Parameter(default=0.0, low=-1.0, high=1.0, unit="", description="added to each reward"),
    }
    terminates = True
    reset_noise = step_noise = 1

    def initial_state(self, parameters, noise):
        return {"count": torch.floor(noise[:, 0] * parameters["most"]) + 1, "draws": noise.expand(-1, 2)}

    def transition(self, state, actions, parameters, noise):
        count = state["count"] - 1 - actions
        draws = torch.cat((state["draws"][:, 1:], noise), 1)
        return {"count": count, "draws": draws}, count.abs() + parameters["bonus"], count <= 0

    def observe(self, state, parameters):
        return torch.stack((state["count"], state["draws"][:, 1]), 1)


class Oracle:
    """One copy of Countdown in plain Python, fed the same noise."""

    def __init__(self, noise, limit):
        self.limit = limit
        self.start(noise)

    def start(self, noise):
        self.count, self.draw = float(np.floor(noise * 4) + 1), noise
        self.length, self.total = 0, 0.0

    def step(self, action, step_noise, reset_noise):
        """Return what a step has, up to the observation before a reset, and that after it."""
        self.count -= 1 + action
        self.draw = step_noise
        self.length += 1
        self.total += abs(self.count)
        terminated, truncated = self.count <= 0, self.limit is not None and self.length >= self.limit
        row = [abs(self.count), terminated, truncated, self.total, self.length, [self.count, self.draw]]
        if terminated or truncated:
            self.start(reset_noise)
        return [*row, [self.count, self.draw], self.total, self.length]


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
        told = (step.rewards, step.terminated, step.truncated, step.episode_returns, step.episode_lengths)
        told = (*told, step.final_obs, step.obs, carry["returns"], carry["elapsed"])
        for i, (oracle, *row) in enumerate(zip(oracles, *(each.tolist() for each in told), strict=True)):
            assert row == oracle.step(int(actions[i]), *noise[t, i].tolist())
            ended += row[1] or row[2]
    assert ended > 50
    assert step.valid is None


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


def test_config_takes_effect_at_the_next_reset_and_stays_also_in_a_snapshot():
    env, other = CartPole(2, seed=0), CartPole(2, seed=1)
    env.reset(config={"length": 1.0})
    env.parameter_state.configure({"length": torch.tensor([0.25, 0.5])})
    other.load_state_dict(env.state_dict())
    for each in (env, other):
        assert each.config == {"length": 1.0}
        each.step(torch.tensor([0, 1]))
        assert each.carry["parameters"]["length"].tolist() == [1.0, 1.0]
        each.reset()
        each.reset(config=None)
        assert each.config == {"length": [0.25, 0.5]}
        assert each.carry["parameters"]["length"].tolist() == [0.25, 0.5]
        each.reset(config={})
        assert each.config == {}
        assert each.carry["parameters"]["length"].tolist() == [0.5, 0.5]


def test_drawn_parameters_change_where_an_episode_ends_and_nowhere_else():
    env = Countdown(64, seed=0, time_limit=3)
    env.reset(config={"most": Uniform(3, 50), "bonus": Grid([0.0, 0.5])})
    assert env.noise_width == 3
    assert env.carry["parameters"]["bonus"].tolist() == [0.0, 0.5] * 32
    changed = 0
    for _ in range(12):
        before = env.carry["parameters"]
        _, _, terminated, truncated, info = env.step(torch.zeros(64, dtype=torch.int64))
        done = terminated | truncated
        after = env.carry["parameters"]
        # It is drawn by numbers of its own, neither those of the step nor those of the new state.
        for draws in (info["final_obs"][:, 1], env.carry["state"]["draws"][:, 0]):
            assert not torch.isclose((after["most"] - 3) / 47, draws)[done].any()
        assert torch.equal(after["most"] != before["most"], done)
        assert torch.equal(after["bonus"], before["bonus"])
        assert float(after["most"].min()) >= 3
        assert float(after["most"].max()) <= 50
        # The new episode starts under its own new parameter.
        assert bool((env.carry["state"]["count"] <= after["most"].ceil()).all())
        changed += int(done.sum())
    assert changed > 100


def test_a_config_that_is_refused_changes_nothing():
    env = CartPole(2, seed=0)
    env.reset(config={"length": 0.6})
    state = env.generator.get_state()
    with pytest.raises(ValueError, match="got 99"):
        env.reset(config={"length": 99.0})
    assert env.config == {"length": 0.6}
    assert torch.equal(env.generator.get_state(), state)


def test_what_a_config_says_is_found_out_anew_where_anything_in_it_has_changed():
    env, copies = CartPole(2, seed=0), [5.0, 6.0]
    config = {"length": Uniform(0.2, 0.8), "gravity": 9.0}
    for change in ({}, {"gravity": 8.0}, {"length": Uniform(0.2, 0.7)}, {"length": copies}, {"masspole": 0.2}):
        config |= change
        for _ in range(2):
            assert env.plain_config(config) == CartPole(2).plain_config(config)
    copies[0] = 7.0
    assert env.plain_config(config)["length"] == [7.0, 6.0]
    env.plain_config({"length": 1.0})
    with pytest.raises(ValueError, match="must be a number"):
        env.plain_config({"length": True})  # which equals 1.0


@pytest.mark.parametrize("kind", [CartPole, DiscreteDummy])  # whose observation is its state, and which never ends
def test_what_a_user_does_to_an_observation_does_not_reach_the_physics(kind):
    one, two = kind(4, seed=0), kind(4, seed=0)
    obs, _ = one.reset()
    two.reset()
    obs.mul_(100)
    for _ in range(5):
        obs, *_, info = one.step(torch.ones(4, dtype=torch.int64))
        two.step(torch.ones(4, dtype=torch.int64))
        obs.add_(7), info["final_obs"].add_(7)
    assert all(torch.equal(part, two.carry["state"][name]) for name, part in one.carry["state"].items())


@pytest.mark.parametrize(
    ("kind", "actions"), [(MountainCar, np.zeros(4, np.uint8)), (ContinuousDummy, np.full((4, 1), 0.1, np.float64))]
)
def test_actions_of_other_types_do_what_those_of_a_policy_do(kind, actions):
    steps = []
    for taken in (actions, torch.from_numpy(actions).to(torch.int64 if kind is MountainCar else torch.float32)):
        env = kind(4, seed=0)
        env.reset()
        steps.append(env.step(taken)[:2])
    assert steps[0][0].dtype == steps[0][1].dtype == torch.float32
    torch.testing.assert_close(*steps, rtol=0, atol=0)

from __future__ import annotations

import functools
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit, TransformReward

from rl8x import PPOConfig, keys
from rl8x.envs import GymnasiumEnv
from rl8x.trees import tree_map


class Toy(gymnasium.Env):
    """Episodes of random length, told by the observation; every number is known from the seed."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 6))
        self.time = 0
        return self.observation(), {}

    def observation(self):
        return np.array([self.left, self.time, self.np_random.random()])

    def step(self, action):
        self.left -= 1
        self.time += 1
        reward = float(self.left + 10 * action)
        ended = self.left == 0
        # Odd lengths terminate, even ones are truncated.
        return self.observation(), reward, ended and self.time % 2 == 1, ended and self.time % 2 == 0, {}


class DictToy(Toy):
    observation_space = spaces.Dict({"x": Toy.observation_space, "more": spaces.Dict({"left": spaces.Discrete(9)})})
    action_space = spaces.Discrete(2, start=3)

    def observation(self):
        return {"x": super().observation(), "more": {"left": self.left}}

    def step(self, action):
        assert action in (3, 4)
        return super().step(action - 3)


class Strict(Toy):
    """Refuses actions beyond its bounds, which float32 has not to the last digit."""

    action_space = spaces.Box(np.array([-0.1, 0.3, -np.inf]), np.array([0.1, 5.7, 0.7]), dtype=np.float64)

    def step(self, action):
        assert self.action_space.contains(action), action
        return super().step(0)


class Odd(DictToy):
    """Observes what lies in memory from its end, in the other order of bytes, as what is read from a file may.

    It gives a `Tuple` as a list and a `Box` as a tuple of numbers.
    """

    observation_space = spaces.Dict(
        {**DictToy.observation_space, "loose": Toy.observation_space, "pair": spaces.Tuple([spaces.Discrete(9)] * 2)}
    )

    def observation(self):
        obs = super().observation()
        backwards = obs["x"][::-1].astype(obs["x"].dtype.newbyteorder())[::-1]
        return {**obs, "x": backwards, "loose": tuple(obs["x"].tolist()), "pair": [self.left, self.time]}


def test_arrays_in_any_order_and_parts_in_any_form_are_observed_also_where_an_episode_ends():
    odd, plain = (PPOConfig(num_envs=3, seed=0, device="cpu").build(make).env for make in (Odd, DictToy))
    odd.reset(), plain.reset()
    for _ in range(9):  # whose last observations are given one by one
        one, other = (env.step(torch.full((3,), 3)) for env in (odd, plain))
        for mine, theirs in ((one[0], other[0]), (one[4]["final_obs"], other[4]["final_obs"])):
            expected = [theirs["x"], theirs["x"], theirs["more"]["left"]]
            torch.testing.assert_close([mine["x"], mine["loose"], mine["pair"]["0"]], expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_spaces_of_numbers_in_the_other_order_of_bytes_are_those_of_float32(dtype):
    swapped = np.dtype(dtype).newbyteorder()

    class Swapped(gymnasium.Env):
        observation_space = spaces.Box(-1.0, 1.0, (2,), swapped)
        action_space = spaces.Box(-1.0, 1.0, (1,), swapped)

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, swapped), {}

        def step(self, action):
            assert self.action_space.contains(action), action
            return np.array([0.25, -0.5], swapped), 1.0, False, False, {}

    algorithm = PPOConfig(num_envs=2, horizon=4, device="cpu").build(functools.partial(GymnasiumEnv, Swapped))
    algorithm.collect()
    env = algorithm.env
    assert env.single_observation_space == spaces.Box(-1.0, 1.0, (2,), np.float32)
    assert env.single_action_space == spaces.Box(-1.0, 1.0, (1,), np.float32)
    assert algorithm.rollout.tree(keys.OBS)[1].tolist() == [[0.25, -0.5]] * 2


@pytest.mark.parametrize("mode", AutoresetMode)
def test_whole_numbers_that_torch_hardly_supports_are_observed_in_a_wider_type(mode):
    class Depth(gymnasium.Env):
        observation_space = spaces.Dict({"depth": spaces.Box(0, 65_535, (1,), np.uint16), "id": IDS})
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.time = 65_533
            return self.seen(), {}

        def seen(self):
            return {"depth": np.array([self.time], np.uint16), "id": IDS.high}

        def step(self, action):
            self.time += 1
            return self.seen(), 1.0, self.time == 65_535, False, {}

    env = GymnasiumEnv(gymnasium.vector.SyncVectorEnv([Depth] * 2, autoreset_mode=mode))
    algorithm = PPOConfig(num_envs=2, horizon=6, seed=0, device="cpu").build(env)
    algorithm.collect()
    seen = algorithm.rollout.tree(keys.OBS)
    lost = [65_535] if mode == AutoresetMode.NEXT_STEP else []  # its row is no experience
    assert seen["depth"][:4, 0, 0].tolist() == ([65_533, 65_534, *lost, 65_533, 65_534])[:4]
    assert (seen["id"] == 2**32 - 1).all()
    assert algorithm.policy.decide({"depth": np.array([65_535], np.uint16), "id": IDS.high}).actions in (0, 1)


IDS = spaces.Box(0, 2**32 - 1, (1,), np.uint32)


def test_bounds_of_actions_in_float32_are_no_wider_than_the_simulators():
    env = GymnasiumEnv(Strict, 2, seed=1)
    space = env.single_action_space
    env.reset()
    for bound, wanted in ((space.low, Strict.action_space.low), (space.high, Strict.action_space.high)):
        np.testing.assert_allclose(bound, wanted, rtol=2e-7)
        env.step(torch.as_tensor(np.maximum(bound, -1e3)).expand(2, 3))
    with pytest.raises(AssertionError):
        env.step(torch.tensor([0.1, 1.0, 0.0]).expand(2, 3))


def oracle(num_envs, steps, seed, actions, factory=Toy):
    """Step single environments in a Python loop with same-step resets: the truth for every mode, by a step's names."""
    rows = []
    envs = [factory() for _ in range(num_envs)]
    first = [env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]
    returns, lengths = [0.0] * num_envs, [0] * num_envs
    for t in range(steps):
        row = []
        for i, env in enumerate(envs):
            final, reward, terminated, truncated, _ = env.step(actions[t][i])
            returns[i] += reward
            lengths[i] += 1
            entry = {"final_obs": final, "rewards": reward, "terminated": terminated, "truncated": truncated}
            entry |= {"episode_returns": returns[i], "episode_lengths": lengths[i], "obs": final}
            if terminated or truncated:
                entry["obs"], _ = env.reset()
                returns[i], lengths[i] = 0.0, 0
            row.append(entry)
        rows.append(row)
    return first, rows


DISABLED = AutoresetMode.DISABLED


def close_to(part, values):
    if isinstance(part, dict):
        for key, inner in part.items():
            close_to(inner, [value[key] for value in values])
        return
    np.testing.assert_allclose(part.float().numpy(), np.asarray(values, dtype=np.float32), rtol=1e-6)


def compare(step, entries, copies=slice(None)):
    """Each field of a step has, in some copies, what the oracle says."""
    for name in entries[0]:
        close_to(tree_map(lambda part: part[copies], getattr(step, name)), [entry[name] for entry in entries])


@pytest.mark.parametrize(
    ("make", "factory"),
    [
        (lambda **options: GymnasiumEnv(Toy, 3, **options), Toy),
        (lambda **options: GymnasiumEnv(Toy, 3, vectorization="async", **options), Toy),
        (lambda **options: GymnasiumEnv(SyncVectorEnv([Toy] * 3, autoreset_mode=DISABLED), **options), Toy),
        (lambda **options: GymnasiumEnv(DictToy, 3, **options), DictToy),  # in parts, with actions from 3
    ],
    ids=["sync", "async", "disabled", "nested"],
)
def test_copies_that_are_reset_in_the_same_step_equal_a_loop_over_single_ones(make, factory):
    num_envs, steps = 3, 30
    env = make(seed=7)
    actions = np.random.default_rng(0).integers(0, 2, (steps, num_envs)) + (3 if factory is DictToy else 0)
    assert env.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert env.gives_final_obs
    assert env.single_action_space == factory.action_space
    first, rows = oracle(num_envs, steps, 7, actions, factory)
    obs, _ = env.reset()
    close_to(obs, first)
    assert (obs["x"] if factory is DictToy else obs).dtype == torch.float32
    ended = 0
    for t, row in enumerate(rows):
        env.carry, step = env.advance(env.carry, torch.as_tensor(actions[t]), env.noise(1)[0])
        compare(step, row)
        assert step.valid is None
        ended += int((step.terminated | step.truncated).sum())
    assert ended > steps * num_envs / 6
    env.close()


def rewarding_resets(copies):
    """A wrapper that rewards each row, that of a reset too."""
    return gymnasium.wrappers.vector.TransformReward(SyncVectorEnv(copies), lambda rewards: rewards + 10.0)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv, rewarding_resets])
def test_next_step_mode_gives_the_same_experience_with_filler_rows_marked(kind):
    num_envs, steps, more = 3, 60, 10.0 if kind is rewarding_resets else 0.0
    env = GymnasiumEnv(kind([Toy] * num_envs), seed=5)
    assert env.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    obs, _ = env.reset()
    actions = np.zeros((steps, num_envs), np.int64)  # none of a filler's, so that the oracle's are the same
    _, rows = oracle(num_envs, steps, 5, actions)
    position, fillers, was_done = [0] * num_envs, 0, torch.zeros(num_envs, dtype=torch.bool)
    for t in range(steps):
        before = obs
        env.carry, step = env.advance(env.carry, torch.as_tensor(actions[t]), env.noise(1)[0])
        obs = step.obs
        assert torch.equal(~step.valid, was_done)
        for i in range(num_envs):
            if not step.valid[i]:
                # The row only resets: what it leads to is the first observation of the oracle's next episode.
                fillers += 1
                previous = rows[position[i] - 1][i]
                close_to(before[i], previous["final_obs"])
                filler = {"rewards": 0.0, "terminated": False, "truncated": True, "obs": previous["obs"]}
                compare(step, [filler | {"episode_lengths": 0, "episode_returns": 0.0}], [i])
                continue
            entry = rows[position[i]][i]
            position[i] += 1
            returns = entry["episode_returns"] + more * entry["episode_lengths"]
            expected = {"obs": entry["final_obs"], "rewards": entry["rewards"] + more, "episode_returns": returns}
            compare(step, [entry | expected], [i])
        was_done = (step.terminated | step.truncated) & step.valid
    assert fillers > 20
    env.close()


LIMITS = [lambda limit=limit: TimeLimit(Toy(), limit) for limit in (3, 5)]


@pytest.mark.parametrize(
    ("made", "options", "limit"),
    [
        ("CartPole-v1", {"observe_parameters": "none"}, 500),
        ("CartPole-v1", {"vectorization": "vector"}, 500),
        ("CartPole-v1", {"vectorization": "vector", "time_limit": 7}, 7),
        ("CartPole-v1", {"vectorization": "vector", "time_limit": None}, None),
        ("Pendulum-v1", {"time_limit": None}, None),
        (lambda: gymnasium.make("Pendulum-v1"), {}, 200),
        (Toy, {}, None),
        (lambda: TransformReward(TimeLimit(Toy(), 20), float), {}, 20),
        (lambda: TimeLimit(gymnasium.make("CartPole-v1"), 700), {}, 500),  # the first to cut
        (SyncVectorEnv(LIMITS), {}, 5),
        (SyncVectorEnv([*LIMITS, Toy]), {}, None),
    ],
)
def test_time_limits(made, options, limit):
    assert GymnasiumEnv(made, None if isinstance(made, SyncVectorEnv) else 1, **options).time_limit == limit


def test_a_mode_of_no_such_name_is_refused():
    vector_env = SyncVectorEnv([Toy] * 2)
    vector_env.metadata = {"autoreset_mode": "NextStep"}
    assert GymnasiumEnv(vector_env).autoreset_mode == AutoresetMode.NEXT_STEP
    vector_env.metadata = {"autoreset_mode": "never"}
    with pytest.raises(ValueError, match=r"must be one of 'NextStep', 'SameStep', 'Disabled'; got 'never'\."):
        GymnasiumEnv(vector_env)


def two_steps():
    return TransformReward(gymnasium.make("Pendulum-v1", max_episode_steps=2), float)


@pytest.mark.parametrize(
    ("made", "kind", "limit", "ends"),
    [
        (two_steps, "sync", ..., [2, 4, 6]),
        (two_steps, "sync", None, []),
        (lambda: TimeLimit(two_steps(), 4), "sync", None, []),
        (two_steps, "sync", 5, [5]),
        (two_steps, "sync", 3, [3, 6]),
        ("Pendulum-v1", "sync", 3, [3, 6]),
        ("CartPole-v1", "vector", 3, [3, 7]),  # after a row that only resets
        ("CartPole-v1", "vector", None, []),
    ],
)
def test_a_time_limit_takes_the_place_of_the_simulators_own(made, kind, limit, ends):
    env = GymnasiumEnv(made, 2, vectorization=kind, time_limit=limit, seed=0)
    env.reset()
    truncated = torch.stack([env.step(np.zeros_like(env.action_space.sample()))[3] for _ in range(7)])
    assert [t + 1 for t in range(7) if truncated[t].all()] == ends
    assert truncated.sum() == 2 * len(ends)


def test_an_unsupported_space_closes_the_copies():
    closed = []
    talking = type("Talking", (Toy,), {"action_space": spaces.Text(3), "close": lambda self: closed.append(self)})
    with pytest.raises(ValueError, match=r"Talking.single_action_space must be .*; got Text"):
        GymnasiumEnv(talking, 2)
    assert len(closed) == 2


def test_close_ends_the_workers():
    env = GymnasiumEnv("CartPole-v1", 2, vectorization="async", seed=0)
    env.reset()
    processes = env.vector_env.processes
    for alive in (True, False):
        assert [process.is_alive() for process in processes] == [alive] * 2
        env.close()


UNGUARDED = """
import multiprocessing
multiprocessing.set_start_method("forkserver")  # what Python 3.14 does
from rl8x.envs import GymnasiumEnv
env = GymnasiumEnv("CartPole-v1", num_envs=2, vectorization="async")
print(tuple(env.reset(seed=0)[0].shape))
env.close()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forked before Python 3.14")
def test_a_script_that_does_not_guard_its_main_has_copies_in_processes(tmp_path):
    (script := tmp_path / "script.py").write_text(UNGUARDED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert done.stdout == "(2, 4)\n", done.stderr


def test_what_an_environment_needs_and_is_not_there_is_said_in_one_line(monkeypatch):
    def missing(*args, **kwargs):
        raise gymnasium.error.DependencyNotInstalled("Box2D is not installed")

    with pytest.raises(ValueError, match="'HalfCheetah-v2' cannot be made: The mujoco v2 and v3 based environments"):
        GymnasiumEnv("HalfCheetah-v2", num_envs=2)
    monkeypatch.setattr(gymnasium, "make_vec", missing)
    with pytest.raises(ValueError, match="'LunarLander-v3' cannot be made: Box2D is not installed"):
        GymnasiumEnv("LunarLander-v3", num_envs=2)

"""What Gymnasium asks of vector environments, asked of the built-in ones, as tensors and as arrays.

The checks follow Gymnasium's own tests of its vector environments: spaces, types, seeds, autoreset, `info`,
registration, and its vector wrappers.
"""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers import vector as wrappers

from rl8x.envs import BUILTIN, Env, NumpyEnv, make

NUM_ENVS = 3


def actions_of(env, t):
    env.action_space.seed(t)
    return env.action_space.sample()


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_environments_are_vector_environments(name):
    one, two = (NumpyEnv(make(name, NUM_ENVS, time_limit=5)) for _ in range(2))
    env = one.env
    for vector in (env, one):
        assert isinstance(vector, VectorEnv)
        assert vector.num_envs == NUM_ENVS * env.num_agents
        assert vector.unwrapped is env
        assert vector.observation_space == batch_space(vector.single_observation_space, env.num_envs)
        assert vector.action_space == batch_space(vector.single_action_space, env.num_envs)
        assert vector.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
        assert vector.render_mode == "rgb_array"
    kept = [one.reset(seed=3)]
    copies = [copy.deepcopy(kept[0])]
    assert kept[0][0] in one.observation_space
    assert kept[0][1] == {}
    assert data_equivalence(kept[0], two.reset(seed=3), exact=True)
    for t in range(12):
        actions = actions_of(one, t)
        kept.append(one.step(actions))
        copies.append(copy.deepcopy(kept[-1]))
        assert data_equivalence(kept[-1], two.step(actions), exact=True)
        obs, *numbers, info = kept[-1]
        assert obs in one.observation_space
        assert isinstance(info, dict)
        for array, dtype in zip(numbers, (np.floating, np.bool_, np.bool_), strict=True):
            assert isinstance(array, np.ndarray)
            assert array.shape == (one.num_envs,)
            assert np.issubdtype(array.dtype, dtype)
    assert data_equivalence(kept, copies, exact=True)  # what was returned does not change later
    assert data_equivalence(one.reset(seed=3), kept[0], exact=True)
    if name != "AlgoTrading":  # its episodes differ by what is not shown at first
        assert not np.array_equal(kept[0][0], one.reset(seed=4)[0])
    one.close()


def test_same_step_autoreset_step_by_step():
    env = NumpyEnv(Counter(3, seed=0))
    assert env.reset()[0].tolist() == [[0.0], [0.0], [0.0]]
    # Copy i counts to 2 + i, which ends its episode.
    obs, rewards, terminated, truncated, info = env.step(np.array([0, 1, 1]))
    assert (obs[:, 0].tolist(), rewards.tolist(), info) == ([1, 1, 1], [0, 1, 1], {})
    obs, _, terminated, truncated, info = env.step(np.array([0, 1, 1]))
    assert obs[:, 0].tolist() == [0, 2, 2]
    assert (terminated.tolist(), truncated.tolist()) == ([True, False, False], [False] * 3)
    assert info["_final_obs"].tolist() == info["_final_info"].tolist() == [True, False, False]
    assert info["final_obs"].dtype == object
    assert info["final_obs"][0].tolist() == [2.0]
    assert info["final_obs"][1] is None
    assert info["final_obs"][0] in env.single_observation_space
    obs, _, terminated, _, info = env.step(np.array([1, 0, 1]))
    assert (obs[:, 0].tolist(), terminated.tolist()) == ([1, 0, 3], [False, True, False])
    assert info["final_info"]["episode"]["r"].tolist() == [0, 2, 0]
    assert info["final_info"]["episode"]["l"].tolist() == [0, 3, 0]
    assert info["final_info"]["_episode"].tolist() == [False, True, False]


class Counter(Env):
    """Counts to 2 + i in copy i; the reward is the action."""

    single_observation_space = spaces.Box(0, 9, (1,), np.float32)
    single_action_space = spaces.Discrete(2)
    terminates = True

    def initial_state(self, parameters, noise):
        return {"n": torch.zeros(self.num_envs)}

    def transition(self, state, actions, parameters, noise):
        n = state["n"] + 1
        return {"n": n}, actions.float(), n >= torch.arange(self.num_envs) + 2

    def observe(self, state, parameters):
        return state["n"].unsqueeze(-1)


class Parts(Counter):
    """The same with observations and actions of parts."""

    single_observation_space = spaces.Tuple(
        [spaces.Box(0, 9, (1,), np.float32), spaces.Dict({"n": spaces.Discrete(9)})]
    )
    single_action_space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Discrete(3)])})

    def transition(self, state, actions, parameters, noise):
        return super().transition(state, actions["a"] + actions["b"]["0"], parameters, noise)

    def observe(self, state, parameters):
        return {"0": super().observe(state, parameters), "1": {"n": state["n"].long()}}


def test_spaces_of_parts_have_gymnasiums_form():
    env = NumpyEnv(Parts(3, seed=0))
    obs, _ = env.reset()
    assert obs in env.observation_space
    for t in range(5):
        obs, _, _, _, info = env.step(actions_of(env, t))
        assert obs in env.observation_space
        for final in info.get("final_obs", []):
            assert final is None or final in env.single_observation_space


def test_gymnasiums_wrappers_take_it():
    env = NumpyEnv(make("Pendulum", NUM_ENVS, seed=0))
    # Its wrappers of observations refuse same-step autoreset, its own environments' too.
    env = wrappers.DictInfoToList(wrappers.RescaleAction(wrappers.ClipReward(env, -1.0, 1.0), -1.0, 1.0))
    env.reset(seed=0)
    for t in range(3):
        obs, rewards, _, _, infos = env.step(actions_of(env, t))
        assert obs in env.observation_space
        assert (rewards >= -1.0).all()
        assert isinstance(infos, list)


def test_registration_by_a_vector_entry_point():
    gymnasium.register(
        "rl8x/CartPole-v0", vector_entry_point="rl8x.envs.numpy_env:make_vector_env", kwargs={"name": "CartPole"}
    )
    try:
        env = gymnasium.make_vec("rl8x/CartPole-v0", num_envs=5, vectorization_mode="vector_entry_point", seed=0)
        assert env.spec.id == "rl8x/CartPole-v0"
        obs, _ = env.reset(seed=0)
        assert obs.shape == (5, 4)
        assert env.step(np.zeros(5, np.int64))[1].tolist() == [1.0] * 5
        env.close()
    finally:
        del gymnasium.registry["rl8x/CartPole-v0"]

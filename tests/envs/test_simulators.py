"""Other simulators, each tested against the real package where it is installed."""

from __future__ import annotations

import functools
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from rl8x import PPOConfig
from rl8x.envs import GymnasiumEnv
from rl8x.envs.brax_env import BraxEnv
from rl8x.envs.vmas_env import VmasEnv


def needs(package):
    return pytest.importorskip(package, reason=f"{package} is not installed: pip install 'rl8x[{package}]'")


def train(env, **options):
    """Train two steps on an environment, and return the last statistics."""
    small = {"num_envs": env.num_envs, "horizon": 8, "seed": 0, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    algorithm = PPOConfig(**(small | options)).build(env)
    for _ in range(2):
        stats = dict(algorithm.collect()) | dict(algorithm.step())
    assert all(np.isfinite(value) for value in stats.values())
    return stats


def test_mujoco_through_gymnasium():
    needs("mujoco")
    env = GymnasiumEnv("InvertedPendulum-v5", 3, seed=0, time_limit=20, metrics={"reward_survive": "sum"})
    reference = gymnasium.make("InvertedPendulum-v5")
    obs, _ = env.reset()
    np.testing.assert_allclose(obs[0], reference.reset(seed=0)[0], rtol=1e-6)
    action = np.array([0.1], np.float32)
    obs, *_ = env.step(torch.full((3, 1), 0.1))
    np.testing.assert_allclose(obs[0], reference.step(action)[0], rtol=1e-5)
    stats = train(env, horizon=48)
    assert stats["episodes/info/reward_survive/mean"] == pytest.approx(stats["episodes/returns/mean"])
    env.close()


def test_envpool_through_gymnasiums_api():
    envpool = needs("envpool")
    env = GymnasiumEnv(envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, seed=3))
    assert env.autoreset_mode is AutoresetMode.NEXT_STEP
    env.reset()
    returns, rows = torch.zeros(4), 0
    for _ in range(60):
        carry, step = env.advance(env.carry, torch.zeros(4, dtype=torch.int64), torch.empty(4, 0))
        env.carry = carry
        returns = returns + torch.where(step.valid, step.rewards, 0.0)
        ended = step.terminated & step.valid
        # The row after an end is a reset: no experience, and the episode's return is what was counted by hand.
        assert torch.equal(step.episode_returns[ended], returns[ended])
        returns = torch.where(ended, 0.0, returns)
        rows += int((~step.valid).sum())
    assert rows > 10
    assert train(env, horizon=32)["episodes/ended"] > 0
    env.close()


def test_vmas_agents_share_a_policy():
    needs("vmas")
    env = VmasEnv("balance", 6, seed=0, time_limit=5, metrics={"pos_rew": "sum"}, n_agents=3)
    assert (env.num_agents, env.num_worlds) == (3, 2)
    from vmas import make_env

    reference = make_env("balance", num_envs=2, device="cpu", terminated_truncated=True, seed=0, n_agents=3)
    expected = torch.cat(reference.reset(seed=0))
    obs, _ = env.reset(seed=0)
    torch.testing.assert_close(obs, expected)
    actions = torch.linspace(-1, 1, 12).view(6, 2)
    for t in range(5):
        obs, rewards, _, truncated, info = env.step(actions)
        parts = reference.step(list(actions.clone().view(3, 2, 2)))
        torch.testing.assert_close(info["final_obs"], torch.cat(parts[0]))
        torch.testing.assert_close(rewards, torch.cat(parts[1]))
        assert truncated.all() == (t == 4)
    assert not torch.allclose(obs, info["final_obs"])  # reset
    stats = train(env)
    assert "episodes/info/pos_rew/mean" in stats


def test_vmas_worlds_are_whole():
    needs("vmas")
    with pytest.raises(ValueError, match=r"multiple of the 3 agents of a world; got 7. Try 6"):
        VmasEnv("balance", 7, n_agents=3)
    make = functools.partial(VmasEnv, "balance", n_agents=2)
    algorithm = PPOConfig(num_envs=4, horizon=4, seed=0, device="cpu").build(make, time_limit=3)
    assert algorithm.collect()["episodes/lengths/mean"] == 3.0


def test_a_missing_vmas_is_told(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vmas", None)
    with pytest.raises(RuntimeError, match=r"pip install 'rl8x\[vmas\]'"):
        VmasEnv("balance", 3)


def test_brax_through_dlpack():
    needs("brax")
    import jax
    from brax import envs

    class Walk(envs.Env):
        """Walks from a random place by the action; beyond 1 it ends."""

        observation_size, action_size, backend = 2, 1, "none"

        def reset(self, rng):
            x = jax.random.uniform(rng, (2,))
            return envs.State(None, x, jax.numpy.zeros(()), jax.numpy.zeros(()))

        def step(self, state, action):
            x = state.obs + action[0]
            return state.replace(obs=x, reward=x.sum(), done=(x[0] > 1.0).astype("float32"))

    env = BraxEnv(Walk(), 64, seed=0, time_limit=5)
    obs, _ = env.reset(seed=1)
    assert torch.equal(obs, env.reset(seed=1)[0])
    assert obs.shape == (64, 2)
    lengths, ends = torch.zeros(64), 0
    for _ in range(12):
        before = obs
        obs, rewards, terminated, truncated, info = env.step(torch.full((64, 1), 0.1))
        lengths += 1
        torch.testing.assert_close(info["final_obs"], before + 0.1)
        torch.testing.assert_close(rewards, (before + 0.1).sum(1))
        assert torch.equal(terminated, before[:, 0] + 0.1 > 1.0)
        assert torch.equal(truncated, lengths == 5)
        done = terminated | truncated
        assert torch.equal(obs[~done], info["final_obs"][~done])
        assert (obs[done] != info["final_obs"][done]).all()
        assert bool(((obs[done] >= 0) & (obs[done] <= 1)).all())
        lengths[done] = 0
        ends += int(terminated.sum())
    assert ends > 64
    assert train(env)["episodes/lengths/mean"] <= 5.0
    algorithm = PPOConfig(num_envs=8, horizon=4, seed=0, device="cpu").build(functools.partial(BraxEnv, Walk()))
    algorithm.collect()


def test_mujoco_playground_through_dlpack():
    pytest.importorskip("mujoco_playground", reason="mujoco_playground is not installed: pip install playground")
    import jax
    from mujoco_playground import registry

    simulated = registry.load("CartpoleBalance", config_overrides={"impl": "jax"})
    env = BraxEnv(simulated, 8, seed=0, time_limit=4)
    obs, _ = env.reset(seed=1)
    assert obs.shape == (8, simulated.observation_size)
    assert torch.equal(obs, env.reset(seed=1)[0])
    # The same states, stepped without the adapter.
    state, step = env._simulated, jax.jit(jax.vmap(simulated.step))
    for t in range(4):
        actions = torch.linspace(-1.0, 1.0, 8).unsqueeze(1)
        state = step(state, jax.numpy.asarray(actions.numpy()))
        obs, rewards, terminated, truncated, info = env.step(actions)
        np.testing.assert_allclose(info["final_obs"], state.obs, atol=1e-5)
        np.testing.assert_allclose(rewards, state.reward, atol=1e-5)
        assert not terminated.any()
        assert truncated.all() == (t == 3)
        assert torch.equal(obs, info["final_obs"]) == (t < 3)
    train(env)


def test_a_missing_jax_is_told(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jax", None)
    with pytest.raises(RuntimeError, match=r"pip install 'rl8x\[brax\]'"):
        BraxEnv(None, 3)


class ManiSkillLike(VectorEnv):
    """ManiSkill's documented contract: tensors, dict observations, same-step resets, `final_observation`, `success`."""

    num_envs = 4
    single_observation_space = spaces.Dict({"state": spaces.Box(-np.inf, np.inf, (2,), np.float32)})
    single_action_space = spaces.Box(-1, 1, (2,), np.float32)
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    render_mode = spec = None
    final_key = "final_observation"

    def reset(self, *, seed=None, options=None):
        self.time = torch.zeros(4)
        return self.observation(), {}

    def observation(self):
        return {"state": torch.stack((self.time, torch.arange(4.0)), -1)}

    def step(self, actions):
        assert isinstance(actions, torch.Tensor)
        self.time = self.time + 1
        truncated = self.time >= torch.arange(4) + 3
        final, info = self.observation(), {"success": self.time >= 5}
        if truncated.any():
            info = {"success": torch.zeros(4, dtype=torch.bool), "final_info": info}
            info |= {self.final_key: final, "_final_info": truncated, f"_{self.final_key}": truncated}
            self.time = torch.where(truncated, 0.0, self.time)
        return self.observation(), torch.ones(4), torch.zeros(4, dtype=torch.bool), truncated, info


def test_the_contract_of_maniskill():
    env = GymnasiumEnv(ManiSkillLike())
    env.reset()
    for _ in range(30):
        _, _, _, truncated, info = env.step(torch.zeros(4, 2))
        for i in truncated.nonzero().squeeze(1).tolist():
            assert info["final_obs"]["state"][i].tolist() == [i + 3.0, float(i)]
            assert info["success"][i] == float(i + 3 >= 5)
    assert env.gives_final_obs
    stats = train(env, horizon=16)
    assert 0.0 < stats["episodes/info/success/mean"] < 1.0


class Lossy(ManiSkillLike):
    """A simulator that resets in the same step and does not say what was before, as Isaac Lab by default."""

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        return obs, rewards, terminated, truncated, {"success": info["success"]}


def test_a_lost_final_observation_is_said_once():
    env = GymnasiumEnv(Lossy())
    env.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            env.step(torch.zeros(4, 2))
    assert [str(warning.message).count("does not give the observation before it") for warning in caught] == [1]
    assert not env.gives_final_obs


class IsaacLike(gymnasium.Env):
    """Isaac Lab's documented contract: no `VectorEnv`, groups of observations, same-step resets, means in `log`."""

    num_envs, device = 4, "cpu"
    single_observation_space = spaces.Dict(
        {name: spaces.Box(-np.inf, np.inf, (width,), np.float32) for name, width in (("policy", 2), ("critic", 3))}
    )
    single_action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, compute_final_obs=False):
        self.compute_final_obs = compute_final_obs

    def observation(self):
        return {"policy": self.time.unsqueeze(1).expand(4, 2), "critic": self.time.unsqueeze(1) * torch.ones(3)}

    def reset(self, seed=None, options=None):
        self.time = torch.zeros(4)
        return self.observation(), {}

    def step(self, actions):
        assert isinstance(actions, torch.Tensor)
        self.time = self.time + 1
        terminated, truncated = self.time == torch.tensor([2, 9, 9, 9]), self.time == torch.tensor([9, 3, 4, 5])
        done = terminated | truncated
        extras = {"log": {"Episode_Reward/track": float(self.time[done].mean())}} if done.any() else {"log": {}}
        if self.compute_final_obs and done.any():
            extras["final_obs"] = self.observation()  # of every copy, without a mask, only in steps that reset one
        self.time = torch.where(done, 0.0, self.time)
        return self.observation(), torch.ones(4), terminated, truncated, extras


def test_the_contract_of_isaac_lab():
    env = GymnasiumEnv(IsaacLike(), metrics=["log/Episode_Reward/track"])
    assert (env.num_envs, env.autoreset_mode) == (4, AutoresetMode.SAME_STEP)
    config = {"hidden_sizes": [8], "critic_obs": ["critic"]}
    with pytest.warns(RuntimeWarning, match="does not give the observation before it"):
        stats = train(env, horizon=16, model_config=config)
    assert 2.0 <= stats["episodes/info/log/Episode_Reward/track/mean"] <= 5.0
    assert 2.0 <= stats["episodes/lengths/mean"] <= 5.0
    assert not env.gives_final_obs


def test_the_final_observations_of_isaac_lab_are_taken_where_it_computes_them():
    env = GymnasiumEnv(IsaacLike(compute_final_obs=True))
    env.reset()
    ages, ends = torch.zeros(4), 0
    for _ in range(30):
        obs, _, terminated, truncated, info = env.step(torch.zeros(4, 1))
        ages += 1
        for name, width in (("policy", 2), ("critic", 3)):
            assert torch.equal(info["final_obs"][name], ages.unsqueeze(1).expand(4, width))
        done = terminated | truncated
        ages[done] = 0.0
        ends += int(done.sum())
        assert torch.equal(obs["policy"][:, 0], ages)
    assert ends == 15 + 10 + 7 + 6
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(env, horizon=16, model_config={"hidden_sizes": [8], "critic_obs": ["critic"]})
    assert env.gives_final_obs

"""mjlab's tasks, on the real package where it is installed."""

from __future__ import annotations

import importlib.metadata
import warnings
from unittest import mock

import numpy as np
import pytest
import torch

from rl8x import PPOConfig
from rl8x.envs import ModelField, Scale
from rl8x.envs.mjlab_env import Event, MjlabEnv
from rl8x.randomization import Uniform

POLE = ModelField("body_mass", "cartpole/pole_1")
METRIC = "log/Episode_Reward/smooth_reward"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """mjlab warns that a mass alone changes no inertia, which is what is asked for here."""
    monkeypatch.setenv("MJLAB_WARP_QUIET", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.fixture(scope="module")
def mjlab():
    return pytest.importorskip("mjlab", reason="mjlab is not installed: pip install 'rl8x[mjlab]'")


def cartpole(**changes):
    """Return the config of a cartpole whose reset is the same for all, so that only the physics differ."""
    from mjlab.tasks.registry import load_env_cfg

    config = load_env_cfg("Mjlab-Cartpole-Balance")
    config.observations["actor"].enable_corruption = False
    for name in ("reset_slider", "reset_hinge"):
        config.events[name].params |= {"position_range": (0.03, 0.03), "velocity_range": (0.0, 0.0)}
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def by_hand(factor):
    """Make mjlab's own environment of one cartpole whose pole has a mass by a factor before the model is compiled."""
    from mjlab.envs import ManagerBasedRlEnv

    config = cartpole(auto_reset=False)
    entity = config.scene.entities["cartpole"]
    make = entity.spec_fn

    def changed():
        spec = make()
        compiled = spec.copy().compile()
        row = compiled.body("pole_1").id
        (body,) = [each for each in spec.bodies if each.name == "pole_1"]
        body.explicitinertial, body.mass = True, compiled.body_mass[row] * factor
        body.ipos, body.iquat = compiled.body_ipos[row], compiled.body_iquat[row]
        body.inertia = compiled.body_inertia[row]
        return spec

    entity.spec_fn = changed
    return ManagerBasedRlEnv(config, device="cpu")


def test_copies_move_as_models_that_are_compiled_with_their_values(mjlab):
    factors = [1.0, 5.0, 0.5]
    env = MjlabEnv(cartpole(), 3, seed=0, time_limit=4, parameters={"mass": Scale(POLE, high=10.0)}, metrics=[METRIC])
    assert {name: part.shape for name, part in env.single_observation_space.items()} == {"actor": (5,), "critic": (5,)}
    assert (env.time_limit, env.single_action_space.shape) == (4, (1,))
    obs, _ = env.reset(config={"mass": factors})
    singles = [by_hand(factor) for factor in factors]
    for i, single in enumerate(singles):
        torch.testing.assert_close(obs["actor"][i], single.reset()[0]["actor"][0])
    rewards_so_far = torch.zeros(3)
    for t in range(4):
        actions = torch.full((3, 1), 0.7)
        obs, rewards, terminated, truncated, info = env.step(actions)
        rewards_so_far += rewards
        for i, single in enumerate(singles):
            expected = single.step(actions[:1])[0]["actor"][0]
            torch.testing.assert_close(info["final_obs"]["actor"][i], expected, rtol=1e-4, atol=1e-5)
        assert not terminated.any()
        assert truncated.tolist() == [t == 3] * 3
    assert (info["final_obs"]["actor"].diff(dim=0).abs().amax(1) > 1e-3).all()
    np.testing.assert_allclose(obs["actor"][:, 0], 0.03, rtol=1e-5)  # reset
    # mjlab logs sums by the longest episode's seconds, as the mean over those that are reset together.
    seconds = env.simulator.max_episode_length_s
    np.testing.assert_allclose(info[METRIC], rewards_so_far.mean() / seconds, rtol=1e-4)


def test_copies_are_reset_one_by_one_under_values_of_their_own(mjlab):
    parameters = {"mass": POLE, "friction": Event("rub", low=0.0, high=1.0)}
    from mjlab.envs.mdp import dr
    from mjlab.managers.event_manager import EventTermCfg
    from mjlab.managers.scene_entity_config import SceneEntityCfg
    from mjlab.managers.termination_manager import TerminationTermCfg

    config = cartpole()
    slider = SceneEntityCfg("cartpole", joint_names=("slider",))
    params = {"ranges": (0.0, 9.0), "operation": "add", "asset_cfg": slider}
    config.events["rub"] = EventTermCfg(func=dr.joint_damping, mode="startup", params=params)
    # Copies end in turn, each after its own number of steps.
    config.terminations["end"] = TerminationTermCfg(
        func=lambda env: env.episode_length_buf >= torch.arange(2, 2 + env.num_envs)
    )
    env = MjlabEnv(config, 3, seed=1, parameters=parameters)
    assert (env.parameters["friction"].default, env.parameters["friction"].high) == (0.0, 1.0)
    default = env.parameters["mass"].default
    env.reset(config={"mass": Uniform(0.5, 2.0), "friction": Uniform(0.1, 0.9)})
    model, compiled = env.simulator.sim.model, env.simulator.sim.mj_model
    row, slide = compiled.body("cartpole/pole_1").id, compiled.joint("cartpole/slider").dofadr[0]
    ends = 0
    for _ in range(9):
        before, lengths = env.carry["parameters"], env.carry["elapsed"]
        obs, _, terminated, truncated, info = env.step(torch.zeros(3, 1))
        assert terminated.tolist() == (lengths + 1 >= torch.arange(2, 5)).tolist()
        assert not truncated.any()
        now = env.carry["parameters"]
        for name in parameters:
            assert torch.equal(before[name] != now[name], terminated)
        assert torch.equal(model.body_mass[:, row], now["mass"])
        torch.testing.assert_close(model.dof_damping[:, slide], now["friction"] + float(compiled.dof_damping[slide]))
        for group in ("actor", "critic"):
            assert torch.equal(obs[group][~terminated], info["final_obs"][group][~terminated])
            assert (obs[group][terminated] != info["final_obs"][group][terminated]).any(1).all()
        ends += int(terminated.sum())
    assert ends == 4 + 3 + 2
    env.reset(config={})
    assert torch.equal(env.carry["parameters"]["mass"], torch.full((3,), default))
    torch.testing.assert_close(model.body_mass[:, row], torch.full((3,), float(compiled.body_mass[row])))


def test_training_gives_the_critic_its_group(mjlab):
    config = PPOConfig(
        num_envs=2, horizon=4, seed=0, device="cpu", model_config={"hidden_sizes": [4], "critic_obs": ["critic"]}
    )
    algorithm = config.build(MjlabEnv("Mjlab-Cartpole-Balance", 2, seed=3, time_limit=3, metrics=[METRIC]))
    stats = dict(algorithm.collect()) | dict(algorithm.step()) | dict(algorithm.collect())
    assert stats["episodes/lengths/mean"] == 3.0
    assert np.isfinite(stats[f"episodes/info/{METRIC}/mean"])


@pytest.mark.parametrize(
    ("task", "binding", "message"),
    [
        (cartpole, "nothing", "is an event that the task has not: no event 'nothing'"),
        (cartpole, "reset_hinge", "'reset_hinge', which does not draw from `ranges` by a `distribution`"),
        (cartpole, ModelField("body_mass", "pole_1"), "must say what of one entity has the field, `of='cartpole/...'`"),
        (cartpole, ModelField("body_mass", "robot/pole"), "no entity 'robot' of the task"),
        (cartpole, ModelField("body_mas", "cartpole/pole_1"), "no field 'body_mas'. Did you mean 'body_mass'"),
        (lambda: "Mjlab-Cartpole-Balanc", POLE, r"no task 'Mjlab-Cartpole-Balanc'\. Did you mean 'Mjlab-Cartpole-Bal"),
    ],
)
def test_what_a_task_cannot_set_and_what_is_none_is_told(mjlab, task, binding, message):
    with pytest.raises(ValueError, match=message):
        MjlabEnv(task(), 1, parameters={"x": binding})


@pytest.mark.parametrize(
    ("version", "message"),
    [
        # Whose partial resets disturb other copies
        (["1.5.2"], r"needs mjlab 1\.6 or newer, .* this is 1\.5\.2\. Install it with"),
        (importlib.metadata.PackageNotFoundError("mjlab"), r"pip install 'rl8x\[mjlab\]'"),
    ],
)
def test_a_release_that_is_too_old_or_missing_is_told(version, message):
    with (
        mock.patch.object(importlib.metadata, "version", side_effect=version),
        pytest.raises(RuntimeError, match=message),
    ):
        MjlabEnv("Mjlab-Cartpole-Balance", 1)

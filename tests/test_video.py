from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl8x.envs import Acrobot, AlgoTrading, CartPole, GymnasiumEnv, MountainCar, MountainCarContinuous, Pendulum
from rl8x.policy import Policy
from rl8x.video import frames, record_video


class Pictures(gymnasium.Env):
    """Five steps, each a picture whose brightness is the step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(2, np.float32), 1.0, self.time == 5, False, {}

    def render(self):
        return np.full((32, 48, 3), 40 * self.time, np.uint8)


def policy_of(env):
    torch.manual_seed(0)
    return Policy(env.single_observation_space, env.single_action_space, model_config={"hidden_sizes": [4]})


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_frames_of_one_episode(deterministic):
    env = GymnasiumEnv(Pictures, 2, render_mode="rgb_array")
    seen = list(frames(policy_of(env), env, deterministic=deterministic))
    assert [int(frame[0, 0, 0]) for frame in seen] == [0, 40, 80, 120, 160]
    assert len(list(frames(policy_of(env), env, max_steps=3))) == 3


def test_what_renders_nothing_is_refused():
    env = GymnasiumEnv(Pictures, 1)
    with pytest.raises(ValueError, match="render_mode='rgb_array'"):
        next(frames(policy_of(env), env))
    with pytest.raises(ValueError, match="AlgoTrading cannot be rendered: give it a `render`"):
        next(frames(policy_of(env), AlgoTrading(1)))


@pytest.mark.parametrize("env_class", [CartPole, Pendulum, MountainCar, MountainCarContinuous, Acrobot])
def test_the_same_task_that_can_be_rendered_is_named_and_takes_the_policy(env_class):
    policy = policy_of(env_class(1))
    with pytest.raises(ValueError, match="cannot be rendered: built-in environments draw nothing") as caught:
        next(frames(policy, env_class(1)))
    told = str(caught.value).split("in the same task, ")[1].removesuffix(".")
    twin = eval(told.replace(', render_mode="rgb_array"', ""))
    assert twin.observation_space.shape == (1, *policy.observation_space.shape)
    assert type(twin.single_action_space) is type(policy.action_space)
    assert np.shape(twin.single_action_space.sample()) == np.shape(policy.action_space.sample())


@pytest.mark.parametrize("name", ["a/video.gif", "video.mp4"])
def test_a_file_is_written(name, tmp_path):
    imageio = pytest.importorskip("imageio.v2", reason="imageio is not installed: pip install 'rl8x[video]'")
    if name.endswith("mp4"):
        pytest.importorskip("imageio_ffmpeg", reason="imageio-ffmpeg is not installed: pip install 'rl8x[video]'")
    env = GymnasiumEnv(Pictures, 1, render_mode="rgb_array")
    path = tmp_path / name
    assert record_video(policy_of(env), env, path) == 5
    read = imageio.mimread(path)
    assert len(read) == 5
    brightness = [int(np.asarray(frame)[..., 0].mean()) for frame in read]
    assert brightness == pytest.approx([0, 40, 80, 120, 160], abs=6)


def test_a_missing_imageio_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "imageio.v2", None)
    env = GymnasiumEnv(Pictures, 1, render_mode="rgb_array")
    with pytest.raises(RuntimeError, match=r"pip install 'rl8x\[video\]'"):
        record_video(policy_of(env), env, tmp_path / "a.mp4")

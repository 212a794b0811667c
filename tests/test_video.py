from __future__ import annotations

import base64
import io

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from PIL import Image, ImageDraw
from tests.probes import Steps

from rl8x.envs import CartPole, Env, GymnasiumEnv, Pendulum
from rl8x.envs.canvas import picture_of
from rl8x.policy import Policy
from rl8x.rollouts.episodes import play_episodes
from rl8x.video import film, in_few_colours, record_video


class Pictures(Steps):
    """Five steps, each a picture whose brightness is the step."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    length = 5

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return np.full((32, 48, 3), 40 * self.time, np.uint8)


def policy_of(env):
    torch.manual_seed(0)
    return Policy(env.single_observation_space, env.single_action_space, model_config={"hidden_sizes": [4]})


class InParts(CartPole):
    """Observations whose parts are in another order than that of the names, in which files have them."""

    single_observation_space = Dict([("z", CartPole.single_observation_space), ("a", Discrete(2))])

    def observe(self, state, parameters):
        return {"z": super().observe(state, parameters), "a": torch.zeros(self.num_envs, dtype=torch.int64)}


def test_a_policy_from_a_file_is_filmed_as_before():
    env = InParts(2, seed=0)
    policy = policy_of(env)
    read = Policy.from_bytes(policy.to_bytes())
    assert list(read.observation_space) != list(env.single_observation_space)
    assert film(read, env, max_steps=20).data == film(policy, env, max_steps=20).data


def decoded(film):
    """The frames of a GIF and how long each is shown, in ms."""
    image = Image.open(io.BytesIO(film.data))
    found = []
    for number in range(image.n_frames):
        image.seek(number)
        found.append((np.asarray(image.convert("RGB")), image.info["duration"]))
    return found


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_frames_of_a_simulators_episode_are_those_before_its_end(deterministic):
    env = GymnasiumEnv(Pictures, 1, render_mode="rgb_array")
    made = film(policy_of(env), env, deterministic=deterministic, captions=False)
    frames = decoded(made)
    assert [int(frame[0, 0, 0]) for frame, _ in frames] == [0, 40, 80, 120, 160]
    # 10 a second; the last one stays for a step, which led to what nobody saw, and for a second more.
    assert [duration for _, duration in frames] == [100, 100, 100, 100, 100 + 100 + 1000]
    assert (made.returns.tolist(), made.lengths.tolist(), made.finished.tolist()) == ([[5.0]], [[5]], [[True]])
    assert made.num_frames == 6 + 10
    short = film(policy_of(env), env, captions=False, max_steps=2)
    assert (short.lengths.tolist(), short.finished.tolist()) == ([[2]], [[False]])


class Shorter(Pictures):
    length = 2


def test_copies_are_side_by_side_and_stay_as_they_were_at_their_end():
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    makers = [lambda: Pictures("rgb_array"), lambda: Shorter("rgb_array")]
    env = GymnasiumEnv(gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=mode))
    env.render_mode = "rgb_array"
    frames = [frame for frame, _ in decoded(film(policy_of(env), env, captions=False))]
    assert frames[0].shape == (32, 48 + 8 + 48, 3)
    left, right = ([int(frame[5, column, 0]) for frame in frames] for column in (5, 70))
    assert left == [0, 40, 80, 120, 160]
    faded = int(0.4 * 40 + 0.6 * 255)
    assert right == [0, 40, 40, faded, faded]  # 2 steps: the end is not seen, then it fades
    assert all((frame[:, 50] == 255).all() for frame in frames)


class Drifts(Env):
    """A walk of random steps, for three steps; the reward is the place that a step led to."""

    single_observation_space = Box(-10.0, 10.0, (1,), np.float32)
    single_action_space = Discrete(2)
    default_time_limit = 3
    reset_noise = step_noise = 1

    def initial_state(self, parameters, noise):
        return {"place": noise}

    def transition(self, state, actions, parameters, noise):
        place = state["place"] + noise
        return {"place": place}, place[:, 0], torch.zeros(len(place), dtype=torch.bool)

    def observe(self, state, parameters):
        return state["place"]


def test_the_state_at_an_episodes_end_is_of_the_noise_of_its_last_step():
    env = Drifts(4)
    _, _, before, end = play_episodes(policy_of(env), env, seed=1)
    reached = torch.from_numpy(end.returns - before.returns).float()
    torch.testing.assert_close(end.state["place"][:, 0], reached, rtol=0.0, atol=1e-5)


def test_a_film_of_an_environment_that_draws_itself_ends_with_the_end():
    env = CartPole(2)
    policy = policy_of(env)
    made = film(policy, env, captions=False, seed=1)
    *_, end = play_episodes(policy, env, seed=1)
    assert made.lengths.tolist() == [end.lengths.tolist()]
    longest = int(end.lengths.argmax())
    state = {name: value[longest].numpy() for name, value in end.state.items()}
    parameters = {name: float(value[longest]) for name, value in end.parameters.items()}
    last = decoded(made)[-1][0]
    expected = picture_of(env, state, parameters)
    shown = last[:, longest * (480 + 8) :][:, :480]
    assert last.shape == (320, 480 * 2 + 8, 3)
    assert np.abs(shown.astype(int) - expected).mean() < 1.0  # but for a palette of 256 colours


def test_half_of_fifty_frames_a_second_are_left_out_and_the_speed_is_true():
    env = CartPole(1, time_limit=8)
    made = film(policy_of(env), env, captions=False)
    assert made.num_frames == 5 + 25
    assert decoded(made)[0][1] == 40
    slow = film(policy_of(env), env, captions=False, fps=5)
    assert (slow.num_frames, decoded(slow)[0][1]) == (9 + 5, 200)


def test_what_is_written_above_and_below_says_parameters_and_returns(monkeypatch):
    written = []
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", lambda self, at, text, **how: written.append(text))
    env = CartPole(3, time_limit=2)
    config = {"length": [0.25, 0.5, 1.0], "gravity": {"uniform": [5.0, 15.0]}}
    made = film(policy_of(env), env, env_config=config)
    titles = [text.split(", ") for text in written if "gravity" in text]
    assert [length for _, length in titles[:3]] == ["length 0.25 m", "length 0.5 m", "length 1 m"]
    drawn = {float(gravity.removeprefix("gravity ").removesuffix(" m/s^2")) for gravity, _ in titles}
    assert len(drawn) == 3
    assert all(5 <= value <= 15 for value in drawn)
    assert {"step 0", "step 2", "return 0", "return 2"} <= set(written)
    # (960 - 2 gaps of 8) / 3 = 314 wide, so 209 high, and a line above and below; 249 is made even.
    assert decoded(made)[0][0].shape == (250, 3 * 314 + 16, 3)


def test_episodes_follow_each_other_with_other_starts():
    env = CartPole(2, time_limit=12)
    made = film(policy_of(env), env, episodes=3, captions=False, deterministic=False)
    assert made.returns.shape == made.lengths.shape == made.finished.shape == (3, 2)
    assert len({*made.lengths[:, 0].tolist(), *made.lengths[:, 1].tolist()}) > 1
    assert (made.returns == made.lengths).all()


def test_a_film_shows_itself_and_is_saved_under_its_own_ending(tmp_path):
    made = film(policy_of(Pendulum(1)), Pendulum(1), max_steps=2)
    shown = made._repr_html_()
    assert base64.b64decode(shown.split("base64,")[1].split('"')[0]) == made.data
    assert made.save(tmp_path / "deep" / "a.gif").read_bytes() == made.data
    with pytest.raises(ValueError, match=r"this film is a \.gif; it cannot be saved as 'a\.mp4'"):
        made.save(tmp_path / "a.mp4")
    with pytest.raises(ValueError, match=r"one of \.gif, \.mp4; got '\.avi'"):
        film(policy_of(Pendulum(1)), Pendulum(1), ".avi")
    assert len(repr(made)) < 300


def test_a_video_is_written(tmp_path):
    imageio = pytest.importorskip("imageio.v2", reason="imageio is not installed: pip install 'rl8x[video]'")
    pytest.importorskip("imageio_ffmpeg", reason="imageio-ffmpeg is not installed: pip install 'rl8x[video]'")
    env = GymnasiumEnv(Pictures, 1, render_mode="rgb_array")
    made = record_video(policy_of(env), env, tmp_path / "video.mp4", captions=False)
    read = imageio.mimread(tmp_path / "video.mp4")
    assert len(read) == made.num_frames == 16
    brightness = [int(np.asarray(frame)[..., 0].mean()) for frame in read]
    assert brightness == pytest.approx([0, 40, 80, 120, 160, *[160] * 11], abs=6)
    assert made._repr_html_().startswith("<video")


def test_flat_colours_keep_their_palette_and_photographs_get_their_own():
    random = np.random.default_rng(0)
    noise = [random.integers(0, 256, (40, 60, 3), dtype=np.uint8) for _ in range(12)]
    images = list(in_few_colours(iter(noise)))
    for frame, image in zip(noise, images, strict=True):
        own = Image.fromarray(frame).quantize(256, dither=Image.Dither.NONE).convert("RGB")
        assert (np.asarray(image.convert("RGB")) == np.asarray(own)).all()
    env = Pendulum(1)
    states = [{"theta": np.float32(0.3 * i), "theta_dot": np.float32(0)} for i in range(8)]
    drawn = [picture_of(env, state, dict.fromkeys(env.parameters, 1.0)) for state in states]
    images = list(in_few_colours(iter(drawn)))
    assert len({bytes(image.getpalette()) for image in images}) == 2
    for frame, image in zip(drawn, images, strict=True):
        shown = np.asarray(image.convert("RGB")).astype(int)
        assert np.abs(shown - frame).mean() < 0.2
        assert (shown[:4] == 255).all()

"""Films of episodes: pictures of each copy of an environment, side by side, as a GIF or a video.

    film(policy, CartPole(3), env_config={"length": [0.25, 0.5, 1.0]}).save("lengths.gif")

Environments draw themselves (`Env.draw`), or simulators made with `render_mode="rgb_array"` render. A copy whose
episode has ended fades until the others have ended.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib.util
import io
import itertools
import math
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from rl8x.disk import replace_synced
from rl8x.envs import Env
from rl8x.envs.canvas import (
    BACKGROUND,
    INK,
    SIZE,
    CopyState,
    Picture,
    copy_of,
    font,
    host_arrays,
    mixed,
    numbers_of,
    picture_of,
)
from rl8x.output import in_line
from rl8x.plain import checked_number
from rl8x.policy import Policy, check_fits
from rl8x.rollouts.episodes import Moment, play_episodes

_FORMATS: Final = (".gif", ".mp4")
LEAST_FPS: Final = 0.01
_MAX_FPS: Final = 30.0  # at higher rates frames are left out
_LAST_S: Final = 1.0  # how long the last frame of an episode is shown
_MAX_WIDTH: Final = 960  # of several copies side by side, if they draw themselves
_GAP: Final = 8
_LETTERS: Final = 13
_LINE: Final = 20
_PAST: Final = 100  # past states that `draw` gets
_PALETTE_ERROR: Final = 0.5  # largest mean error of colours, of 255, with an earlier frame's palette
_MAX_MISFITS: Final = 8  # frames with new palettes, after which palettes are no longer reused


@dataclasses.dataclass(frozen=True)
class Film:
    """A film, which notebooks display.

    Attributes:
        data: The content of its file.
        suffix: The suffix of its file name, which decides the format.
        num_frames: Number of frames.
        returns: Sums of rewards, `[episodes, copies]`.
        lengths: Steps, `[episodes, copies]`.
        finished: Whether the episode came to its end, `[episodes, copies]`.
    """

    data: bytes = dataclasses.field(repr=False)
    suffix: str
    num_frames: int
    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    finished: NDArray[np.bool_]

    def save(self, path: str | Path) -> Path:
        """Write the film to a file; create missing folders.

        Args:
            path: The file, whose name must have the film's suffix.

        Returns:
            The same path.

        Raises:
            ValueError: If the name has another suffix.
        """
        path = Path(path)
        if path.suffix.lower() != self.suffix:
            raise ValueError(f"this film is a {self.suffix}; it cannot be saved as {path.name!r}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_synced(path, self.data)
        return path

    def _repr_html_(self) -> str:
        """Return the film as HTML, for notebooks."""
        content = base64.b64encode(self.data).decode()
        if self.suffix == ".gif":
            return f'<img src="data:image/gif;base64,{content}" alt="{self.num_frames} frames">'
        return f'<video controls loop autoplay muted src="data:video/mp4;base64,{content}"></video>'


def film(
    policy: Policy,
    env: Env,
    suffix: str = ".gif",
    *,
    episodes: int = 1,
    env_config: Mapping[str, Any] | None = None,
    shown: int | None = None,
    columns: int | None = None,
    captions: bool = True,
    max_steps: int | None = None,
    fps: float | None = None,
    deterministic: bool = True,
    seed: int = 0,
) -> Film:
    """Play episodes one after the other in every copy of an environment, and film them.

    Args:
        policy: The policy that acts.
        env: An environment that draws itself, or one made with `render_mode="rgb_array"`, such as
            `GymnasiumEnv("LunarLander-v3", 1, render_mode="rgb_array")`. It is reset.
        suffix: The format, `".gif"` or `".mp4"`.
        episodes: Number of episodes in each copy, at least 1.
        env_config: Values of the environment's parameters; None changes nothing. The values of each copy are written
            above it.
        shown: Number of copies that are filmed, the first ones, at least 1; None is all.
        columns: Copies in a row of the picture, at least 1; None chooses a number.
        captions: Whether parameters, steps and returns are written above and below.
        max_steps: Maximum steps of an episode, at least 1; None is 1,000, or 200 if the task has no end.
        fps: Steps of the environment a second, at least 0.01; None is its own rate, else 30. Above 30 some frames are
            left out.
        deterministic: Whether the policy takes its most likely actions rather than samples.
        seed: Seeds the environment and the samples.

    Returns:
        The film, with the returns and lengths of its episodes.

    Raises:
        TypeError: If `policy` is not a `Policy`, or `env` not an rl8x environment.
        ImportError: If imageio is needed and not installed.
        ValueError: If there is no such format, the environment has no pictures or other spaces than the policy, or a
            number is out of its range.
    """
    if not isinstance(policy, Policy) or not isinstance(env, Env):
        got = " and ".join(f"{in_line(repr(each)):.100}" for each in (policy, env))
        raise TypeError(f"films are of a Policy in an Env; got {got}.")
    check_format(suffix)
    check_pictures(env)
    for name, count in {"episodes": episodes, "shown": shown, "columns": columns, "max_steps": max_steps}.items():
        if count is not None:
            checked_number(count, name, least=1, whole=True)
    checked_number(seed, "seed", least=0, whole=True)
    if fps is not None:
        checked_number(fps, "fps", least=LEAST_FPS)
    check_fits(policy, env)
    rate = float(fps or env.metadata.get("render_fps") or _MAX_FPS)
    every = max(1, math.ceil(rate / _MAX_FPS))
    ends: list[Moment] = []

    def all_frames() -> Iterator[Picture]:
        for episode in range(episodes):
            options: Any = {"deterministic": deterministic, "env_config": env_config, "max_steps": max_steps}
            options["seed"] = seed + episode * env.num_copies  # copy i of a simulator has the seed + i
            played = play_episodes(policy, env, awaited=shown, **options)
            camera, frame = Camera(env, shown=shown, columns=columns, captions=captions), None
            for step, moment in enumerate(played):
                camera.see(moment)
                frame = camera.frame() if step % every == 0 else None
                if frame is not None:
                    yield frame
            ends.append(moment)
            yield from [camera.frame() if frame is None else frame] * round(_LAST_S * rate / every)

    suffix, number = suffix.lower(), itertools.count()
    counted = (frame for frame in all_frames() if next(number) >= 0)
    data = (_gif if suffix == ".gif" else _mp4)(counted, rate / every)
    returns, lengths = np.stack([end.returns[:shown] for end in ends]), np.stack([end.lengths[:shown] for end in ends])
    return Film(data, suffix, next(number), returns, lengths, np.stack([~end.running[:shown] for end in ends]))


def record_video(policy: Policy, env: Env, path: str | Path, **options: Any) -> Film:
    """Film episodes into a file.

    Args:
        policy: The policy that acts.
        env: As `film` takes it.
        path: The file, whose suffix decides the format.
        options: Further arguments of `film`.

    Returns:
        The film.

    Raises:
        TypeError, ImportError, ValueError: As `film` does.
    """
    made = film(policy, env, Path(path).suffix, **options)
    made.save(path)
    return made


def make_filmed(maker: Callable[..., Env], num_envs: int, **options: Any) -> Env:
    """Make an environment that can be filmed; Gymnasium's simulators get `render_mode="rgb_array"`."""
    kind = maker.func if isinstance(maker, functools.partial) else maker
    if isinstance(kind, type) and getattr(kind, "takes_render_mode", False):
        options["render_mode"] = "rgb_array"
    env = maker(num_envs, **options)
    try:
        check_pictures(env)
    except ValueError:
        env.close()
        raise
    return env


def check_pictures(env: Env) -> None:
    """Raise a `ValueError` with advice if an environment cannot be drawn."""
    name = type(env.unwrapped).__name__
    if env.draws:
        return
    if type(env.unwrapped).render is Env.render:
        raise ValueError(f"{name} cannot be rendered: give it a `draw`; see docs/playing.md.")
    if env.render_mode != "rgb_array":
        raise ValueError(f"{name} renders no frames. Make it with render_mode='rgb_array'.")


class Camera:
    """Takes pictures of copies of an environment, side by side; copies whose episode has ended fade."""

    def __init__(self, env: Env, *, shown: int | None, columns: int | None, captions: bool) -> None:
        self._env, self._captions = env, captions
        count = min(shown or env.num_copies, env.num_copies)
        self._copies = range(count)
        # Up to three copies form one row; more form as many rows as columns.
        self._columns = min(columns or (count if count <= 3 else math.ceil(math.sqrt(count))), count)
        self._size = SIZE
        if self._columns > 2:
            width = max(176, (_MAX_WIDTH - _GAP * (self._columns - 1)) // self._columns)
            self._size = width, round(width * SIZE[1] / SIZE[0])
        self._pasts: list[deque[CopyState]] = [deque(maxlen=_PAST + 1) for _ in self._copies]
        self._pictures: list[Picture | None] = [None] * count
        self._titles: list[str] = []
        self._parameters: dict[str, NDArray[Any]] = {}
        self._moment: Moment | None = None
        self._went_on = np.ones(env.num_copies, dtype=np.bool_)  # the copies whose episode had not ended before

    def see(self, moment: Moment) -> None:
        """Record a moment; a copy whose episode had ended before it keeps its last picture."""
        if self._moment is None:
            self._parameters = host_arrays(moment.parameters)
            units = {name: parameter.unit for name, parameter in self._env.parameters.items()}
            shown = [name for name in self._env.config if name in self._parameters]
            for values in (numbers_of(self._parameters, copy) for copy in self._copies):
                self._titles.append(", ".join(f"{name} {values[name]:.4g} {units[name]}".rstrip() for name in shown))
        else:
            self._went_on = self._moment.running
        self._moment = moment
        if self._env.draws:
            states = host_arrays(moment.state, self._env.team)
            # In simulators with a state of their own, the state after an episode's end belongs to the next episode.
            seen = self._went_on if self._env.capturable else moment.running
            for copy in (copy for copy in self._copies if seen[copy]):
                self._pasts[copy].append(copy_of(states, copy))

    def frame(self) -> Picture:
        """Return the picture of the last moment, `[height, width, 3]`."""
        moment = self._moment
        assert moment is not None
        if self._env.draws:
            for copy in (copy for copy in self._copies if self._went_on[copy] or self._pictures[copy] is None):
                *past, state = self._pasts[copy]
                parameters = numbers_of(self._parameters, copy)
                self._pictures[copy] = picture_of(self._env, state, parameters, past, self._size)
        else:
            for copy, rendered in zip(self._copies, _renders(self._env), strict=False):
                if moment.running[copy] or self._pictures[copy] is None:
                    self._pictures[copy] = rendered
        return _side_by_side([self._tile(copy, moment) for copy in self._copies], self._columns)

    def _tile(self, copy: int, moment: Moment) -> Picture:
        """Return the picture of a copy with the captions above and below it."""
        from PIL import Image, ImageDraw

        picture = self._pictures[copy]
        assert picture is not None
        faded = not (moment.running[copy] or self._went_on[copy])
        if faded:
            picture = (0.4 * picture + 0.6 * 255).astype(np.uint8)
        if not self._captions:
            return picture
        height, width = picture.shape[:2]
        titles = [_broken(title, lambda line: font(_LETTERS).getlength(line) <= width) for title in self._titles]
        above = _LINE * max(map(len, titles))
        tile = Image.new("RGB", (width, above + height + _LINE), BACKGROUND)
        tile.paste(Image.fromarray(picture), (0, above))
        draw, letters = ImageDraw.Draw(tile), font(_LETTERS)
        colour = mixed(INK, 0.5) if faded else INK
        for number, line in enumerate(titles[copy]):
            draw.text((width / 2, _LINE * (number + 0.5)), line, fill=colour, font=letters, anchor="mm")
        middle = above + height + _LINE / 2
        draw.text((6, middle), f"step {moment.lengths[copy]:,}", fill=colour, font=letters, anchor="lm")
        score = f"return {moment.returns[copy]:,.4g}"
        draw.text((width - 6, middle), score, fill=colour, font=letters, anchor="rm")
        return np.asarray(tile)


def _broken(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Break a text at its commas into lines that fit, as far as possible."""
    lines: list[str] = []
    for part in text.split(", ") if text else []:
        longer = f"{lines[-1]}, {part}" if lines else part
        if lines and fits(longer):
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _renders(env: Env) -> Iterator[Picture]:
    """Yield the frames that a simulator renders, one for each copy or for the first alone."""
    try:
        rendered: Any = env.render()
    except gymnasium.error.DependencyNotInstalled as error:
        raise ImportError(f"{env!r} cannot be drawn: {error}") from error
    for each in rendered if isinstance(rendered, tuple | list) else [rendered]:
        frame = each.cpu().numpy() if isinstance(each, torch.Tensor) else np.asarray(each)
        if frame.ndim not in (3, 4):
            raise ValueError(f"{type(env.unwrapped).__name__} renders no frames; got {rendered!r:.60}.")
        yield from frame if frame.ndim == 4 else [frame]


def _side_by_side(tiles: Sequence[Picture], columns: int) -> Picture:
    """Arrange pictures of one size in rows; the result has an even width and height, as videos need."""
    height, width = tiles[0].shape[:2]
    rows = math.ceil(len(tiles) / columns)
    shape = rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP
    whole = np.full((shape[0] + shape[0] % 2, shape[1] + shape[1] % 2, 3), 255, dtype=np.uint8)
    for number, tile in enumerate(tiles):
        top, left = number // columns * (height + _GAP), number % columns * (width + _GAP)
        whole[top : top + height, left : left + width] = tile
    return whole


# -- the file: a GIF by Pillow, which comes with rl8x, a video by imageio


def check_format(suffix: str) -> None:
    """Raise if a film cannot have this suffix: `ValueError`, or `ImportError` without imageio."""
    if suffix.lower() not in _FORMATS:
        raise ValueError(f"a film is one of {', '.join(_FORMATS)}; got {suffix!r}.")
    if suffix.lower() != ".gif" and not all(map(importlib.util.find_spec, ("imageio", "imageio_ffmpeg"))):
        raise ImportError(f"a {suffix} needs imageio: pip install 'rl8x[video]'. A .gif needs nothing.")


def _gif(frames: Iterator[Picture], rate: float) -> bytes:
    """Return the content of a GIF that loops forever."""
    images, target = in_few_colours(frames), io.BytesIO()
    next(images).save(target, "GIF", save_all=True, append_images=images, duration=1000 / rate, loop=0)
    return target.getvalue()


def in_few_colours(frames: Iterable[Picture]) -> Iterator[Any]:
    """Yield frames as images with a palette, which is kept as long as it fits: twice to four times as fast."""
    from PIL import Image

    palette: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None
    misfits = 0
    for frame in frames:
        if palette is not None:
            colours, nearest = palette
            indices = nearest[_cubes(frame)]
            if np.abs(colours[indices][::2, ::2].astype(np.int16) - frame[::2, ::2]).mean() <= _PALETTE_ERROR:
                image = Image.fromarray(indices, "P")
                image.putpalette(colours.tobytes())
                yield image
                continue
        few = Image.fromarray(frame).quantize(256, dither=Image.Dither.NONE)
        misfits += 1
        palette = _palette(few) if misfits <= _MAX_MISFITS else None
        yield few


def _palette(image: Any) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return an image's colours, and for every 15-bit colour the one that replaces it: an equal or the nearest one."""
    order = np.argsort(image.histogram()[:256])[::-1]
    colours = np.array(image.getpalette(), dtype=np.uint8).reshape(-1, 3)
    colours = colours[order[order < len(colours)]]
    level = np.arange(32) * 8 + 4
    cubes = np.stack(np.meshgrid(level, level, level, indexing="ij"), -1).reshape(-1, 3).astype(np.float32)
    found = colours.astype(np.float32)
    nearest = ((found**2).sum(1) - 2 * cubes @ found.T).argmin(1).astype(np.uint8)
    nearest[_cubes(colours[::-1])] = np.arange(len(colours), dtype=np.uint8)[::-1]
    return colours, nearest


def _cubes(colours: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Return the first 5 bits of red, green and blue as one number."""
    red, green, blue = (colours[..., i].astype(np.uint16) >> 3 for i in range(3))
    return (red << 10 | green << 5 | blue).astype(np.uint16)


def _mp4(frames: Iterator[Picture], rate: float) -> bytes:
    """Return the content of a video (H.264)."""
    import imageio.v2 as imageio

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        opened: Any = imageio.get_writer(path, fps=rate, macro_block_size=2, quality=8)
        with opened as writer:
            for frame in frames:
                writer.append_data(frame)
        return path.read_bytes()

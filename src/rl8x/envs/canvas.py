"""Pictures of environments: an author draws one copy on a canvas, and `render` returns a picture of each.

Everything is drawn three times as large as the picture, whose pixels are means of 3 x 3 points. Pillow is imported when
the first picture is drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl8x.drawing import LIGHT

Point = tuple[float, float]
Picture = NDArray[np.uint8]
"""`[height, width, 3]`, red, green and blue."""
CopyState = Mapping[str, NDArray[Any]]
"""The state of one copy, each `[...]` on the host."""
Past = Sequence[CopyState]
"""States of one copy, the oldest first."""
CopyParameters = Mapping[str, float]
"""The values of one copy's parameters, by name."""

SIZE: Final = (480, 320)
"""Width and height of a picture, in pixels."""

BACKGROUND, INK, FAINT = LIGHT.background, LIGHT.text, LIGHT.faint
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, GREY = LIGHT.colours[:7]
_FINER: Final = 3


class Canvas:
    """A drawing surface: points are in the units of `view`, with y upwards; widths and radii are in units of y."""

    def __init__(self, width: int = SIZE[0], height: int = SIZE[1]) -> None:
        from PIL import Image, ImageDraw

        self._size = width * _FINER, height * _FINER
        self._image = Image.new("RGB", self._size, BACKGROUND)
        self._draw = ImageDraw.Draw(self._image)
        self.view((-1.0, 1.0), (-1.0, 1.0))

    def view(self, x: Point, y: Point, *, stretch: bool = False) -> None:
        """Set the least visible ranges, centred; units are equally long unless `stretch` fits both to the picture."""
        scales = [size / max(high - low, 1e-9) for size, (low, high) in zip(self._size, (x, y), strict=True)]
        self._scales = scales if stretch else [min(scales)] * 2
        self._middle = (x[0] + x[1]) / 2, (y[0] + y[1]) / 2

    @property
    def span(self) -> tuple[Point, Point]:
        """The visible ranges of x and of y, each from the lowest to the highest."""
        halves = [size / scale / 2 for size, scale in zip(self._size, self._scales, strict=True)]
        return tuple((middle - half, middle + half) for middle, half in zip(self._middle, halves, strict=True))  # type: ignore[return-value]

    def polygon(self, points: Iterable[Point], colour: str, *, strength: float = 1.0) -> None:
        """Fill a polygon; `strength` in [0, 1] mixes the colour with the background."""
        self._draw.polygon([self._at(point) for point in points], fill=mixed(colour, strength))

    def box(self, centre: Point, size: Point, colour: str, *, angle: float = 0.0, strength: float = 1.0) -> None:
        """Fill a rectangle of `size`, width and height, rotated by `angle` in rad."""
        cos, sin = math.cos(angle), math.sin(angle)
        corners = [(i * size[0] / 2, j * size[1] / 2) for i, j in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
        turned = [(centre[0] + a * cos - b * sin, centre[1] + a * sin + b * cos) for a, b in corners]
        self.polygon(turned, colour, strength=strength)

    def circle(self, centre: Point, radius: float, colour: str, *, strength: float = 1.0) -> None:
        """Fill a circle."""
        self._disc(self._at(centre), radius * self._scales[1], mixed(colour, strength))

    def line(self, points: Iterable[Point], width: float, colour: str, *, strength: float = 1.0) -> None:
        """Draw a line through points, with round ends and corners."""
        at, thick, fill = [self._at(point) for point in points], width * self._scales[1], mixed(colour, strength)
        if len(at) > 1:
            self._draw.line(at, fill=fill, width=max(1, round(thick)), joint="curve")
        for end in (at[0], at[-1]) if at else ():
            self._disc(end, thick / 2, fill)

    def text(self, at: Point, text: str, size: float, colour: str = INK, *, anchor: str = "mm") -> None:
        """Write a text."""
        letters = font(max(1, round(size * self._scales[1])))
        self._draw.text(self._at(at), text, fill=colour, font=letters, anchor=anchor)

    def picture(self) -> Picture:
        """Return what was drawn so far."""
        return np.asarray(self._image.reduce(_FINER))

    def _at(self, point: Point) -> Point:
        x, y = ((each - middle) * scale for each, middle, scale in zip(point, self._middle, self._scales, strict=True))
        return self._size[0] / 2 + x, self._size[1] / 2 - y

    def _disc(self, at: Point, radius: float, fill: str) -> None:
        self._draw.ellipse((at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius), fill=fill)


@functools.cache
def font(size: int) -> Any:
    """Return Pillow's own font at a height in pixels."""
    from PIL import ImageFont

    return ImageFont.load_default(size)


@functools.cache
def mixed(colour: str, strength: float) -> str:
    """Mix a colour, `#rrggbb`, with the background: its own share is `strength`."""
    pairs = zip(bytes.fromhex(colour[1:]), bytes.fromhex(BACKGROUND[1:]), strict=True)
    return "#" + "".join(f"{round(strength * one + (1 - strength) * two):02x}" for one, two in pairs)


def picture_of(
    env: Any, state: CopyState, parameters: CopyParameters, past: Past = (), size: tuple[int, int] = SIZE
) -> Picture:
    """Return a picture of one copy, drawn on a canvas of `size`, width and height in pixels; see `Env.draw`."""
    canvas = Canvas(*size)
    env.draw(canvas, state, parameters, past)
    return canvas.picture()


def host_arrays(tensors: Mapping[str, Any], team: Any = None) -> dict[str, NDArray[Any]]:
    """Copy tensors `[num_envs, ...]` to the host, those of a `Team` as `[copies, agents, ...]`."""
    if team is not None:
        tensors = {name: value.unflatten(0, (len(team.names), -1)).transpose(0, 1) for name, value in tensors.items()}
    return {name: value.detach().cpu().numpy().copy() for name, value in tensors.items()}


def copy_of(arrays: Mapping[str, NDArray[Any]], copy: int) -> CopyState:
    """Return the rows of one copy."""
    return {name: value[copy] for name, value in arrays.items()}


def numbers_of(arrays: Mapping[str, NDArray[Any]], copy: int) -> dict[str, float]:
    """Return one copy's numbers from arrays `[num_envs]`."""
    return {name: float(value[copy]) for name, value in arrays.items()}

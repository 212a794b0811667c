"""Writes the pictures of a film as a file: a GIF by Pillow, which comes with rl8x, a video by imageio."""

from __future__ import annotations

import io
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rl8x.envs.canvas import Picture

_PALETTE_ERROR: Final = 0.5  # mean distance of a colour, of 255, with which the palette of an earlier frame still fits
_MAX_MISFITS: Final = 8  # frames whose colours are new, after which none is expected to fit


def check_format(suffix: str) -> None:
    """Refuse what no film can be written as."""
    if suffix.lower() not in WRITERS:
        raise ValueError(f"a film is one of {', '.join(WRITERS)}; got {suffix!r}.")
    if suffix.lower() != ".gif":
        try:
            import imageio.v2  # noqa: F401
            import imageio_ffmpeg  # noqa: F401
        except ImportError:
            raise ImportError(
                f"a {suffix} needs imageio and ffmpeg: pip install 'rl8x[video]'. A .gif needs nothing."
            ) from None


def _write_gif(frames: Iterator[Picture], rate: float) -> tuple[bytes, int]:
    """Return the content of a GIF, which repeats itself, and the number of its frames."""
    count = itertools.count()
    images = in_few_colours(frame for frame in frames if next(count) >= 0)
    target = io.BytesIO()
    next(images).save(target, "GIF", save_all=True, append_images=images, duration=1000 / rate, loop=0)
    return target.getvalue(), next(count)


def in_few_colours(frames: Iterable[Picture]) -> Iterator[Any]:
    """Yield frames as images with a palette, which stays the same as long as it fits: so only changes take space."""
    from PIL import Image

    palette = _Palette(np.zeros((0, 3), np.uint8))
    misfits = 0
    for frame in frames:
        few = None if misfits > _MAX_MISFITS else palette.image(frame)
        if few is None:
            few = Image.fromarray(frame).quantize(256, dither=Image.Dither.NONE)
            misfits += 1
            if misfits <= _MAX_MISFITS:
                order = np.argsort(few.histogram()[:256])[::-1]
                colours = np.array(few.getpalette(), dtype=np.uint8).reshape(-1, 3)
                palette = _Palette(colours[order[order < len(colours)]])
        yield few


class _Palette:
    """Colours, and which replaces any other: one with equal 5 bits of red, green and blue, or the nearest."""

    def __init__(self, colours: NDArray[np.uint8]) -> None:
        self.colours = colours
        if not len(colours):
            return
        level = np.arange(32) * 8 + 4
        cubes = np.stack(np.meshgrid(level, level, level, indexing="ij"), -1).reshape(-1, 3).astype(np.float32)
        found = colours.astype(np.float32)
        distances = (found**2).sum(1) - 2 * cubes @ found.T
        self._nearest = distances.argmin(1).astype(np.uint8)
        self._nearest[self._cubes(colours[::-1])] = np.arange(len(colours), dtype=np.uint8)[::-1]

    @staticmethod
    def _cubes(colours: NDArray[np.uint8]) -> NDArray[np.uint16]:
        red, green, blue = (colours[..., i].astype(np.uint16) >> 3 for i in range(3))
        return (red << 10 | green << 5 | blue).astype(np.uint16)

    def image(self, frame: Picture) -> Any:
        """Return a frame in these colours; None where they do not fit."""
        from PIL import Image

        if not len(self.colours):
            return None
        indices = self._nearest[self._cubes(frame)]
        errors = np.abs(self.colours[indices][::2, ::2].astype(np.int16) - frame[::2, ::2])
        if errors.mean() > _PALETTE_ERROR:
            return None
        image = Image.fromarray(indices, "P")
        image.putpalette(self.colours.tobytes())
        return image


def _write_mp4(frames: Iterator[Picture], rate: float) -> tuple[bytes, int]:
    """Return the content of a video (H.264) and the number of its frames."""
    import imageio.v2 as imageio

    count = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "film.mp4"
        opened: Any = imageio.get_writer(path, fps=rate, macro_block_size=2, quality=8)
        with opened as writer:
            for frame in frames:
                writer.append_data(frame)
                count += 1
        return path.read_bytes(), count


WRITERS: Final[dict[str, Callable[[Iterator[Picture], float], tuple[bytes, int]]]] = {
    ".gif": _write_gif,
    ".mp4": _write_mp4,
}
"""What writes frames, of so many a second, in the format of a suffix: the content, and the number of frames."""

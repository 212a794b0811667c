"""The picture of a run's learning curves among its artifacts, drawn by the process that talks to MLflow.

A run's end waits for it: Matplotlib is imported there, in half a second, and never by the training's process. It is
not data: where it cannot be drawn, there is none.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rl8x import drawing
from rl8x.drawing import LIGHT, Curve, Drawing, Theme
from rl8x.tracking.secrets import logger

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES_FILE: Final = "learning-curves.png"
Series = Mapping[str, Sequence[Sequence[float]]]
"""Steps and values of metrics, by name: a pair for each point."""

_log = logger(__name__)
_drawing = threading.Lock()  # Matplotlib's settings are those of the whole process


def draw_curves(series: Series, title: str, clock: str) -> bytes | None:
    """Draw learning curves as a PNG.

    Args:
        series: The metrics; those without a line to draw, of less than two points, are left out.
        title: What stands above.
        clock: What the steps count, in words.

    Returns:
        The picture; None where no metric has a line, or Matplotlib is not installed or fails.
    """
    try:
        lines = {name: np.asarray(points, dtype=np.float64) for name, points in series.items() if len(points) > 1}
        if not lines:
            return None
        with _drawing:
            picture = Drawing("learning-curves", title, "", functools.partial(_draw, lines, clock))
            return drawing.png(picture, LIGHT, titled=True)
    except Exception:  # a broken Matplotlib, or a spool that somebody has edited
        _log.debug("tracking: the learning curves cannot be drawn", exc_info=True)
        return None


def _draw(lines: Mapping[str, np.ndarray[Any, Any]], clock: str, theme: Theme) -> Figure:
    figure = drawing.new_figure(8.4, 4.6)
    panel = figure.subplots()
    curves = {}
    for name, points in lines.items():
        no_band = np.full(len(points), np.nan)
        curves[name] = Curve(points[:, 0], points[:, 1], no_band, no_band)
    drawing.draw_curves(panel, curves, clock, next(iter(lines)) if len(lines) == 1 else "return", theme)
    drawing.draw_legend(figure, panel, len(lines))
    return figure

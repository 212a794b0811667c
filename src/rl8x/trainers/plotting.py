"""Figures of a trainer's run: learning curves, from what its tracker has, and returns over a grid of physics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rl8x import drawing, keys
from rl8x.drawing import LIGHT, Curve, Drawing, Theme, draw_line, draw_panels, drawn, labelled, new_figure, png
from rl8x.names import did_you_mean
from rl8x.tracking import MemoryTracker, MLflowTracker, Tracker
from rl8x.tracking.reading import RunReader

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

# What one panel shows of returns, where nothing is named; the first line of which a run has any.
_RETURNS: Final[tuple[dict[str, str], ...]] = (
    {
        "episodes of the training": "episodes/returns/mean",
        "evaluations": "eval/returns/mean",
        "horizons in evaluations": "eval/horizon_returns/mean",
    },
    {"horizons of the training": "returns/mean"},
)
_PANELS_IN_A_ROW: Final = 3
RETURNS: Final = "returns"
"""The column of a grid's table that has the mean returns; the parameters are what is not `_MEASURED`."""
_MEASURED: Final = ("episodes", RETURNS, "returns_std", "returns_min", "lengths")
UNITS: Final = "units"
"""The attribute of a grid's table that has the units of its parameters."""


def plot_run(tracker: Tracker, metrics: Sequence[str], known: Sequence[str], clock: str) -> Figure:
    """Draw learning curves.

    Args:
        tracker: What has the run.
        metrics: One panel each; none are the returns, of the training and of evaluations in one panel.
        known: Every metric that a row may have.
        clock: The counter that metrics are plotted against.

    Raises:
        ValueError: If the tracker keeps no metrics, or has none of these so far.
    """
    named = [{name: name} for name in metrics]
    wanted = [name for group in named or _RETURNS for name in group.values()]
    histories = {name: points for name, points in _histories(tracker, wanted).items() if np.isfinite(points[1]).any()}
    for name in metrics:
        if name not in histories:
            hint = did_you_mean(name, known) if name not in known else " It has no value yet."
            raise ValueError(f"this run has no metric {name!r}.{hint}")
    panels = named or [group for group in _RETURNS if histories.keys() & set(group.values())][:1]
    if not panels:
        raise ValueError("this run has logged no returns yet: draw it once it has made some steps.")
    curves = [
        {label: _curve(*histories[name]) for label, name in group.items() if name in histories} for group in panels
    ]
    words = "transitions of training" if clock == keys.ENV_STEPS else "updates"
    return draw_panels(curves, [*metrics] or ["mean return"], words, LIGHT, width=_PANELS_IN_A_ROW)


def _curve(steps: Any, values: Any) -> Curve:
    """Return the finite points of a line, without a band."""
    steps, values = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    nothing = np.full(int(finite.sum()), np.nan)
    return Curve(steps[finite], values[finite], nothing, nothing)


def _histories(tracker: Tracker, names: Sequence[str]) -> Mapping[str, Any]:
    """Return steps and values of the metrics that a tracker's run has, by name."""
    if isinstance(tracker, MemoryTracker):
        rows = {name: tracker.history(name) for name in names}
        return {name: tuple(zip(*points, strict=True)) for name, points in rows.items() if points}
    if not isinstance(tracker, MLflowTracker):
        raise ValueError(
            f"there is nothing to draw: a {type(tracker).__name__} keeps no metrics to read back. Track the run in "
            "MLflow, or give the trainer a MemoryTracker."
        )
    tracker.flush()
    run_id = tracker.run_id
    if run_id is None:
        raise ValueError(f"there is nothing to draw: {tracker.location} has no such run yet.")
    histories = RunReader(tracker.tracking_uri).histories([run_id], names)
    return {name: runs[run_id] for name, runs in histories.items() if run_id in runs}


# -- grids


def plot_grid(frame: pandas.DataFrame) -> Figure:
    """Draw the mean returns of a grid: a curve over one parameter, a heat map over two.

    Of more than two parameters the heat map has the two that explain most; it averages over the others.

    Args:
        frame: What `Trainer.evaluate_grid` returned, or a part of its rows.

    Returns:
        The figure, which notebooks show.

    Raises:
        ValueError: If no parameter has several values.
    """
    made = _grid_drawing(frame)
    if made is None:
        raise ValueError("there is nothing to draw: give one parameter of the grid several values.")
    return drawn(made, LIGHT, titled=True)


def grid_png(frame: pandas.DataFrame) -> bytes | None:
    """Return the figure of a grid as a PNG; None if no parameter has several values."""
    made = _grid_drawing(frame)
    return None if made is None else png(made, LIGHT, titled=True)


def grid_parameters(frame: pandas.DataFrame) -> list[str]:
    """Return the parameters of a grid's table."""
    return [str(column) for column in frame.columns if column not in _MEASURED]


def _grid_drawing(frame: pandas.DataFrame) -> Drawing | None:
    """Return the figure of a grid; None if no parameter has several values."""
    axes, _ = drawing.axes_of(frame[grid_parameters(frame)])
    if not axes:
        return None
    scores = frame[RETURNS].to_numpy(dtype=np.float64)
    units = frame.attrs.get(UNITS, {})
    if len(axes) == 1:
        [axis] = axes

        def curve(theme: Theme) -> Figure:
            figure = new_figure(7.2, 4.2)
            panel = figure.subplots()
            line = _curve(axis.values, drawing.along(scores, axis))
            draw_line(panel, line, "", 0, theme, marker=len(axis.values) <= 25)
            drawing.scale(panel, axis)
            panel.set(xlabel=labelled(axis.name, units), ylabel="mean return")
            panel.grid(True, alpha=0.6)
            return figure

        return Drawing("returns", f"Return over {axis.name}", "", curve)
    x, y = axes if len(axes) == 2 else drawing.main_pair(axes, [scores])
    rest = ", ".join(axis.name for axis in axes if axis not in (x, y))
    means = drawing.over_two(scores, x, y)

    def heat_map(theme: Theme) -> Figure:
        figure = new_figure(5.6, 4.4)
        panel = figure.subplots()
        panel.set_facecolor(theme.faint)
        mesh = drawing.draw_map(panel, means, x, y, float(np.nanmin(means)), float(np.nanmax(means)))
        panel.set(xlabel=labelled(x.name, units), ylabel=labelled(y.name, units))
        label = f"mean return, averaged over {rest}" if rest else "mean return"
        figure.colorbar(mesh, ax=panel, label=label, aspect=25, pad=0.015)
        return figure

    return Drawing("returns", f"Return over {x.name} and {y.name}", "", heat_map)

"""The present policy on a grid of physics: a table, a figure, and what of them is tracked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.axes import along, axes_of, draw_map, main_pair, over_two, scale
from rl8x.drawing import LIGHT, Curve, Drawing, Theme, draw_line, drawn, labelled, new_figure, png
from rl8x.envs import Env
from rl8x.envs.cells import make_cells
from rl8x.tracking import Tracker
from rl8x.tracking.names import legal_name
from rl8x.trainers.cell_evaluator import CellEvaluator
from rl8x.trainers.evaluation import NOWHERE
from rl8x.trainers.evaluator import EpisodeEvaluator

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

FOLDER: Final = "grids"
"""The folder of grids among a run's artifacts."""
_RETURNS: Final = "returns"
_MEASURED: Final = ("episodes", _RETURNS, "returns_std", "returns_min", "lengths")
_UNITS: Final = "units"
_MAX_NAME: Final = 100


def measure_grid(
    algorithm: GenericAlgorithmBase[Any],
    evaluator: EpisodeEvaluator | None,
    grid: Mapping[str, Any],
    episodes: int,
    seed: int,
) -> pandas.DataFrame:
    """Play episodes in every cell of a grid at once; see `Trainer.evaluate_grid`."""
    import pandas

    if type(episodes) is not int or episodes < 1:
        raise ValueError(f"`episodes` must be a whole number, at least 1; got {episodes!r}.")
    cells = make_cells(grid, called="grid")
    factory = _factory(algorithm, evaluator)
    player = CellEvaluator(algorithm, cells, episodes=episodes, seed=seed, env_factory=factory, called="grid")
    frame = pandas.DataFrame({**cells, **player.evaluate().columns()})
    frame.attrs[_UNITS] = {name: player.parameters[name].unit for name in cells}
    return frame


def _factory(algorithm: GenericAlgorithmBase[Any], evaluator: EpisodeEvaluator | None) -> Callable[..., Env]:
    """Return what makes environments as those of evaluations, in any number of copies."""
    factory = algorithm.env_factory if evaluator is None else evaluator.factory
    env = algorithm.env if evaluator is None else evaluator.env
    if factory is not None:
        return factory
    if env is None:
        raise RuntimeError(f"{NOWHERE}.")

    def another(num_envs: int, *, seed: int, **kwargs: Any) -> Env:
        made = env.another(num_envs, seed=seed)
        if made is None:
            raise ValueError(
                f"a grid is evaluated in copies of its own, and the {type(env).__name__} that was given cannot be made "
                "again with another number of them: give a class, a name or a factory in its place."
            )
        return made

    return another


def grid_metrics(frame: pandas.DataFrame, name: str | None) -> dict[str, float]:
    """Return the metrics of a grid: mean, worst and best of its cells' mean returns."""
    returns = frame[_RETURNS]
    values = {"mean": returns.mean(), "worst_cell": returns.min(), "best_cell": returns.max()}
    return {f"grid/{grid_name(frame, name)}/{key}": float(value) for key, value in values.items()}


def grid_name(frame: pandas.DataFrame, name: str | None) -> str:
    """Return what a grid is called in the run: its name, or those of its parameters."""
    return name or legal_name(" ".join(_parameters(frame)))[:_MAX_NAME].strip()


def _parameters(frame: pandas.DataFrame) -> list[str]:
    return [str(column) for column in frame.columns if column not in _MEASURED]


def log_grid(tracker: Tracker, frame: pandas.DataFrame, name: str | None, step: int) -> None:
    """Keep the table and the figure of a grid as one artifact, a folder named after the step of the trainer."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"step-{step:08d}"
        made.mkdir()
        frame.to_csv(made / "cells.csv", index=False)
        drawing = _drawing(frame)
        if drawing is not None:
            (made / "returns.png").write_bytes(png(drawing, LIGHT, titled=True))
        tracker.log_artifact(made, f"{FOLDER}/{grid_name(frame, name)}")


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
    drawing = _drawing(frame)
    if drawing is None:
        raise ValueError("there is nothing to draw: give one parameter of the grid several values.")
    return drawn(drawing, LIGHT, titled=True)


def _drawing(frame: pandas.DataFrame) -> Drawing | None:
    """Return the figure of a grid; None if no parameter has several values."""
    axes, _ = axes_of(frame[_parameters(frame)])
    if not axes:
        return None
    scores = frame[_RETURNS].to_numpy(dtype=np.float64)
    units = frame.attrs.get(_UNITS, {})
    if len(axes) == 1:
        [axis] = axes

        def curve(theme: Theme) -> Figure:
            figure = new_figure(7.2, 4.2)
            panel = figure.subplots()
            nothing = np.full(len(axis.values), np.nan)
            line = Curve(axis.values, along(scores, axis), nothing, nothing)
            draw_line(panel, line, "", 0, theme, marker=len(axis.values) <= 25)
            scale(panel, axis)
            panel.set(xlabel=labelled(axis.name, units), ylabel="mean return")
            panel.grid(True, alpha=0.6)
            return figure

        return Drawing("returns", f"Return over {axis.name}", "", curve)
    x, y = axes if len(axes) == 2 else main_pair(axes, [scores])
    rest = ", ".join(axis.name for axis in axes if axis not in (x, y))
    means = over_two(scores, x, y)

    def heat_map(theme: Theme) -> Figure:
        figure = new_figure(5.6, 4.4)
        panel = figure.subplots()
        panel.set_facecolor(theme.faint)
        mesh = draw_map(panel, means, x, y, float(np.nanmin(means)), float(np.nanmax(means)))
        panel.set(xlabel=labelled(x.name, units), ylabel=labelled(y.name, units))
        label = f"mean return, averaged over {rest}" if rest else "mean return"
        figure.colorbar(mesh, ax=panel, label=label, aspect=25, pad=0.015)
        return figure

    return Drawing("returns", f"Return over {x.name} and {y.name}", "", heat_map)

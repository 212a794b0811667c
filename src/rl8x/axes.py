"""Parameters of test cells as axes of figures: values of a grid, or bins of a sample; means of scores along them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl8x.drawing import Array

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

_MAX_VALUES = 64  # a parameter with more values is drawn in bins
_BINS = 12


class Axis(NamedTuple):
    """A test parameter.

    Attributes:
        name: The parameter.
        values: The axis's values, ascending, `[values]`: the values of a grid, or the middles of bins.
        edges: Where the cells of a heat map begin and end, `[values + 1]`.
        positions: Position of each test cell on the axis, `[cells]`.
        logarithmic: Whether equal ratios are equal distances.
        binned: Whether values were put in bins.
    """

    name: str
    values: Array
    edges: Array
    positions: NDArray[np.intp]
    logarithmic: bool
    binned: bool


def axes_of(cells: pandas.DataFrame) -> tuple[list[Axis], list[str]]:
    """Make an axis of each test parameter that has several values; also returns the names of those without numbers."""
    axes, others = [], []
    for name in cells.columns:
        if cells[name].nunique() < 2:
            continue
        if cells[name].dtype.kind in "iuf":
            axes.append(_axis(str(name), cells[name].to_numpy(dtype=np.float64), len(cells)))
        else:
            others.append(str(name))
    return axes, others


def _axis(name: str, column: Array, num_cells: int) -> Axis:
    values, index = np.unique(column, return_inverse=True)
    logarithmic = _is_geometric(values)
    # A sample has a value for each cell; in a grid each occurs in many cells, or all stand at even distances.
    is_sample = len(values) > _BINS and len(values) > num_cells / 2 and not _is_even(values, logarithmic)
    if len(values) <= _MAX_VALUES and not is_sample:
        return Axis(name, values, _edges(values, logarithmic), index, logarithmic, binned=False)
    # The median of a sample that is uniform in its logarithm is near the geometric mean of its ends.
    logarithmic = values[0] > 0 and bool(np.median(values) < (values[0] * values[-1]) ** 0.5 * 2 < values[-1] / 4)
    scaled = np.log(values) if logarithmic else values
    edges = np.linspace(scaled[0], scaled[-1], _BINS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    positions = np.clip(np.searchsorted(edges, scaled, side="right") - 1, 0, _BINS - 1)[index]
    back = np.exp if logarithmic else np.asarray
    return Axis(name, back(middles), back(edges), positions, logarithmic, binned=True)


def _is_even(values: Array, logarithmic: bool) -> bool:
    steps = np.diff(np.log(values) if logarithmic else values)
    return bool(np.allclose(steps, steps.mean(), rtol=0.05))


def _is_geometric(values: Array) -> bool:
    """Return whether the values of a grid grow by a factor rather than by a difference, over a decade at least."""
    return bool(values[0] > 0 and values[-1] >= 10 * values[0] and len(values) > 2 and _is_even(values, True))


def _edges(values: Array, logarithmic: bool) -> Array:
    """Put an edge in the middle between neighbours, and as far beyond the ends."""
    scaled = np.log(values) if logarithmic else values
    middles = (scaled[1:] + scaled[:-1]) / 2
    edges = np.array([2 * scaled[0] - middles[0], *middles, 2 * scaled[-1] - middles[-1]])
    return np.exp(edges) if logarithmic else edges


def along(scores: Array, axis: Axis) -> Array:
    """Average scores, `[..., cells]`, over the cells at each value of an axis, `[..., values]`; NaN where is none."""
    return _averaged(scores, axis.positions, len(axis.values))


def over_two(scores: Array, x: Axis, y: Axis) -> Array:
    """Average scores, `[..., cells]`, over the cells at each pair of values, `[..., values of y, values of x]`."""
    joint = y.positions * len(x.values) + x.positions
    means = _averaged(scores, joint, len(y.values) * len(x.values))
    return means.reshape(*scores.shape[:-1], len(y.values), len(x.values))


def _averaged(scores: Array, index: NDArray[np.intp], count: int) -> Array:
    numbers = np.bincount(index, minlength=count)
    members = np.zeros((scores.shape[-1], count))
    members[np.arange(scores.shape[-1]), index] = 1
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(numbers > 0, scores @ members, np.nan) / numbers)


def main_pair(axes: Sequence[Axis], scores: Sequence[Array]) -> tuple[Axis, Axis]:
    """Choose the two axes that explain most of the variance of scores together, `[cells]` of each policy."""

    def explained(pair: tuple[Axis, Axis]) -> float:
        return float(np.mean([np.nanvar(over_two(each, *pair)) for each in scores]))

    return max(itertools.combinations(axes, 2), key=explained)


def draw_map(panel: Axes, values: Array, x: Axis, y: Axis, low: float, high: float) -> Any:
    """Draw a heat map, `[values of y, values of x]`, with colours from `low` to `high`; a colour bar explains these."""
    mesh = panel.pcolormesh(x.edges, y.edges, values, cmap="viridis", vmin=low, vmax=high, rasterized=True)
    scale(panel, x, y)
    return mesh


def scale(panel: Axes, x: Axis, y: Axis | None = None) -> None:
    """Give a panel the scales and limits of its axes."""
    if x.logarithmic:
        panel.set_xscale("log")
    panel.set_xlim(x.edges[0], x.edges[-1])
    if y is not None:
        if y.logarithmic:
            panel.set_yscale("log")
        panel.set_ylim(y.edges[0], y.edges[-1])


def chosen_axes(cells: pandas.DataFrame, parameters: Sequence[str] | None) -> tuple[list[Axis], list[str]]:
    """Make the axes of a report, for `parameters` or all; also return sentences on what is not drawn.

    Raises:
        ValueError: If a parameter that was named is not one of several numbers.
    """
    axes, others = axes_of(cells)
    notes = [f"{name} has no numbers and is no axis of a figure." for name in others]
    if parameters is None:
        return axes, notes
    known = {axis.name: axis for axis in axes}
    for name in parameters:
        if name not in known:
            raise ValueError(
                f"{name!r} is no test parameter with several values; there are {', '.join(known) or 'none'}."
            )
    return [known[name] for name in dict.fromkeys(parameters)], notes

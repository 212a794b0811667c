"""The common parts of all figures: themes, lines with bands, legends, PNGs, and test parameters as axes.

Lines differ in style, and in colours that the colour-blind can tell apart (Okabe and Ito 2008, "Color universal
design"). Matplotlib is imported when the first figure is drawn.
"""

from __future__ import annotations

import functools
import io
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LINES: Final = 8
MAX_NAMED: Final = 24
"""Maximum number of curves of single runs that a legend names."""
Array = NDArray[np.float64]
_DPI: Final = 144
_DPI_SHOWN: Final = 100
_MAX_VALUES: Final = 64  # a parameter with more values is drawn in bins
_BINS: Final = 12


class Curve(NamedTuple):
    """A line with a band, such as a mean over seeds with its interval, each `[points]`; without a band `low` is NaN."""

    steps: Array
    mean: Array
    low: Array
    high: Array


def finite_curve(steps: Any, values: Any) -> Curve:
    """Return the finite points of a line, without a band."""
    steps, values = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    nothing = np.full(int(finite.sum()), np.nan)
    return Curve(steps[finite], values[finite], nothing, nothing)


class Theme(NamedTuple):
    """Colours of a figure: its background, text and lines of the frame, faint lines, and those of the groups."""

    name: str
    background: str
    text: str
    faint: str
    colours: tuple[str, ...]


_OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
_OKABE_ITO_DARK = ("#56B4E9", "#E8743B", "#1FBF8F", "#E3A0C4", "#F0B93A", "#3D8FD1", "#9A9A9A", "#FFFFFF")
LIGHT: Final = Theme("light", "#ffffff", "#1f2328", "#d8dde3", _OKABE_ITO)
DARK: Final = Theme("dark", "#15181d", "#e3e6ea", "#3a4048", _OKABE_ITO_DARK)
_STYLES: Final[tuple[Any, ...]] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
_MARKERS: Final = "osD^vPX*"


class Drawing(NamedTuple):
    """A figure: its file's name without suffix, title and caption for the page, and the function that draws it."""

    name: str
    title: str
    caption: str
    draw: Callable[[Theme], Figure]


def drawn(drawing: Drawing, theme: Theme, *, titled: bool = False) -> Figure:
    """Draw a figure, with its title at the top if `titled`."""
    with _style(theme):
        figure = drawing.draw(theme)
        if titled and figure.legends:  # as the legend's title, since the layout would put both in one place
            figure.legends[0].set_title(drawing.title)
            figure.legends[0].get_title().set(fontsize=12, fontweight="bold")
        elif titled:
            figure.suptitle(drawing.title, fontsize=12, fontweight="bold", color=theme.text)
    return figure


def png(drawing: Drawing, theme: Theme, *, titled: bool = False) -> bytes:
    """Draw a figure and return it as a PNG, with the same bytes each time."""
    figure, target = drawn(drawing, theme, titled=titled), io.BytesIO()
    with _style(theme):
        figure.savefig(target, format="png", dpi=_DPI, metadata={"Software": None})
    return target.getvalue()


def _style(theme: Theme) -> AbstractContextManager[None]:
    """Return the context in which figures have a theme."""
    import matplotlib

    written = ("axes.labelcolor", "axes.titlecolor", "text.color", "xtick.color", "ytick.color")
    settings: Any = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.background),
        **dict.fromkeys((*written, "axes.edgecolor"), theme.text),
        "grid.color": theme.faint,
        **dict.fromkeys(("legend.frameon", "axes.spines.top", "axes.spines.right"), False),
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.labelsize": 10,
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9),
        "font.family": "DejaVu Sans",
        "lines.linewidth": 1.8,
        "text.parse_math": False,
    }
    return matplotlib.rc_context(settings)


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, sized in inches, that notebooks display."""
    return _shown_figure()(figsize=(width, height), layout="constrained")


@functools.cache
def _shown_figure() -> type[Figure]:
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        """A figure that displays itself in a notebook, whatever matplotlib's backend."""

        def _repr_png_(self) -> bytes:
            target = io.BytesIO()
            self.savefig(target, format="png", dpi=_DPI_SHOWN)
            return target.getvalue()

    return ShownFigure


def labelled(name: str, units: Mapping[str, str]) -> str:
    """Write a parameter with its unit, such as "length [m]"."""
    return f"{name} [{units[name]}]" if units.get(name) else name


def draw_line(panel: Axes, curve: Curve, label: str, colour: int, theme: Theme, *, marker: bool = False) -> None:
    """Draw a curve with its band; `colour` is the number of its colour and style."""
    shade = theme.colours[colour % len(theme.colours)]
    style = _STYLES[colour % len(_STYLES)]
    mark = _MARKERS[colour % len(_MARKERS)] if marker else None
    panel.plot(curve.steps, curve.mean, linestyle=style, color=shade, label=label, marker=mark, markersize=4)
    if np.isfinite(curve.low).any():
        panel.fill_between(curve.steps, curve.low, curve.high, color=shade, alpha=0.2, linewidth=0)


def draw_curves(panel: Axes, curves: Mapping[str, Curve], clock: str, metric: str, theme: Theme) -> None:
    """Draw learning curves by label; more than `MAX_NAMED` are drawn in one shade."""
    for number, (label, curve) in enumerate(curves.items()):
        if len(curves) > MAX_NAMED:
            panel.plot(curve.steps, curve.mean, color=theme.colours[0], linewidth=0.9, alpha=0.35)
        else:
            draw_line(panel, curve, textwrap.fill(label, 60), number, theme)
    panel.set_xlabel(clock)
    panel.set_ylabel(metric)
    panel.grid(True, alpha=0.6)
    short_ticks(panel)


def draw_panels(
    panels: Sequence[Mapping[str, Curve]],
    metrics: Sequence[str],
    clock: str,
    theme: Theme,
    *,
    width: int,
    legend: bool = False,  # whether a single panel leaves room for the names of many curves
) -> Figure:
    """Draw a panel of learning curves for each metric, `width` in a row; arguments as `draw_curves` takes them."""
    columns = min(width, len(panels))
    rows = -(-len(panels) // columns)
    size = (7.2, 3.9) if columns == 1 else (4.2 * columns, 3.2 * rows)
    if legend:
        size = 8.4, 4.6 + 0.13 * min(len(panels[0]), MAX_NAMED)
    with _style(theme):
        figure = new_figure(*size)
        grid = figure.subplots(rows, columns, squeeze=False)
        for panel, curves, metric in zip(grid.flat, panels, metrics, strict=False):
            draw_curves(panel, curves, clock, metric, theme)
        for panel in grid.flat[len(panels) :]:
            panel.set_visible(False)
        if len(panels) == 1:
            draw_legend(figure, grid[0, 0], len(panels[0]))
    return figure


def draw_legend(figure: Figure, panel: Axes, count: int) -> None:
    """Put the names of several lines above the panels, so that they cover nothing."""
    if not 2 <= count <= MAX_NAMED:
        return
    handles, labels = panel.get_legend_handles_labels()
    longest = max(len(label) for label in labels)
    columns = max(1, min(count, int(figure.get_figwidth() * 12 // (longest + 8))))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, handlelength=2.6)


def short_ticks(panel: Axes) -> None:
    """Write steps as 200k, 1.5M."""
    from matplotlib.ticker import EngFormatter

    panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panel.locator_params(axis="x", nbins=5)


# -- parameters of test cells as axes: values of a grid, or bins of a sample; means of scores along them


class Axis(NamedTuple):
    """A test parameter as an axis."""

    name: str
    values: Array  # [values], ascending: those of a grid, or the middles of bins
    edges: Array  # [values + 1], where the cells of a heat map begin and end
    positions: NDArray[np.intp]  # [cells], of each test cell on the axis
    logarithmic: bool  # equal ratios are equal distances
    binned: bool


def axes_of(cells: pandas.DataFrame) -> tuple[list[Axis], list[str]]:
    """Make an axis of each test parameter that has several values; also returns the names of those without numbers."""
    varied = cells.loc[:, cells.nunique() > 1]
    numbers = varied.select_dtypes("number")
    axes = [_axis(str(name), column.to_numpy(dtype=np.float64), len(cells)) for name, column in numbers.items()]
    return axes, [str(name) for name in varied.columns.difference(numbers.columns, sort=False)]


def _axis(name: str, column: Array, num_cells: int) -> Axis:
    values, index = np.unique(column, return_inverse=True)
    # Grid values that grow by a constant factor rather than a constant difference, over at least a decade.
    logarithmic = values[0] > 0 and values[-1] >= 10 * values[0] and len(values) > 2 and _is_even(values, True)
    # A sample has a value for each cell; in a grid each value occurs in many cells, or all are evenly spaced.
    is_sample = len(values) > _BINS and len(values) > num_cells / 2 and not _is_even(values, logarithmic)
    if len(values) <= _MAX_VALUES and not is_sample:
        scaled = np.log(values) if logarithmic else values
        middles = (scaled[1:] + scaled[:-1]) / 2
        edges = np.array([2 * scaled[0] - middles[0], *middles, 2 * scaled[-1] - middles[-1]])
        return Axis(name, values, np.exp(edges) if logarithmic else edges, index, bool(logarithmic), binned=False)
    # The median of a log-uniform sample is near the geometric mean of its ends.
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


def along(scores: Array, axis: Axis) -> Array:
    """Average scores, `[..., cells]`, over the cells at each value of an axis, `[..., values]`; NaN without cells."""
    return _averaged(scores, axis.positions, len(axis.values))


def over_two(scores: Array, x: Axis, y: Axis) -> Array:
    """Average scores, `[..., cells]`, over the cells at each pair of values, `[..., values of y, values of x]`."""
    joint = y.positions * len(x.values) + x.positions
    means = _averaged(scores, joint, len(y.values) * len(x.values))
    return means.reshape(*scores.shape[:-1], len(y.values), len(x.values))


def _averaged(scores: Array, index: NDArray[np.intp], count: int) -> Array:
    sums = np.zeros((count, *scores.shape[:-1]))
    np.add.at(sums, index, np.moveaxis(scores, -1, 0))  # in a product of matrices a NaN would reach all sums
    with np.errstate(invalid="ignore"):
        return np.asarray(np.moveaxis(sums, 0, -1) / np.bincount(index, minlength=count))


def main_pair(axes: Sequence[Axis], scores: Sequence[Array]) -> tuple[Axis, Axis]:
    """Choose the two axes that together explain most of the variance of scores, `[cells]` for each policy."""

    def explained(pair: tuple[Axis, Axis]) -> float:
        return float(np.mean([np.nanvar(over_two(each, *pair)) for each in scores]))

    return max(itertools.combinations(axes, 2), key=explained)


def draw_map(panel: Axes, values: Array, x: Axis, y: Axis, low: float, high: float) -> Any:
    """Draw a heat map, `[values of y, values of x]`, with colours from `low` to `high`; return it for a colour bar."""
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
    """Make the axes of a report, for `parameters` or all; also return sentences on parameters that are not drawn."""
    axes, others = axes_of(cells)
    known = {axis.name: axis for axis in axes}
    for name in parameters or ():
        if name not in known:
            there = ", ".join(known) or "none"
            raise ValueError(f"{name!r} is no test parameter with several values; there are {there}.")
    chosen = axes if parameters is None else [known[name] for name in dict.fromkeys(parameters)]
    return chosen, [f"{name} has no numbers and is no axis of a figure." for name in others]

"""Figures of a report, and pages with figures and tables: one self-contained HTML file, in light and dark."""

from __future__ import annotations

import base64
import html
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas

from rl8x import drawing
from rl8x.disk import replace_synced
from rl8x.drawing import Axis, Curve, Drawing, Theme, draw_legend, draw_line, new_figure
from rl8x.studies import statistics
from rl8x.studies.table import ENV_STEPS, INSIDE, RETURNS, SEED, Group, Supports, clock_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS: Final = 12


def chosen(summary: statistics.Summary, most: int) -> list[int]:
    """Return the positions of at most `most` groups to draw: the baseline and the best by interquartile mean."""
    base = summary.frame.index[summary.frame["label"] == summary.baseline]
    order = summary.frame["iqm"].sort_values(ascending=False, kind="stable").index
    return sorted([*base, *order.difference(base, sort=False)][:most])


def heat_maps(
    groups: Sequence[Group], supports: Supports, x: Axis, y: Axis, units: Mapping[str, str], theme: Theme
) -> Figure:
    """Draw a panel for each group: mean return over seeds at each pair of values, and the training's range."""
    maps = [drawing.over_two(group.scores.mean(axis=0), x, y) for group in groups]
    low, high = np.nanmin(maps), np.nanmax(maps)
    columns = min((4, 3), key=lambda each: -len(groups) % each) if len(groups) > 4 else len(groups)
    lines = -(-len(groups) // columns)
    tallest = max(textwrap.fill(group.label, 30).count("\n") for group in groups)
    figure = new_figure(1.6 + 2.9 * columns, 0.9 + (2.75 + 0.2 * tallest) * lines)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for panel, group, values in zip(panels.flat, groups, maps, strict=False):
        mesh = drawing.draw_map(panel, values, x, y, low, high)
        panel.set(title=textwrap.fill(group.label, 30), facecolor=theme.faint)
        _draw_support(panel, supports.get(group.training, {}), x, y)
    for panel in panels.flat[len(groups) :]:
        panel.set_visible(False)
    for column in range(columns):  # the lowest visible panel has the ticks
        panels[(len(groups) - 1 - column) // columns, column].xaxis.set_tick_params(labelbottom=True)
    figure.supxlabel(drawing.labelled(x.name, units), fontsize=10, color=theme.text)
    figure.supylabel(drawing.labelled(y.name, units), fontsize=10, color=theme.text)
    bar = figure.colorbar(mesh, ax=list(panels.flat), label="mean return", aspect=25, pad=0.015)
    bar.outline.set_visible(False)
    return figure


def _draw_support(panel: Axes, support: Any, x: Axis, y: Axis) -> None:
    """Outline the training's range: a rectangle, a line if one parameter was fixed, a cross if both were."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import Stroke

    if x.name not in support or y.name not in support:
        return
    (left, right), (bottom, top) = support[x.name], support[y.name]
    if left == right and bottom == top:
        panel.plot(left, bottom, "X", color="white", markersize=10, markeredgecolor="black", markeredgewidth=1.2)
        return
    (left, right), (bottom, top) = (np.clip(support[each.name], each.edges[0], each.edges[-1]) for each in (x, y))
    box = Rectangle((left, bottom), right - left, top - bottom, fill=False, edgecolor="white", linewidth=2)
    box.set(clip_on=False, zorder=5, joinstyle="miter")
    box.set_path_effects([Stroke(linewidth=4, foreground="black"), Stroke(linewidth=2, foreground="white")])
    panel.add_patch(box)


def curves(
    groups: Sequence[Group], supports: Supports, axis: Axis, units: Mapping[str, str], theme: Theme, level: float = 0.95
) -> Figure:
    """Draw the mean return over one parameter with its interval over seeds, and below it the training's ranges."""
    figure = new_figure(7.2, 4.2 + 0.16 * len(groups))
    own = {group.training: supports.get(group.training, {}) for group in groups}
    trained = {training: support[axis.name] for training, support in own.items() if axis.name in support}
    heights = [1, 0.045 * len(trained) + 0.03] if trained else [1]
    panel, *strips = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for number, group in enumerate(groups):
        means = drawing.along(group.scores, axis)
        there = ~np.isnan(means[0])
        estimate = statistics.bootstrap(lambda scores: scores.mean(axis=-2), means[:, there], level=level)
        curve = Curve(axis.values[there], *estimate)
        draw_line(panel, curve, group.label, number, theme, marker=int(there.sum()) <= 25)
    drawing.scale(panel, axis)
    panel.set(ylabel="mean return", axisbelow=True)
    panel.grid(True, alpha=0.6)
    [panel, *strips][-1].set_xlabel(drawing.labelled(axis.name, units))
    for strip in strips:
        _draw_strip(panel, strip, trained, groups, theme)
    draw_legend(figure, panel, len(groups))
    return figure


def _draw_strip(panel: Axes, strip: Axes, supports: Mapping[str, Any], groups: Sequence[Group], theme: Theme) -> None:
    """Draw a bar for each training from the lowest to the highest value that it was trained on."""
    for line, (training, (low, high)) in enumerate(supports.items()):
        mine = [number for number, group in enumerate(groups) if group.training == training]
        colour = theme.colours[mine[0] % len(theme.colours)] if len(mine) == 1 else theme.text
        if low == high:
            strip.plot(low, line, "D", color=colour, markersize=5.5, clip_on=False)
            continue
        strip.barh(line, high - low, left=low, height=0.62, color=colour)
        if len(supports) == 1:
            panel.axvspan(low, high, color=colour, alpha=0.1, linewidth=0, zorder=0)
        elif len(mine) == 1:
            for end in (low, high):
                panel.axvline(end, color=colour, linewidth=0.8, alpha=0.45, zorder=0)
    strip.set_ylim(len(supports) - 0.4, -0.6)
    strip.set_yticks(range(len(supports)), [f"trained on ({training})" for training in supports], fontsize=8)
    strip.tick_params(axis="y", length=0)
    strip.spines["left"].set_visible(False)
    panel.tick_params(labelbottom=False)


def intervals(summary: statistics.Summary, rows: Sequence[int], theme: Theme) -> Figure:
    """Draw a panel for each statistic: a point and its interval for each group."""
    names = ("mean", "iqm", "cvar_10", "cvar_1", "worst_cell")
    shown = summary.frame.loc[list(rows)]
    labels = [textwrap.fill(label, 34) for label in shown["label"]]
    figure = new_figure(10.5, 1.1 + 0.42 * len(rows) + 0.12 * sum(label.count("\n") for label in labels))
    panels = figure.subplots(1, len(names), sharey=True)
    for panel, name in zip(panels, names, strict=True):
        for line, (value, low, high) in enumerate(statistics.estimates_of(shown, name).to_numpy()):
            shade = theme.colours[line % len(theme.colours)]
            if np.isfinite(low):
                panel.plot([low, high], [line, line], color=shade, linewidth=7, alpha=0.35, solid_capstyle="butt")
            panel.plot(value, line, "|", color=shade, markersize=13, markeredgewidth=2.4)
        panel.set(title=statistics.HEADINGS[name], xmargin=0.12)
        panel.grid(True, axis="x", alpha=0.6)
        panel.spines["left"].set_visible(False)
        panel.tick_params(axis="y", length=0)
        panel.locator_params(axis="x", nbins=4)
    panels[0].set(yticks=range(len(rows)), yticklabels=labels, ylim=(len(rows) - 0.4, -0.6))
    figure.supxlabel("return", fontsize=10, color=theme.text)
    return figure


def profiles(groups: Sequence[Group], summary: statistics.Summary, theme: Theme) -> Figure:
    """Draw performance profiles (Agarwal et al. 2021, section 4.2) with their bands."""
    scores = np.concatenate([group.scores for group in groups])
    thresholds = np.linspace(scores.min(), scores.max(), 101)
    figure = new_figure(7.2, 4.4)
    panel = figure.subplots()
    share = partial(statistics.performance_profile, thresholds=thresholds)
    for number, group in enumerate(groups):
        if summary.over == "cells":
            band = statistics.bootstrap(share, group.scores, over="cells", level=summary.level, resamples=400)
        else:  # the profile is an average over policies
            shares = share(group.scores[:, None])
            band = statistics.bootstrap(lambda drawn: drawn.mean(axis=-2), shares, level=summary.level)
        draw_line(panel, Curve(thresholds, *band), group.label, number, theme)
    panel.set(xlabel="return, tau", ylabel="share of seeds and cells with a return above tau", ylim=(-0.02, 1.02))
    panel.grid(True, alpha=0.6)
    draw_legend(figure, panel, len(groups))
    return figure


def progress(points: pandas.DataFrame, groups: Sequence[Group], theme: Theme, *, level: float = 0.95) -> Figure:
    """Draw the mean return against the transitions or updates of training: over all cells, inside, and outside."""
    clock, within = clock_of(points), points[INSIDE].astype(bool)
    parts = {"all cells": points, "inside": points[within], "outside": points[~within]}
    parts = {name: part for name, part in parts.items() if len(part)}
    if len(parts) == 2:  # all cells are inside, or all outside, so the second part equals the first
        parts.popitem()
    figure = new_figure(1.2 + 3.3 * len(parts), 3.7)
    panels = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    for panel, (name, part) in zip(panels, parts.items(), strict=True):
        for number, group in enumerate(groups):
            own = part[part["group"] == group.label]
            means = [each.groupby(clock)[RETURNS].mean() for _, each in own.groupby(SEED)]
            if means:
                curve = statistics.mean_curve([(each.index, each) for each in means], level=level)
                draw_line(panel, curve, group.label, number, theme, marker=len(curve.steps) <= 12)
        panel.set_title(name)
        panel.grid(True, alpha=0.6)
        drawing.short_ticks(panel)
    panels[0].set_ylabel("mean return")
    figure.supxlabel("transitions of training" if clock == ENV_STEPS else "updates of training", fontsize=10)
    draw_legend(figure, panels[0], len(groups))
    return figure


_STYLE: Final = """
:root { color-scheme: light dark; --text: #1f2328; --muted: #5b636d; --line: #d8dde3; --back: #ffffff; --panel: #f6f8fa;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e3e6ea; --muted: #9aa4af; --line: #30363d; --back: #15181d; --panel: #1c2027; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 75rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p, li { max-width: 50rem; } .lead, figcaption, .meanings { color: var(--muted); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .4rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--back); }
thead th { border-bottom: 2px solid var(--text); font-weight: 600; } tbody tr:hover td { background: var(--panel); }
td small { display: block; color: var(--muted); font-size: .78rem; }
figure { margin: 1rem 0 0; } picture { display: block; overflow-x: auto; }
figure img { max-width: 100%; min-width: 36rem; height: auto; border-radius: 6px; }
figcaption { max-width: 50rem; font-size: .92rem; margin-top: .4rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .92rem; } dd { margin: 0; }
details { margin-top: 2rem; } summary { cursor: pointer; color: var(--accent); }
pre { background: var(--panel); padding: 1rem; overflow-x: auto; border-radius: 6px; font-size: .82rem; }
"""


def page(title: str, lead: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return an HTML page of sections, each a heading and its HTML."""
    parts = "\n".join(f"<section><h2>{html.escape(head)}</h2>\n{body}</section>" for head, body in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{html.escape(title)}</h1>\n<p class="lead">{html.escape(lead)}</p>\n{parts}\n</main>\n</body>\n</html>\n'
    )


def image(figure: Drawing) -> tuple[str, str]:
    """Return a section with a figure and its caption, drawn for light and dark pages, as its heading and HTML."""
    dark, light = (base64.b64encode(drawing.png(figure, theme)).decode() for theme in (drawing.DARK, drawing.LIGHT))
    body = (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="data:image/png;base64,{dark}">'
        f'<img src="data:image/png;base64,{light}" alt="{html.escape(figure.title)}"></picture>\n'
        f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>\n"
    )
    return figure.title, body


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table whose first row has the headings; brackets at the end of a cell go to a line below."""
    cells = [[re.sub(r" (\[[^\[]*\])$", r"<small>\1</small>", html.escape(cell)) for cell in row] for row in rows[1:]]
    frame = pandas.DataFrame(cells, columns=list(map(html.escape, rows[0])))
    with pandas.option_context("display.max_colwidth", None):
        return f'<div class="wide">{frame.to_html(index=False, escape=False, border=0)}</div>\n'


def paragraphs(sentences: Sequence[str]) -> str:
    """Return sentences as an HTML list; empty without sentences."""
    return "<ul>" + "".join(f"<li>{html.escape(each)}</li>" for each in sentences) + "</ul>\n" if sentences else ""


def write_files(
    folder: Path, page: Mapping[str, str], tables: Mapping[str, pandas.DataFrame], figures: Sequence[Drawing]
) -> list[Path]:
    """Write a page, tables as CSV, and figures as light PNGs into a folder, made if missing; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {name: text.encode() for name, text in page.items()}
    contents |= {name: table.to_csv(index=False).encode() for name, table in tables.items()}
    contents |= {f"{each.name}.png": drawing.png(each, drawing.LIGHT, titled=True) for each in figures}
    for name, data in contents.items():
        replace_synced(folder / name, data)
    return [folder / name for name in contents]

"""The report of a study: a table, figures, and a page with both."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl8x.axes import Axis, along, chosen_axes, main_pair
from rl8x.drawing import MAX_LINES, Drawing, labelled
from rl8x.output import counted
from rl8x.studies import figures, page
from rl8x.studies.evaluations import Evaluations, Supports, read_evaluations
from rl8x.studies.figures import MAX_PANELS, chosen
from rl8x.studies.find import about, find_study, parent_run, plain_name
from rl8x.studies.statistics import Over
from rl8x.studies.summary import (
    HEADINGS,
    MEANINGS,
    Summary,
    cells_of,
    in_terminal,
    summarize,
    to_frame,
)
from rl8x.studies.table import FINAL
from rl8x.tracking.reading import RunReader

if TYPE_CHECKING:
    import pandas

PAGE = "report.html"
TABLE = "summary.csv"
_MAX_CURVES = 6  # parameters that have a figure of their own
_SUPPORT = (
    "The white outline is what was trained on: a rectangle, a line where one parameter was fixed, a cross for both."
)


@dataclass
class Report:
    """A study's statistics and figures; its text is the table for a terminal.

    Attributes:
        title: Name of the study.
        evaluations: Its table of evaluations.
        summary: The statistics.
        drawings: The figures, which are drawn when they are asked for.
        definition: The study as it was asked for, for the page; empty where it is not known.
        created: The day on which it was begun; empty where it is not known.
        units: Units of test parameters.
        folder: Where its files were written last; None where they were not.
    """

    title: str
    evaluations: Evaluations
    summary: Summary
    drawings: tuple[Drawing, ...]
    definition: Mapping[str, Any]
    created: str = ""
    units: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def frame(self) -> pandas.DataFrame:
        """The table: a row for each training and set of hyperparameters; `iqm`, `iqm_low`, `iqm_high`, and so on."""
        return to_frame(self.summary)

    def __str__(self) -> str:
        return in_terminal(self.summary, shutil.get_terminal_size((120, 24)).columns)

    @property
    def html(self) -> str:
        """The page."""
        rows = cells_of(self.summary)
        shown = {HEADINGS[name]: text for name, text in MEANINGS.items() if HEADINGS[name] in rows[0]}
        if self.summary.baseline:
            shown["baseline"] = f"{self.summary.baseline}, which P(improves) compares with"
        parts = [
            page.Section("Statistics", page.table(rows) + page.meanings(shown) + page.paragraphs(self.summary.notes))
        ]
        parts += map(page.image, self.drawings)
        parts.append(page.Section("The worst cell of the mean over seeds", page.table(self._worst_cells())))
        if self.definition:
            text = json.dumps(self.definition, indent=2, default=str)
            parts.append(page.Section("The study", page.folded("Its definition", text)))
        return page.page(self.title, self._lead(), parts)

    def _lead(self) -> str:
        groups, cells = self.evaluations.groups, self.evaluations.cells
        policies = sum(len(group.seeds) for group in groups)
        over = f", over {', '.join(map(str, cells.columns))}" if len(cells.columns) else ""
        named, begun = about(self.definition), f", begun on {self.created}" if self.created else ""
        first = f"{named['algorithm']} on {named['task']}{begun}. " if named else ""
        numbers = counted(policies, "policy", "policies"), counted(len(groups), "group", "groups")
        return f"{first}{' in '.join(numbers)}, each in {counted(len(cells), 'test cell', 'test cells')}{over}."

    def _worst_cells(self) -> list[list[str]]:
        """Return for each group the cell with the lowest mean over seeds, and beside it what each seed's own is."""
        names = [labelled(str(name), self.units) for name in self.evaluations.cells.columns]
        rows = [["", *names, "mean over seeds", HEADINGS["worst_cell"], "support"]]
        for group in self.evaluations.groups:
            means = group.scores.mean(axis=0)
            cell = int(means.argmin())
            values = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in self._cell(cell))
            within, seeds = int(group.inside[:, cell].sum()), len(group.seeds)
            of_some = f"inside for {within} of {seeds} seeds"
            support = "outside" if within == 0 else "inside" if within == seeds else of_some
            own = group.scores.min(axis=1).mean()
            rows.append([group.label, *values, f"{means[cell]:.4g}", f"{own:.4g}", support])
        return rows

    def _cell(self, cell: int) -> list[Any]:
        row: list[Any] = self.evaluations.cells.astype(object).iloc[cell].tolist()
        return row

    def write(self, folder: str | Path) -> list[Path]:
        """Write the page, the table and the figures, for a light page, into a folder; returns their paths."""
        paths = page.write_files(Path(folder), {PAGE: self.html}, {TABLE: self.frame}, self.drawings)
        self.folder = Path(folder)
        return paths


def report(
    study: str | Path,
    *,
    baseline: str | None = None,
    parameters: Sequence[str] | None = None,
    over: Over = "policies",
    level: float = 0.95,
    seed: int = 0,
    output: str | Path | None = None,
    log: bool = True,
    tracking_uri: str | None = None,
) -> Report:
    """Report on a study: statistics with intervals over seeds, figures, and a page, written and logged.

    Args:
        study: The study's folder, or the name or ID of its parent run in MLflow.
        baseline: The group that the others are compared with, by its label or training. None: the first.
        parameters: Test parameters to draw over; of two the heat maps are made. None: all, and of more than two those
            two for the heat maps that explain most.
        over: The units that the bootstrap draws: whole "policies", or seeds anew in each of the "cells" (see
            `rl8x.studies.statistics.bootstrap`).
        level: Coverage of the intervals.
        seed: Of the bootstrap's random numbers.
        output: Folder for the files. None: `report` in the study's folder, or `reports/NAME`.
        log: Whether the files are logged to the parent run too, where there is one.
        tracking_uri: Where the runs are. None: as in training.

    Raises:
        ValueError: If there is no such study, its table is empty or incomplete, or an option is not legal.
    """
    record = find_study(study, tracking_uri)
    report = make_report(
        record.table,
        record.supports,
        title=record.title,
        units=record.units,
        created=record.created,
        definition=record.definition,
        baseline=baseline,
        parameters=parameters,
        over=over,
        level=level,
        seed=seed,
    )
    files = report.write(record.folder if output is None else output)
    if log:
        run_id, uri = parent_run(record, tracking_uri)
        if run_id is not None:
            RunReader(uri).log_files(run_id, files, "report")
    return report


def make_report(
    table: pandas.DataFrame,
    supports: Supports | None = None,
    *,
    title: str = "Study",
    units: Mapping[str, str] | None = None,
    definition: Mapping[str, Any] | None = None,
    created: str = "",
    baseline: str | None = None,
    parameters: Sequence[str] | None = None,
    over: Over = "policies",
    level: float = 0.95,
    seed: int = 0,
) -> Report:
    """Make a report from a table of evaluations; writes nothing.

    Args:
        table: The evaluations, with the columns of `rl8x.studies.table`.
        supports: By training and parameter the lowest and highest value that was trained on; drawn where known.
        title: Name of the study.
        units: Units of test parameters, for the figures.
        definition: The study as it was asked for, shown on the page.
        created: The day on which it was begun, shown on the page.
        baseline: The group that the others are compared with, by its label or training. None: the first.
        parameters: Test parameters to draw over, see `report`.
        over: The units that the bootstrap draws: "policies" or "cells", see `report`.
        level: Coverage of the intervals.
        seed: Of the bootstrap's random numbers.

    Raises:
        ValueError: If the table is empty or incomplete, or an option is not legal.
    """
    evaluations = read_evaluations(table)
    axes, notes = chosen_axes(evaluations.cells, parameters)
    summary = summarize(evaluations, baseline=baseline, over=over, level=level, seed=seed)
    summary = summary._replace(notes=(*summary.notes, *_missing(evaluations, definition or {}), *notes))
    drawings = _drawings(evaluations, summary, axes, supports or {}, dict(units or {}))
    return Report(title, evaluations, summary, tuple(drawings), definition or {}, created, dict(units or {}))


def _missing(evaluations: Evaluations, definition: Mapping[str, Any]) -> list[str]:
    """Say how many policies of a study the table lacks; what a search comes to is not known before."""
    values = [definition.get(name) for name in ("train", "seeds")] + [*(definition.get("vary") or {}).values()]
    if definition.get("trials") is not None or not all(isinstance(each, list | Mapping) for each in values):
        return []
    planned = math.prod(len(each) for each in values if each is not None)
    missing = planned - sum(len(group.seeds) for group in evaluations.groups) - len(evaluations.notes)
    verb = "is" if missing == 1 else "are"
    sentence = f"{missing:,} of the study's {counted(planned, 'policy', 'policies')} {verb} missing"
    return [f"{sentence}: trainings that failed or are not done."] if missing > 0 else []


def _drawings(
    evaluations: Evaluations, summary: Summary, axes: list[Axis], supports: Supports, units: dict[str, str]
) -> list[Drawing]:
    """Choose the figures: what fits the number of test parameters."""
    rows = chosen(summary, MAX_LINES)
    groups = [evaluations.groups[row] for row in rows]
    some = _some(len(rows), len(evaluations.groups))
    band = f"Bands are {summary.level:.0%} intervals over seeds."
    drawings = [
        Drawing(
            "intervals",
            "Statistics with their intervals",
            f"Lines are estimates, bars {summary.level:.0%} intervals over seeds.{some}",
            partial(figures.intervals, summary, rows),
        )
    ]
    if len(axes) >= 2:
        drawings.append(_heat_maps(evaluations, summary, axes, supports, units))
    for axis in _main_axes(axes, evaluations):
        rest = [other.name for other in axes if other is not axis]
        marginal = f" Averaged over {', '.join(rest)}." if rest else ""
        binned = f" {axis.name} stands in {len(axis.values)} bins." if axis.binned else ""
        drawings.append(
            Drawing(
                f"curve-{plain_name(axis.name)}",
                f"Return over {axis.name}",
                f"Mean return of the last policies.{marginal}{binned} {band} Bars below are what was trained on.{some}",
                partial(figures.curves, groups, supports, axis, units, level=summary.level),
            )
        )
    drawings.append(
        Drawing(
            "profiles",
            "Performance profiles",
            f"Share of seeds and cells with a return above tau; higher is better. {band}{some}",
            partial(figures.profiles, groups, summary),
        )
    )
    if not evaluations.points[FINAL].astype(bool).all():
        caption = (
            f"Evaluations at several points of training. {band} A seed that has stopped keeps its last value.{some}"
        )
        draw = partial(figures.progress, evaluations, rows, level=summary.level)
        drawings.append(Drawing("training", "Generalisation in the course of training", caption, draw))
    return drawings


def _heat_maps(
    evaluations: Evaluations, summary: Summary, axes: list[Axis], supports: Supports, units: dict[str, str]
) -> Drawing:
    rows = chosen(summary, MAX_PANELS)
    groups = [evaluations.groups[row] for row in rows]
    x, y = axes if len(axes) == 2 else main_pair(axes, [group.scores.mean(axis=0) for group in groups])
    caption = "Mean return over seeds, one colour scale for all panels."
    if len(axes) > 2:
        rest = ", ".join(axis.name for axis in axes if axis not in (x, y))
        caption += (
            f" Averaged over {rest}: {x.name} and {y.name} are the two parameters that explain most of the variance."
        )
    if x.binned or y.binned:
        caption += " Cells were sampled and stand in bins; a bin without one is grey."
    if any(x.name in support and y.name in support for support in supports.values()):
        caption += f" {_SUPPORT}"
    caption += _some(len(rows), len(evaluations.groups))
    draw = partial(figures.heat_maps, groups, supports, x, y, units)
    return Drawing("heat-maps", f"Return over {x.name} and {y.name}", caption, draw)


def _main_axes(axes: list[Axis], evaluations: Evaluations) -> list[Axis]:
    """Return the axes along which the mean over all policies varies most."""

    def explained(axis: Axis) -> float:
        return -float(sum(along(group.scores.mean(axis=0), axis).var() for group in evaluations.groups))

    kept = sorted(axes, key=explained)[:_MAX_CURVES]
    return [axis for axis in axes if axis in kept] if len(axes) > _MAX_CURVES else list(axes)


def _some(shown: int, of: int) -> str:
    if shown == of:
        return ""
    return f" Of {of} groups {shown} are drawn: the baseline and the best by IQM."

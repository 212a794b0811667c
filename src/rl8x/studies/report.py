"""The report of a study, found by its folder or its run: a table, figures, and a page with both."""

from __future__ import annotations

import html
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pandas

from rl8x.disk import named_path
from rl8x.drawing import MAX_LINES, Axis, Drawing, along, chosen_axes, labelled, main_pair
from rl8x.output import counted, measured, percent
from rl8x.output import table as in_columns
from rl8x.plain import names_in
from rl8x.studies import figures, table
from rl8x.studies.statistics import HEADINGS, MEANINGS, Over, Summary, cells_of, summarize
from rl8x.studies.table import DEFINITION, EVALUATIONS, Evaluations, Supports, about, plain_name, read
from rl8x.tracking import TrackingError
from rl8x.tracking.location import is_default, locate, store_of
from rl8x.tracking.protocol import PARENT_TAG
from rl8x.tracking.runs import RunReader

PAGE: Final = "report.html"
_MAX_CURVES: Final = 6  # most parameters with a separate figure
_UNFINISHED: Final = "they are there when it has come to its end; `rl8x study` goes on with it"


@dataclass(frozen=True)
class FoundStudy:
    """The parts of a study that a report needs; unknown ones are empty or None."""

    table: pandas.DataFrame
    supports: Supports = field(default_factory=dict)  # ends of the training's range, by training and parameter
    definition: Mapping[str, Any] = field(default_factory=dict)  # the study's config as plain data
    units: Mapping[str, str] = field(default_factory=dict)
    created: str = ""  # the date on which it began: 2026-11-25
    run_key: str = ""  # the key of its parent run
    mlruns: str = ""  # the folder that has its runs where no other store is named
    title: str = "Study"
    folder: Path = Path("report")  # the default folder of the report's files
    run_id: str | None = None  # the ID of its parent run, if it was found by that


def find_study(study: str | Path, tracking_uri: str | None = None) -> FoundStudy:
    """Find a study with a table of evaluations by its folder, or by the name or ID of its parent run."""
    folder = named_path(study, "`study`, a folder or a run's name or ID,")
    if os.path.isfile(folder / EVALUATIONS):
        return _read_study(folder, folder.resolve().name, folder / "report", None)
    if os.path.isfile(folder / DEFINITION):
        raise ValueError(f"the study in {folder} has no results yet: {_UNFINISHED}.")
    try:
        reader = RunReader(tracking_uri)
        run = reader.run(str(study))
    except TrackingError:
        if os.path.isdir(folder):
            read(folder / EVALUATIONS)  # raises, as the file is missing
        raise
    with tempfile.TemporaryDirectory() as copies:
        with reader.store() as store:
            for name in (EVALUATIONS, DEFINITION):
                store.download(run.id, name, Path(copies))
        if not (Path(copies) / EVALUATIONS).exists():
            if table.STUDY_TAG in run.tags and PARENT_TAG not in run.tags:
                raise ValueError(f"the study {run.name!r} has no results yet: {_UNFINISHED}.")
            raise ValueError(f"the run {run.name!r} has no artifact {EVALUATIONS}: it is no study's parent run.")
        return _read_study(Path(copies), run.name, Path("reports") / plain_name(run.name), run.id)


def _read_study(folder: Path, title: str, output: Path, run_id: str | None) -> FoundStudy:
    evaluations = read(folder / EVALUATIONS)
    if not all(isinstance(evaluations.get(name), list) for name in ("columns", "data")):
        raise ValueError(f"{folder / EVALUATIONS} is no table: it needs `columns` and `data`, as MLflow logs tables.")
    stored = read(folder / DEFINITION) if (folder / DEFINITION).exists() else {}
    kept = ("supports", "definition", "units", "created", "run_key", "mlruns")
    known = {name: stored[name] for name in kept if name in stored}
    named = stored.get("definition", {}).get("name", title)
    return FoundStudy(table.from_plain(evaluations), **known, title=named, folder=output, run_id=run_id)


@dataclass
class Report:
    """A study's statistics and figures, drawn on demand, last written to `folder`; its text is the table."""

    study: FoundStudy
    evaluations: Evaluations
    summary: Summary
    drawings: list[Drawing]
    folder: Path | None = None

    @property
    def frame(self) -> pandas.DataFrame:
        """The table: a row for each training and set of hyperparameters; `iqm`, `iqm_low`, `iqm_high`, and so on."""
        return self.summary.frame

    def __str__(self) -> str:
        width = shutil.get_terminal_size((120, 24)).columns
        return "\n\n".join([in_columns(cells_of(self.summary), width), "\n".join(self.summary.notes)])

    @property
    def html(self) -> str:
        """The HTML page."""
        rows = cells_of(self.summary)
        shown = {heading: text for heading, text in MEANINGS.items() if heading in rows[0]}
        if self.summary.baseline:
            shown["baseline"] = f"{self.summary.baseline}, which P(improves) compares with"
        items = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in shown.items())
        meanings = f'<dl class="meanings">{items}</dl>\n'
        statistics = figures.table(rows) + meanings + figures.paragraphs(self.summary.notes)
        worst = "The worst cell of the mean over seeds", figures.table(self._worst_cells())
        parts = [("Statistics", statistics), *map(figures.image, self.drawings), worst]
        if self.study.definition:
            text = json.dumps(self.study.definition, indent=2, default=str)
            folded = f"<summary>Its definition</summary><pre>{html.escape(text)}</pre>"
            parts.append(("The study", f"<details>{folded}</details>\n"))
        return figures.page(self.study.title, self._lead(), parts)

    def _lead(self) -> str:
        groups, cells = self.evaluations.groups, self.evaluations.cells
        policies = counted(sum(len(group.seeds) for group in groups), "policy", "policies")
        over = f", over {', '.join(map(str, cells.columns))}" if len(cells.columns) else ""
        named, begun = about(self.study.definition), f", begun on {self.study.created}" if self.study.created else ""
        first = f"{named['algorithm']} on {named['task']}{begun}. " if named else ""
        tested = f"{counted(len(groups), 'group')}, each in {counted(len(cells), 'test cell')}"
        return f"{first}{policies} in {tested}{over}."

    def _worst_cells(self) -> list[list[str]]:
        """Return for each group the cell with the lowest mean over seeds, and the mean of the seeds' own lowest."""
        cells = self.evaluations.cells
        names = [labelled(str(name), self.study.units) for name in cells.columns]
        rows = [["", *names, "mean over seeds", HEADINGS["worst_cell"], "support"]]
        for group in self.evaluations.groups:
            means, own = group.scores.mean(axis=0), group.scores.min(axis=1).mean()
            cell = int(means.argmin())
            row = cells.astype(object).iloc[cell].tolist()
            values = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in row)
            within, seeds = int(group.inside[:, cell].sum()), len(group.seeds)
            support = {0: "outside", seeds: "inside"}.get(within, f"inside for {within} of {seeds} seeds")
            rows.append([group.label, *values, measured(means[cell]), measured(own), support])
        return rows

    def write(self, folder: str | Path) -> list[Path]:
        """Write the page, the table and light figures into a folder; return their paths."""
        paths = figures.write_files(Path(folder), {PAGE: self.html}, {"summary.csv": self.frame}, self.drawings)
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
        parameters: Test parameters to draw over, None for all. Heat maps show two of them; of more than two, those that
            explain most.
        over: The units that the bootstrap draws: whole "policies", or seeds separately in each of the "cells" (see
            `rl8x.studies.statistics.bootstrap`).
        level: Coverage of the intervals.
        seed: Seed of the bootstrap's random numbers.
        output: Folder for the files. None: `report` in the study's folder, or `reports/NAME`.
        log: Whether the files are also logged to the parent run, if there is one.
        tracking_uri: MLflow's tracking URI of the runs. None: as in training.
    """
    found = find_study(study, tracking_uri)
    report = make_report(found, parameters, baseline=baseline, over=over, level=level, seed=seed)
    files = report.write(found.folder if output is None else output)
    if log and (found.run_id or (found.run_key and found.definition.get("tracking") is not False)):
        named = tracking_uri or found.definition.get("tracking_uri")
        location = locate(named if found.run_id else store_of(found.folder.parent, named, found.mlruns)["tracking_uri"])
        if is_default(location) and location.database and not location.database.exists():  # a folder from elsewhere
            return report
        reader = RunReader(location.uri)
        run = reader.run(found.run_id) if found.run_id else reader.run_of_journal(found.run_key)
        if run is not None:
            with reader.store() as store:
                for file in files:
                    store.log_artifact(run.id, file, "report")
    return report


def make_report(study: FoundStudy, parameters: Sequence[str] | None = None, **options: Any) -> Report:
    """Make the report of a found study without writing it; `options` are those of `summarize`."""
    evaluations = table.read_evaluations(study.table)
    parameters = None if parameters is None else names_in(parameters)
    axes, notes = chosen_axes(evaluations.cells, parameters)
    summary = summarize(evaluations, **options)
    summary = summary._replace(notes=(*summary.notes, *_missing(evaluations, study.definition), *notes))
    return Report(study, evaluations, summary, [*_drawings(evaluations, summary, axes, study)])


def _missing(evaluations: Evaluations, definition: Mapping[str, Any]) -> list[str]:
    """Return a sentence if the table lacks policies of the study; none for a search, whose number is not known."""
    values: list[Any] = [definition.get("train"), definition.get("seeds"), *(definition.get("vary") or {}).values()]
    if definition.get("trials") is not None or None in values:
        return []
    planned = math.prod(map(len, values))
    missing = planned - sum(len(group.seeds) for group in evaluations.groups) - len(evaluations.notes)
    verb = "is" if missing == 1 else "are"
    sentence = f"{missing:,} of the study's {counted(planned, 'policy', 'policies')} {verb} missing"
    return [f"{sentence}: trainings that failed or are not done."] if missing > 0 else []


def _drawings(evaluations: Evaluations, summary: Summary, axes: list[Axis], study: FoundStudy) -> Iterator[Drawing]:
    """Yield the figures that fit the number of test parameters."""
    rows, level = figures.chosen(summary, MAX_LINES), summary.level
    groups = [evaluations.groups[row] for row in rows]
    over = f"{percent(level)} intervals over seeds.{_some(len(rows), evaluations)}"
    caption = f"Lines are estimates, bars {over}"
    yield Drawing("intervals", "Statistics with their intervals", caption, partial(figures.intervals, summary, rows))
    if len(axes) >= 2:
        yield _heat_maps(evaluations, summary, axes, study)

    def explained(axis: Axis) -> float:
        return sum(float(along(group.scores.mean(axis=0), axis).var()) for group in evaluations.groups)

    main = sorted(axes, key=explained, reverse=True)[:_MAX_CURVES]
    for axis in (axis for axis in axes if axis in main):
        rest = [other.name for other in axes if other is not axis]
        others = f" Averaged over {', '.join(rest)}." if rest else ""
        binned = f" {axis.name} stands in {len(axis.values)} bins." if axis.binned else ""
        caption = f"Mean return of the last policies.{others}{binned} Bars below are what was trained on, bands {over}"
        draw = partial(figures.curves, groups, study.supports, axis, study.units, level=level)
        yield Drawing(f"curve-{plain_name(axis.name)}", f"Return over {axis.name}", caption, draw)
    caption = f"Share of seeds and cells with a return above tau; higher is better. Bands are {over}"
    yield Drawing("profiles", "Performance profiles", caption, partial(figures.profiles, groups, summary))
    if not evaluations.points[table.FINAL].astype(bool).all():
        caption = f"Evaluations in the course of training; a seed that stops keeps its last value. Bands are {over}"
        draw = partial(figures.progress, evaluations.points, groups, level=level)
        yield Drawing("training", "Generalisation in the course of training", caption, draw)


def _heat_maps(evaluations: Evaluations, summary: Summary, axes: list[Axis], study: FoundStudy) -> Drawing:
    groups = [evaluations.groups[row] for row in figures.chosen(summary, figures.MAX_PANELS)]
    x, y = axes if len(axes) == 2 else main_pair(axes, [group.scores.mean(axis=0) for group in groups])
    caption, both = "Mean return over seeds, one colour scale for all panels.", f"{x.name} and {y.name}"
    if len(axes) > 2:
        rest = ", ".join(axis.name for axis in axes if axis not in (x, y))
        caption += f" Averaged over {rest}: {both} are the two parameters that explain most of the variance."
    if x.binned or y.binned:
        caption += " Cells were sampled and stand in bins; a bin without one is grey."
    if any(x.name in support and y.name in support for support in study.supports.values()):
        caption += " The white outline is what was trained on: a rectangle, a line if one is fixed, a cross for both."
    draw = partial(figures.heat_maps, groups, study.supports, x, y, study.units)
    return Drawing("heat-maps", f"Return over {both}", caption + _some(len(groups), evaluations), draw)


def _some(shown: int, evaluations: Evaluations) -> str:
    of = len(evaluations.groups)
    return "" if shown == of else f" Of {of} groups {shown} are drawn: the baseline and the best by IQM."

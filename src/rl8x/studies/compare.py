"""Compares runs: the params that differ, final and best metrics, and learning curves."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas

from rl8x import drawing, keys
from rl8x.checkpoint import files
from rl8x.conditions.base import nearest_metrics
from rl8x.drawing import LIGHT, Curve, Drawing, Theme
from rl8x.names import did_you_mean
from rl8x.output import counted, cut_apart, in_line, measured, percent, table, width_of
from rl8x.plain import names_in
from rl8x.studies import figures, statistics
from rl8x.studies.table import DEFINITION, plain_name, read, read_if_there
from rl8x.tracking.location import locate, store_of
from rl8x.tracking.private import RunRecord
from rl8x.tracking.protocol import PARENT_TAG, legal_name
from rl8x.tracking.runs import RunReader
from rl8x.tracking.sender import PARAM_CHANGE_TAG

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE: Final = "compare.html"
_CURVE: Final = ("steps", "mean", "low", "high")
_POINTS: Final = ["run_id", "metric", "step", "value"]
# Metrics for which a run logs `best/NAME`, the best over all its rows.
_WITH_BEST: Final = (*keys.EVALUATED_RETURNS, *keys.TRAINED_RETURNS)
_PREFERRED: Final = ("eval/returns/mean", "episodes/returns/mean", "eval/horizon_returns/mean", "returns/mean")
_UNLIKELY: Final = ("profiling/", "memory/", "algorithm/", "env/", "coefficients/")
_PREFIX: Final = "algorithm_config."
_FACTS: Final = ("execution.compiled_from", "model.num_parameters")  # follow from other params, or from chance
_MAX_VALUE: Final = 40  # characters of a param's value that a table or label shows


@dataclass
class Comparison:
    """A comparison of runs; its text is the table for a terminal.

    Attributes:
        runs: The runs, in the requested order.
        metrics: The compared metrics.
        points: The finite points of all curves: `run_id`, `metric`, `step` by the clock of its algorithm, `value`.
        group_by: The params by whose values runs are grouped.
        groups: The runs of each group by its label; without `group_by` each run is a group.
        minimize: Whether the lowest value of a metric is its best one.
        level: Coverage of the intervals.
        folder: The folder of the last `write`; None before that.
    """

    runs: tuple[RunRecord, ...]
    metrics: tuple[str, ...]
    points: pandas.DataFrame
    group_by: tuple[str, ...]
    groups: dict[str, list[RunRecord]]
    minimize: bool = False
    level: float = 0.95
    folder: Path | None = None

    @property
    def frame(self) -> pandas.DataFrame:
        """A row for each run.

        `params.NAME` are the params that differ (`0.01, later 0.001` if a run was resumed with another value), and
        `steps` is the last step of the run. Each metric has its last value, its best value (`best/NAME`), and the step
        of the best (`best_step/NAME`).
        """
        rows, shown, last = [], differing(self.runs), self.points.groupby("run_id")["step"].max()
        for run in self.runs:
            params, clock = params_of(run), _clock_of(run)
            # A run without a clock ends at the last step of the compared metrics.
            steps = last.get(run.id, math.nan) if clock is None else run.metrics[clock]
            row: dict[str, Any] = {"run_id": run.id, "name": run.name, "status": run.status}
            row |= {f"params.{name}": params.get(name) for name in shown} | {"steps": steps}
            for metric in self.metrics:
                row |= zip((metric, f"best/{metric}", f"best_step/{metric}"), self._values(metric, run), strict=True)
            rows.append(row)
        return pandas.DataFrame(rows)

    def _values(self, metric: str, run: RunRecord) -> tuple[float, float, float]:
        """Return the last value of a run's metric, its best value, and the step of the best."""
        own = self._of(metric, run)
        if own.empty:
            return statistics.NOTHING
        best = own.loc[own["value"].idxmin() if self.minimize else own["value"].idxmax()]
        value, step = float(best["value"]), float(best["step"])
        of_all_rows = run.metrics.get(f"best/{metric}", math.nan)
        if metric in _WITH_BEST and not self.minimize and of_all_rows > value:  # the history is thinned and lacks it
            value, step = of_all_rows, run.metrics.get(f"best_step/{metric}", math.nan)
        return float(own["value"].iloc[-1]), value, step

    def _of(self, metric: str, run: RunRecord) -> pandas.DataFrame:
        """Return the points of a run's metric."""
        return self.points[(self.points["metric"] == metric) & (self.points["run_id"] == run.id)]

    @property
    def grouped(self) -> pandas.DataFrame:
        """A row for each group: the number of runs, and means with intervals of each metric's last and best value."""
        frame = self.frame.set_index("run_id")
        rows = []
        for label, runs in self.groups.items():
            row: dict[str, Any] = {"group": label, "runs": len(runs)}
            for name in self._heads:
                values = frame.loc[[run.id for run in runs], name].dropna()
                found: Sequence[Any] = statistics.NOTHING
                if len(values):
                    found = statistics.bootstrap(statistics.mean, values.to_numpy()[:, None], level=self.level)
                row |= zip((name, f"{name}_low", f"{name}_high"), map(float, found), strict=True)
            rows.append(row)
        return pandas.DataFrame(rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats about the numbers, in sentences."""
        lacking = {name: [run.name for run in self.runs if self._of(name, run).empty] for name in self.metrics}
        notes = [f"No value of {name} in {statistics.named(runs)}." for name, runs in lacking.items() if runs]
        sizes = {len(own) for own in self.groups.values()} if self.group_by else {0}
        if max(sizes) > 1:
            notes.append(f"Intervals: {percent(self.level)}, percentiles of a bootstrap over the runs of a group.")
        if 1 in sizes:
            notes.append("A group of one run has no interval.")
        return tuple(notes)

    def cells(self) -> list[list[str]]:
        """Return the table of runs as texts, headings first; with a column `status` unless all runs are FINISHED."""
        frame = self.frame
        columns = [["run", *map(in_line, frame["name"])]]
        for name in (name for name in frame if name.startswith("params.")):
            columns.append([name.removeprefix("params."), *cut_apart([*frame[name].fillna("-")], _MAX_VALUE)])
        if set(frame["status"]) != {"FINISHED"}:
            columns.append(["status", *frame["status"].str.lower()])
        columns.append(["steps", *frame["steps"].map(_count)])
        for metric in self.metrics:
            columns += [[self._heads[name], *frame[name].map(_number)] for name in (metric, f"best/{metric}")]
            columns.append(["at step", *frame[f"best_step/{metric}"].map(_count)])
        return [list(row) for row in zip(*columns, strict=True)]

    def grouped_cells(self) -> list[list[str]]:
        """Return the table of groups as texts, headings first."""
        frame = self.grouped
        columns = [["group", *frame["group"]], ["runs", *frame["runs"].astype(str)]]
        for name, head in self._heads.items():
            estimates = statistics.estimates_of(frame, name).to_numpy()
            columns.append([head, *(statistics.in_words(each, _decimals(each[0])) for each in estimates)])
        return [list(row) for row in zip(*columns, strict=True)]

    @property
    def _heads(self) -> dict[str, str]:
        """The headings of the columns of last and best values, by column."""
        best, heads = "lowest" if self.minimize else "best", dict[str, str]()
        for metric in self.metrics:
            heads |= {metric: metric, f"best/{metric}": f"{best} {metric}"}
        return heads

    def __str__(self) -> str:
        width = shutil.get_terminal_size((120, 24)).columns
        rows = self.cells()
        turned = [list(column) for column in zip(*rows, strict=True)]
        rows = turned if width_of(rows) > max(width, width_of(turned)) else rows
        tables = [rows, *([self.grouped_cells()] if self.group_by else [])]
        return "\n\n".join([*(table(rows, width) for rows in tables), *["\n".join(self.notes)] * bool(self.notes)])

    def curves(self, metric: str) -> dict[str, Curve]:
        """Return the mean learning curve of each group with its interval, on common steps of its runs.

        Args:
            metric: The metric's name.
        """
        curves = {}
        for label, runs in self.groups.items():
            parts = [self._of(metric, run) for run in runs]
            if points := [(own["step"], own["value"]) for own in parts if len(own)]:
                curves[label] = statistics.mean_curve(points, level=self.level)
        return curves

    @property
    def drawings(self) -> list[Drawing]:
        """The figures, one for each metric."""
        over = f" Lines are means over runs, bands {percent(self.level)} intervals." if self.group_by else ""
        caption = f"Against the {self.clock}, aligned by interpolation; a run that stops keeps its last value.{over}"

        def draw(metric: str, theme: Theme) -> Figure:
            return drawing.draw_panels([self.curves(metric)], [metric], self.clock, theme, width=1, legend=True)

        return [Drawing(f"curve-{plain_name(each)}", each, caption, partial(draw, each)) for each in self.metrics]

    @property
    def figure(self) -> Figure:
        """The figure of the first metric, for a light page; `drawings` has them all."""
        return drawing.drawn(self.drawings[0], LIGHT, titled=True)

    @property
    def clock(self) -> str:
        """The unit of the steps, in words."""
        clocks = {_clock_of(run) for run in self.runs}
        known = {keys.ENV_STEPS: "transitions of training", keys.UPDATES: "updates"}
        return next((words for clock, words in known.items() if clocks == {clock}), "clock of the algorithm")

    @property
    def html(self) -> str:
        """The HTML page."""
        lead = counted(len(self.runs), "run")
        sections = [("Runs", figures.table(self.cells()) + figures.paragraphs(self.notes))]
        if self.group_by:
            lead += f", grouped by {', '.join(self.group_by)}"
            sections.append(("Groups", figures.table(self.grouped_cells())))
        return figures.page("Comparison of runs", f"{lead}.", [*sections, *map(figures.image, self.drawings)])

    def write(self, folder: str | Path) -> list[Path]:
        """Write the page, tables and figures; return their paths, the page first.

        Args:
            folder: The folder, which is made if it is missing.
        """
        tables = {"runs.csv": self.frame} | ({"groups.csv": self.grouped} if self.group_by else {})
        parts = [
            pandas.DataFrame({"metric": metric, "group": label} | dict(zip(_CURVE, curve, strict=True)))
            for metric in self.metrics
            for label, curve in self.curves(metric).items()
        ]
        tables["curves.csv"] = pandas.concat(parts)
        paths = figures.write_files(Path(folder), {PAGE: self.html}, tables, self.drawings)
        self.folder = Path(folder)
        return paths


def compare(
    runs: Sequence[str | Path] | str | Path = (),
    *,
    experiment: str | None = None,
    metrics: Sequence[str] | str | None = None,
    group_by: Sequence[str] | str = (),
    minimize: bool = False,
    level: float = 0.95,
    tracking_uri: str | None = None,
    output: str | Path | None = None,
) -> Comparison:
    """Compare runs.

    Args:
        runs: Names or IDs of runs, or folders of checkpoints, or a single one; a run with children stands for these.
        experiment: Name or ID of an experiment whose runs are also compared.
        metrics: The metrics to compare, or one. None: returns of evaluations if all runs have them, else of training.
        group_by: Params by whose values runs are grouped; runs of a group are averaged.
        minimize: Whether the lowest value of a metric is its best one.
        level: Coverage of the intervals over the runs of a group, in (0, 1).
        tracking_uri: MLflow's tracking URI of the runs. None: as in training.
        output: A folder for a page, tables and figures. None: nothing is written.

    Returns:
        The comparison; its text is the table for a terminal.

    Raises:
        ValueError: If a run, metric or param does not exist, the runs are of several stores or have no common metric,
            or `level` is illegal.

    Source: intervals are percentiles of a bootstrap: Efron and Tibshirani 1993, chapter 13.
    """
    statistics.check_level(level)
    runs, metrics, group_by = map(names_in, (runs, metrics, group_by))
    uris = [_store_of(Path(word), tracking_uri) for word in runs] + [tracking_uri] * (experiment is not None)
    if len(stores := {locate(uri).uri: locate(uri).shown for uri in uris}) > 1:
        named = " and ".join(stores.values())
        raise ValueError(f"the runs are of several stores, {named}: compare those of one, or name it by tracking_uri.")
    reader = RunReader(uris[0] if uris else tracking_uri)
    records = find_runs(reader, runs, experiment)
    names = tuple(dict.fromkeys(metrics)) or (common_metric(records),)
    histories = reader.histories(records, names)
    rows = [
        (run.id, name, step, value)
        for name in names
        for run in records
        for step, value in zip(*histories[name].get(run.id, ([], [])), strict=True)
        if math.isfinite(value)
    ]
    points = pandas.DataFrame(rows, columns=_POINTS).astype({"step": np.float64, "value": np.float64})
    for name in (name for name in names if name not in set(points["metric"])):
        if histories[name]:
            raise ValueError(f"{name!r} has no finite value in any of the runs; name another metric.")
        known = {metric for run in records for metric in run.metrics}
        raise ValueError(f"no run has the metric {name!r}.{nearest_metrics(name, known)}")
    by = tuple(param_name(name, records) for name in group_by)
    comparison = Comparison(tuple(records), names, points, by, grouped_runs(records, by), minimize, level)
    if output is not None:
        comparison.write(output)
    return comparison


def _store_of(word: Path, tracking_uri: str | None) -> str | None:
    """Return the store of a run's or a study's folder, and for a name the one that training would use here."""
    if not os.path.isdir(word):
        return tracking_uri
    return store_of(word, tracking_uri, (read_if_there(word / DEFINITION) or {}).get("mlruns"))["tracking_uri"]


def find_runs(reader: RunReader, runs: Sequence[str | Path], experiment: str | None) -> list[RunRecord]:
    """Find runs by name, ID, or folder of a study or of checkpoints, without duplicates; children replace a parent."""
    found: list[RunRecord] = []
    for word in runs:
        run = _of_folder(reader, Path(word)) or reader.run(str(word))
        found += reader.children(run.id) or [run]
    if experiment is not None:
        listed = reader.experiment(experiment)
        parents = {run.tags.get(PARENT_TAG) for run in listed}
        found += [run for run in listed if run.id not in parents]
        if not found:
            raise ValueError(f"the experiment {experiment!r} has no runs.")
    if not found:
        raise ValueError("no run is named: give names or IDs of runs, folders of checkpoints, or an experiment.")
    return list({run.id: run for run in found}.values())


def _of_folder(reader: RunReader, path: Path) -> RunRecord | None:
    """Find the parent run of a study's folder, or the run of checkpoints; None if a path is neither."""
    if os.path.isfile(path / DEFINITION):
        handle, problem = read(path / DEFINITION).get("run_key", ""), f"the study in {path} has no runs in MLflow."
    elif files.is_place(path):
        known = files.describe([path, *files.listed(path)][-1])["run"]
        if known["id"]:
            return reader.run(known["id"])
        handle, problem = known["handle"], f"{path} has checkpoints of a run that is not in MLflow."
    else:
        return None
    if (run := reader.run_of_journal(str(handle))) is None:
        raise ValueError(problem)
    return run


def _clock_of(run: RunRecord) -> str | None:
    """Return the counter that a run's steps count: transitions, else updates; None if it logs neither."""
    return next((name for name in (keys.ENV_STEPS, keys.UPDATES) if run.metrics.get(name, 0) > 0), None)


def common_metric(runs: Sequence[RunRecord]) -> str:
    """Return the default metric to compare, which all runs have: returns of evaluations, else of training, else any."""
    common = set.intersection(*(set(run.metrics) for run in runs))
    others = sorted(name for name in common if not name.startswith(_UNLIKELY))
    if useful := [*filter(common.__contains__, _PREFERRED), *others]:
        return useful[0]
    without = [run.name for run in runs if not run.metrics]
    why = f"; without any: {', '.join(without[:5])}" if without else ""
    raise ValueError(f"there is no metric that all of the runs have{why}. Leave runs out, or name a metric.")


def params_of(run: RunRecord) -> dict[str, str]:
    """Return a run's params; one that changed at a resume, which is a tag in MLflow, reads `0.01, later 0.001`."""
    changed = {name: run.tags.get(legal_name(PARAM_CHANGE_TAG + name)) for name in run.params}
    later = {name: f", later {value}" for name, value in changed.items() if value is not None}
    return {name: value + later.get(name, "") for name, value in run.params.items()}


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """List the params whose values differ between runs, without those that other params imply.

    The given `model_config.hidden_sizes` is left out if every run has the model's own `model.hidden_sizes`.
    """
    params = [params_of(run) for run in runs]
    names = dict.fromkeys(name for own in params for name in own)
    found = [name for name in names if len({own.get(name) for own in params}) > 1]
    found = [name for name in found if name not in _FACTS] or found
    twins = {name: "{}.{}".format(*name.split("_config.", 1)) for name in found if "_config." in name}
    return [name for name in found if not all(twins.get(name) in own for own in params)]


def param_name(name: str, runs: Sequence[RunRecord]) -> str:
    """Find a param by its name in MLflow or in run files: `lr` may be called `algorithm_config.lr`."""
    known = dict.fromkeys(param for run in runs for param in run.params)
    for candidate in (name, name.removeprefix(_PREFIX), _PREFIX + name):
        if candidate in known:
            return candidate
    differ = differing(runs)
    raise ValueError(
        f"no run has the param {name!r}; those that differ: {', '.join(differ) or 'none'}.{did_you_mean(name, known)}"
    )


def grouped_runs(runs: Sequence[RunRecord], by: Sequence[str]) -> dict[str, list[RunRecord]]:
    """Group runs by the values of the params `by`, in the order of these values; without params each run alone."""
    if not by:
        names = Counter(run.name for run in runs)  # names need not be unique, unlike IDs
        return {run.name if names[run.name] == 1 else f"{run.name} ({run.id[:8]})": [run] for run in runs}
    groups: dict[str, list[RunRecord]] = {}
    values = {run.id: [params_of(run).get(name) for name in by] for run in runs}
    ordered = sorted(runs, key=lambda run: [*map(_order, values[run.id])])
    shown = [cut_apart([str(values[run.id][place]) for run in ordered], _MAX_VALUE) for place in range(len(by))]
    for run, own in zip(ordered, zip(*shown, strict=True), strict=True):
        groups.setdefault(", ".join(map("{}={}".format, by, own)), []).append(run)
    return groups


def _order(value: str | None) -> tuple[int, float, str]:
    """Return a key that sorts numbers before other values, and missing values last."""
    with contextlib.suppress(ValueError):
        return (2, 0.0, "") if value is None else (0, float(value), value)
    return 1, 0.0, str(value)


def _decimals(value: float) -> int:
    if not math.isfinite(value) or value == 0:
        return 1
    return max(0, 3 - math.floor(math.log10(abs(value))))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else measured(value)


def _count(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"

"""Runs side by side: the params that differ, final and best metrics, and learning curves."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from rl8x import drawing, keys
from rl8x.drawing import LIGHT, Curve, Drawing, Theme
from rl8x.names import did_you_mean
from rl8x.output import counted
from rl8x.studies import page, statistics
from rl8x.studies.find import find_runs, plain_name
from rl8x.studies.run_groups import MAX_VALUE, common_metric, differing, grouped_runs, param_name, params_of
from rl8x.studies.statistics import Array, Estimate
from rl8x.studies.summary import in_words
from rl8x.studies.terminal import cut_middle, in_blocks, width_of
from rl8x.tracking.database_runs import Points, RunRecord
from rl8x.tracking.reading import RunReader

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

PAGE: Final = "compare.html"
_CURVE: Final = ("steps", "mean", "low", "high")
# Of these a run has `best/NAME` of all its rows; in a study's training `best/returns/mean` is of evaluations.
_WITH_BEST: Final = (*keys.EVALUATED_RETURNS, keys.TRAINED_RETURNS[0])


class Track(NamedTuple):
    """A metric of a run: steps, which are the clock of its algorithm, and values, finite ones alone."""

    run: RunRecord
    steps: Array
    values: Array


@dataclass
class Comparison:
    """Runs side by side; its text is the table for a terminal.

    Attributes:
        runs: In the order in which they were asked for.
        metrics: The metrics that are compared.
        tracks: By metric, the curve of each run that has it.
        group_by: The params whose values make groups.
        groups: The runs of each group, by its label; one group a run where nothing groups them.
        notes: Reservations about the figures, in sentences.
        minimize: Whether the lowest value of a metric is its best one.
        level: Coverage of the intervals.
        folder: Where its files were written last; None where they were not.
    """

    runs: tuple[RunRecord, ...]
    metrics: tuple[str, ...]
    tracks: dict[str, list[Track]]
    group_by: tuple[str, ...]
    groups: dict[str, list[RunRecord]]
    notes: tuple[str, ...]
    minimize: bool = False
    level: float = 0.95
    folder: Path | None = None

    @property
    def frame(self) -> pandas.DataFrame:
        """A row for each run.

        `params.NAME` are the params that differ (`0.01, later 0.001` where a run went on with another value), `steps`
        is where the run ended, and of each metric there are the last value, the best one (`best/NAME`), and the step of
        that (`best_step/NAME`).
        """
        import pandas

        rows, shown = [], differing(self.runs)
        for run in self.runs:
            row: dict[str, Any] = {"run_id": run.id, "name": run.name, "status": run.status}
            params = params_of(run)
            row |= {f"params.{name}": params.get(name) for name in shown}
            row["steps"] = self._last_step(run)
            for metric in self.metrics:
                row |= self._values(metric, run)
            rows.append(row)
        return pandas.DataFrame(rows)

    def _last_step(self, run: RunRecord) -> float:
        """Return the last count of a run's clock; where it logs none, the last step of the metrics compared."""
        clock = _clock_of(run)
        if clock is not None:
            return run.metrics[clock]
        steps = [track.steps.max() for tracks in self.tracks.values() for track in tracks if track.run is run]
        return max(map(float, steps), default=math.nan)

    def _values(self, metric: str, run: RunRecord) -> dict[str, float]:
        track = next((track for track in self.tracks[metric] if track.run is run), None)
        names = (metric, f"best/{metric}", f"best_step/{metric}")
        if track is None:
            return dict.fromkeys(names, math.nan)
        best = int(track.values.argmin() if self.minimize else track.values.argmax())
        value, step = float(track.values[best]), float(track.steps[best])
        own = run.metrics.get(names[1], math.nan)
        if metric in _WITH_BEST and not self.minimize and own > value:  # its point was thinned out
            value, step = own, run.metrics.get(names[2], math.nan)
        return dict(zip(names, (float(track.values[-1]), value, step), strict=True))

    @property
    def grouped(self) -> pandas.DataFrame:
        """A row for each group: its runs, and mean and interval over them of each metric's last and best value."""
        import pandas

        frame = self.frame.set_index("run_id")
        rows = []
        for label, runs in self.groups.items():
            row: dict[str, Any] = {"group": label, "runs": len(runs)}
            for metric in self.metrics:
                for name in (metric, f"best/{metric}"):
                    estimate = self._over_runs(frame.loc[[run.id for run in runs], name].to_numpy(dtype=np.float64))
                    row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            rows.append(row)
        return pandas.DataFrame(rows)

    def _over_runs(self, values: Array) -> Estimate:
        values = values[np.isfinite(values)]
        if not len(values):
            return Estimate(*(np.array(math.nan) for _ in range(3)))
        return statistics.bootstrap(statistics.mean, values[:, None], level=self.level)

    def cells(self) -> list[list[str]]:
        """Return the table of runs as texts, the headings first; with how each ended unless all have finished."""
        frame, params = self.frame, differing(self.runs)
        best = "lowest" if self.minimize else "best"
        heads = [part for metric in self.metrics for part in (metric, f"{best} {metric}", "at step")]
        ends = {run.status for run in self.runs} != {"FINISHED"}
        rows = [["run", *params, *["status"] * ends, "steps", *heads]]
        for run, (_, row) in zip(self.runs, frame.iterrows(), strict=True):
            own = params_of(run)
            shown = [cut_middle(own.get(name, "-"), MAX_VALUE) for name in params]
            numbers = [_count(row["steps"])]
            for metric in self.metrics:
                numbers += [_number(row[metric]), _number(row[f"best/{metric}"]), _count(row[f"best_step/{metric}"])]
            rows.append([run.name, *shown, *[run.status.lower()] * ends, *numbers])
        return rows

    def grouped_cells(self) -> list[list[str]]:
        """Return the table of groups as texts, the headings first."""
        best = "lowest" if self.minimize else "best"
        rows = [["group", "runs", *(part for metric in self.metrics for part in (metric, f"{best} {metric}"))]]
        for _, row in self.grouped.iterrows():
            texts = []
            for metric in self.metrics:
                for name in (metric, f"best/{metric}"):
                    estimate = Estimate(*(np.array(row[f"{name}{end}"]) for end in ("", "_low", "_high")))
                    texts.append(in_words(estimate, _decimals(float(estimate.value))))
            rows.append([str(row["group"]), str(row["runs"]), *texts])
        return rows

    def __str__(self) -> str:
        width = shutil.get_terminal_size((120, 24)).columns
        rows = self.cells()
        turned = [list(column) for column in zip(*rows, strict=True)]
        rows = turned if width_of(rows) > max(width, width_of(turned)) else rows
        tables = [rows] + ([self.grouped_cells()] if self.group_by else [])
        return "\n\n".join(
            [*(in_blocks(rows, width) for rows in tables), *(["\n".join(self.notes)] if self.notes else [])]
        )

    def curves(self, metric: str) -> dict[str, Curve]:
        """Return the mean learning curve of each group, on steps that its runs have in common, with its interval.

        Args:
            metric: One of `metrics`.
        """
        curves = {}
        for label, runs in self.groups.items():
            ids = {run.id for run in runs}
            own = [(track.steps, track.values) for track in self.tracks[metric] if track.run.id in ids]
            if own:
                curves[label] = statistics.mean_curve(own, level=self.level)
        return curves

    @property
    def drawings(self) -> list[Drawing]:
        """The figures, one for each metric."""
        over = f" Lines are means over runs, bands {self.level:.0%} intervals." if self.group_by else ""
        caption = (
            f"Against the {self.clock}, aligned by interpolation; a run that has stopped keeps its last value.{over}"
        )
        return [
            Drawing(f"curve-{plain_name(metric)}", metric, caption, partial(draw_curves, self, metric))
            for metric in self.metrics
        ]

    @property
    def figure(self) -> Figure:
        """The figure of the first metric, for a light page; `drawings` has them all."""
        return drawing.drawn(self.drawings[0], LIGHT, titled=True)

    @property
    def clock(self) -> str:
        """The unit of the steps, in words."""
        clocks = {_clock_of(run) for run in self.runs}
        words = {keys.ENV_STEPS: "transitions of training", keys.UPDATES: "updates"}
        return words.get(clocks.pop() or "", "clock of the algorithm") if len(clocks) == 1 else "clock of the algorithm"

    @property
    def html(self) -> str:
        """The page."""
        first = page.Section("Runs", page.table(self.cells()) + page.paragraphs(self.notes))
        groups = [page.Section("Groups", page.table(self.grouped_cells()))] if self.group_by else []
        by = f", grouped by {', '.join(self.group_by)}" if self.group_by else ""
        return page.page(
            "Comparison of runs",
            f"{counted(len(self.runs), 'run', 'runs')}{by}.",
            [first, *groups, *map(page.image, self.drawings)],
        )

    def write(self, folder: str | Path) -> list[Path]:
        """Write the page, tables and figures.

        Args:
            folder: Where to; missing folders are made.

        Returns:
            Their paths, the page first.
        """
        import pandas

        tables = {"runs.csv": self.frame}
        if self.group_by:
            tables["groups.csv"] = self.grouped
        parts = [
            pandas.DataFrame({"metric": metric, "group": label} | dict(zip(_CURVE, curve, strict=True)))
            for metric in self.metrics
            for label, curve in self.curves(metric).items()
        ]
        tables["curves.csv"] = pandas.concat(parts)
        paths = page.write_files(Path(folder), {PAGE: self.html}, tables, self.drawings)
        self.folder = Path(folder)
        return paths


def compare(
    runs: Sequence[str | Path] | str | Path = (),
    *,
    experiment: str | None = None,
    metrics: Sequence[str] | str = (),
    group_by: Sequence[str] | str = (),
    minimize: bool = False,
    level: float = 0.95,
    tracking_uri: str | None = None,
    output: str | Path | None = None,
) -> Comparison:
    """Compare runs.

    Args:
        runs: Names or IDs of runs, or folders of checkpoints, or one such; of a run that has children these are
            compared.
        experiment: Name or ID of an experiment, all of whose runs are compared too.
        metrics: The metrics to compare, or one. None named: returns of evaluations if all runs have them, else of
            training.
        group_by: Params whose values make groups; runs of a group are averaged.
        minimize: Whether the lowest value of a metric is its best one.
        level: Coverage of the intervals over the runs of a group, in (0, 1).
        tracking_uri: Where the runs are. None: as in training.
        output: A folder for a page, tables and figures. None: nothing is written.

    Returns:
        The runs side by side; its text is the table for a terminal.

    Raises:
        ValueError: If a run, metric or param does not exist, the runs have no metric in common, or `level` is out of
            its range.

    Source: intervals are percentiles of a bootstrap: Efron and Tibshirani 1993, chapter 13.
    """
    if not 0 < level < 1:
        raise ValueError(f"`level` must be in (0, 1); got {level}.")
    reader = RunReader(tracking_uri)
    records = find_runs(reader, [runs] if isinstance(runs, str | Path) else runs, experiment)
    asked = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    names = tuple(dict.fromkeys(asked)) or (common_metric(records),)
    histories = reader.histories([run.id for run in records], names)
    tracks = {name: _tracks(records, histories[name]) for name in names}
    for name in names:
        if not tracks[name] and histories[name]:
            raise ValueError(f"{name!r} has no finite value in any of the runs; name another metric.")
        if not tracks[name]:
            known = sorted({metric for run in records for metric in run.metrics})
            hint = did_you_mean(name, known) or f" There are {', '.join(known[:8])} and others."
            raise ValueError(f"no run has the metric {name!r}.{hint}")
    wanted = (group_by,) if isinstance(group_by, str) else tuple(group_by)
    by = tuple(param_name(name, records) for name in wanted)
    groups = grouped_runs(records, by)
    comparison = Comparison(
        tuple(records), names, tracks, by, groups, tuple(_notes(records, tracks, groups, by, level)), minimize, level
    )
    if output is not None:
        comparison.write(output)
    return comparison


def _clock_of(run: RunRecord) -> str | None:
    """Return the counter that a run's steps count: transitions, else updates; None where it logs neither."""
    return next((name for name in (keys.ENV_STEPS, keys.UPDATES) if run.metrics.get(name, 0) > 0), None)


def _tracks(runs: Sequence[RunRecord], histories: dict[str, Points]) -> list[Track]:
    tracks = []
    for run in runs:
        if run.id in histories:
            steps, values = (np.asarray(part, dtype=np.float64) for part in histories[run.id])
            finite = np.isfinite(values)
            if finite.any():
                tracks.append(Track(run, steps[finite], values[finite]))
    return tracks


def _notes(
    runs: Sequence[RunRecord],
    tracks: dict[str, list[Track]],
    groups: dict[str, list[RunRecord]],
    by: Sequence[str],
    level: float,
) -> list[str]:
    notes = []
    for name, own in tracks.items():
        have = {track.run.id for track in own}
        lacking = [run.name for run in runs if run.id not in have]
        if lacking:
            more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
            notes.append(f"No value of {name} in {', '.join(lacking[:5])}{more}.")
    if by:
        sizes = sorted({len(own) for own in groups.values()})
        if sizes[-1] > 1:
            notes.append(f"Intervals: {level:.0%}, percentiles of a bootstrap over the runs of a group.")
        if sizes[0] == 1:
            notes.append("A group of one run has no interval.")
    return notes


def draw_curves(comparison: Comparison, metric: str, theme: Theme) -> Figure:
    """Draw the learning curves of a metric, one for each group."""
    curves = comparison.curves(metric)
    figure = drawing.new_figure(8.4, 4.6 + 0.13 * min(len(curves), drawing.MAX_NAMED))
    panel = figure.subplots()
    drawing.draw_curves(panel, curves, comparison.clock, metric, theme)
    if len(curves) <= drawing.MAX_NAMED:
        drawing.draw_legend(figure, panel, len(curves))
    return figure


def _decimals(value: float) -> int:
    if not math.isfinite(value) or value == 0:
        return 1
    return max(0, min(3 - math.floor(math.log10(abs(value))), 8))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _count(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"

"""The table of a report: a row for each group of policies, statistics of their scores, each with its interval."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from rl8x.studies import statistics
from rl8x.studies.evaluations import Evaluations, Group, counts_in_words
from rl8x.studies.statistics import Array, Estimate, Over
from rl8x.studies.terminal import in_blocks

if TYPE_CHECKING:
    import pandas

HEADINGS: Final = {
    "mean": "mean",
    "iqm": "IQM",
    "cvar_10": "CVaR 10%",
    "cvar_1": "CVaR 1%",
    "worst_cell": "own worst cell",
    "inside": "inside",
    "outside": "outside",
    "gap": "gap",
    "improvement": "P(improves)",
}
"""Statistics, as columns of the frame and as headings."""

MEANINGS: Final = {
    "mean": "mean return over seeds and cells",
    "iqm": "mean of the middle half of all seeds and cells",
    "cvar_10": "mean over each policy's worst 10% of the cells, averaged over seeds",
    "cvar_1": "mean over each policy's worst 1% of the cells, averaged over seeds",
    "worst_cell": "the worst cell of each policy, which may be another for each, averaged over seeds",
    "inside": "mean over cells inside the support of the training",
    "outside": "mean over cells outside the support of the training",
    "gap": "inside less outside",
    "improvement": "probability that a policy beats one of the baseline in a cell; a tie counts as half",
}


class Row(NamedTuple):
    """A group with its statistics, by the names of `HEADINGS`."""

    group: Group
    estimates: dict[str, Estimate]


class Summary(NamedTuple):
    """The rows of a report.

    Attributes:
        rows: In the order of the groups.
        baseline: Label of the group that `improvement` compares with; empty where there is one group alone.
        over: The units that the bootstrap resampled.
        level: Coverage of the intervals.
        notes: Reservations about the figures, in sentences.
    """

    rows: tuple[Row, ...]
    baseline: str
    over: Over
    level: float
    notes: tuple[str, ...]


_OF_WORST_CELLS: Final = ("cvar_10", "cvar_1", "worst_cell")


def summarize(
    evaluations: Evaluations,
    *,
    baseline: str | None = None,
    over: Over = "policies",
    level: float = 0.95,
    resamples: int = statistics.RESAMPLES,
    seed: int = 0,
) -> Summary:
    """Compute the statistics of each group and its probability of improvement over a baseline, the first by default.

    Raises:
        ValueError: If there is no such baseline, or an option of the bootstrap is out of range.
    """
    groups = evaluations.groups
    base = groups[0] if baseline is None else evaluations.group(baseline)
    drawing = _Drawing(over=over, level=level, resamples=resamples, seed=seed)
    rows = []
    for group in groups:
        estimates = _estimates(group, drawing)
        if group is not base:
            estimates["improvement"] = _improvement(group.scores, base.scores, drawing)
        rows.append(Row(group, estimates))
    notes = [*evaluations.notes, *_on_intervals(groups, over, level), counts_in_words(evaluations.counts)]
    return Summary(tuple(rows), base.label if len(groups) > 1 else "", over, level, tuple(notes))


class _Drawing(TypedDict):
    """Options of `statistics.bootstrap`."""

    over: Over
    level: float
    resamples: int
    seed: int


def _estimates(group: Group, drawing: _Drawing) -> dict[str, Estimate]:
    """Estimate the statistics of a group; all see the same resamples, so that a gap belongs to its inside and outside.

    All but the interquartile mean are averages over policies of something that each policy has: where whole policies
    are drawn, that is computed once and not in each resample. What a policy has in its worst cells is always drawn so:
    a row that is mixed of several policies has other worst cells than any of them, mostly worse ones.
    """
    own = of_policies(group.scores, group.inside)
    names = [name for name, values in own.items() if np.isfinite(values).all()]

    def average(scores: Array) -> Array:
        return np.asarray(scores.mean(axis=-2))

    def of_drawn(seeds: Array) -> Array:  # what is drawn are positions, since a score and its support go together
        drawn = seeds.astype(int), np.arange(group.scores.shape[1])
        each = of_policies(group.scores[drawn], group.inside[drawn])
        return average(np.stack([each[name] for name in names], axis=-1))

    whole: _Drawing = {**drawing, "over": "policies"}
    joint = statistics.bootstrap(average, np.stack([own[name] for name in names], axis=-1), **whole)
    estimates = {name: Estimate(*(part[index] for part in joint)) for index, name in enumerate(names)}
    if drawing["over"] == "cells":
        seeds = np.arange(len(group.seeds), dtype=np.float64)[:, None]
        joint = statistics.bootstrap(of_drawn, np.broadcast_to(seeds, group.scores.shape), **drawing)
        mixed = {name: Estimate(*(part[index] for part in joint)) for index, name in enumerate(names)}
        estimates |= {name: estimate for name, estimate in mixed.items() if name not in _OF_WORST_CELLS}
    return estimates | {"iqm": statistics.bootstrap(statistics.iqm, group.scores, **drawing)}


def of_policies(scores: Array, inside: NDArray[np.bool_]) -> dict[str, Array]:
    """Compute what each policy has for itself, `[..., seeds]`, from scores and `inside`, `[..., seeds, cells]`.

    A policy without cells inside, or outside, has no such mean and no gap: they are NaN.
    """
    alone, within = scores[..., None, :], inside[..., None, :]  # each policy as a group of one
    return {
        "mean": statistics.mean(alone),
        "cvar_10": statistics.cvar(alone, 0.1),
        "cvar_1": statistics.cvar(alone, 0.01),
        "worst_cell": statistics.worst_cell(alone),
        "inside": statistics.subset_mean(alone, within),
        "outside": statistics.subset_mean(alone, ~within),
        "gap": statistics.gap(alone, within),
    }


def _improvement(scores: Array, base: Array, drawing: _Drawing) -> Estimate:
    """Estimate the probability of improvement; where whole policies are drawn, from that of each pair of policies."""
    if drawing["over"] == "cells":
        return statistics.bootstrap(statistics.probability_of_improvement, scores, base, **drawing)
    pairs = statistics.probability_of_improvement(scores[:, None, None], base[None, :, None])

    def average(first: Array, second: Array) -> Array:
        return np.asarray(pairs[first.astype(int), second.astype(int).swapaxes(-2, -1)].mean(axis=(-2, -1)))

    return statistics.bootstrap(average, *(np.arange(count)[:, None] for count in pairs.shape), **drawing)


def _on_intervals(groups: tuple[Group, ...], over: Over, level: float) -> list[str]:
    numbers = sorted({len(group.seeds) for group in groups})
    seeds = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    notes = []
    if numbers[-1] > 1:
        drawn = "whole policies"
        if over == "cells":
            drawn = "seeds anew in each cell, and whole policies for CVaR and the worst cell"
        notes.append(f"Intervals: {level:.0%}, percentiles of a bootstrap over seeds ({seeds}) that draws {drawn}.")
        if numbers[-1] < 5:
            notes.append("With fewer than 5 seeds such intervals are too narrow: take them as a lower bound.")
    if numbers[0] == 1:
        alone = [group.label for group in groups if len(group.seeds) == 1]
        shown = ", ".join(alone[:5]) + (f" and {len(alone) - 5} more" if len(alone) > 5 else "")
        notes.append(f"One seed has no interval, and says nothing of other seeds: {shown}.")
    return notes


def to_frame(summary: Summary) -> pandas.DataFrame:
    """Return a row for each group, with three columns for each statistic: `iqm`, `iqm_low` and `iqm_high`."""
    import pandas

    rows = []
    for group, estimates in summary.rows:
        row: dict[str, object] = {"training": group.training}
        row |= {f"vary.{name}": value for name, value in group.vary.items()}
        row |= {"label": group.label, "seeds": len(group.seeds), "cells": group.scores.shape[1]}
        for name in HEADINGS:
            estimate = estimates.get(name)
            for part in ("value", "low", "high"):
                column = name if part == "value" else f"{name}_{part}"
                row[column] = float("nan") if estimate is None else float(getattr(estimate, part))
        rows.append(row)
    return pandas.DataFrame(rows)


def in_words(estimate: Estimate | None, decimals: int) -> str:
    """Write an estimate with its interval, such as "412 [398, 425]"; "-" for what does not exist."""
    if estimate is None or math.isnan(estimate.value):
        return "-"
    value, low, high = (f"{float(number) + 0.0:.{decimals}f}" for number in estimate)
    return value if math.isnan(estimate.low) else f"{value} [{low}, {high}]"


def decimals_of(summary: Summary, name: str) -> int:
    """Return the decimals for a column: two digits of its narrowest interval, at most what 5 digits of it show."""
    if name == "improvement":
        return 3
    estimates = [row.estimates[name] for row in summary.rows if name in row.estimates]
    widths = [float(each.high - each.low) for each in estimates if each.high > each.low]
    largest = max((abs(float(each.value)) for each in estimates if np.isfinite(each.value)), default=0.0)
    scale = min(widths, default=largest / 10)
    if scale <= 0:
        return 0
    room = 3 - math.floor(math.log10(largest)) if largest > 0 else 2
    return max(0, min(1 - math.floor(math.log10(scale)), room, 4))


def cells_of(summary: Summary) -> list[list[str]]:
    """Return the table as texts: the headings, then a row for each group."""
    names = [name for name in HEADINGS if any(name in row.estimates for row in summary.rows)]
    digits = {name: decimals_of(summary, name) for name in names}
    rows = [["", "seeds", *(HEADINGS[name] for name in names)]]
    for group, estimates in summary.rows:
        written = [in_words(estimates.get(name), digits[name]) for name in names]
        if group.label == summary.baseline:
            written[-1] = "baseline"
        rows.append([group.label, str(len(group.seeds)), *written])
    return rows


def in_terminal(summary: Summary, width: int) -> str:
    """Write the table for a terminal of `width` columns, and the notes."""
    return "\n\n".join([in_blocks(cells_of(summary), width), "\n".join(summary.notes)])

"""Statistics over seeds and test cells, with bootstrap intervals, and a report's table of them.

Scores are arrays `[..., seeds, cells]` of mean returns: a row for each policy, which is one training with one seed, and
a column for each test cell. Statistics reduce the last two axes, so that one call handles a batch of resamples.

Source: Agarwal et al. 2021, arXiv:2108.13264, for interquartile mean, probability of improvement, performance profiles,
and percentile intervals of the stratified bootstrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import pandas
from numpy.typing import ArrayLike, NDArray

from rl8x.drawing import Array, Curve
from rl8x.output import percent
from rl8x.plain import checked_number
from rl8x.studies.table import Evaluations, Group

Over = Literal["policies", "cells"]

RESAMPLES = 2000  # as in the profiles of Agarwal et al.
_MAX_ELEMENTS = 4_000_000  # most scores to resample at once: 32 MB
_MAX_POINTS = 500  # most points of a mean curve


class Estimate(NamedTuple):
    """A statistic and its interval; for one seed the interval is NaN, as there is nothing to resample."""

    value: Array
    low: Array
    high: Array


def mean(scores: Array) -> Array:
    """Average over seeds and cells."""
    return np.asarray(scores.mean(axis=(-2, -1)))


def iqm(scores: Array) -> Array:
    """Average the middle half of the scores of all seeds and cells (interquartile mean, section 4.3)."""
    flat = scores.reshape(*scores.shape[:-2], -1)
    count = flat.shape[-1]
    cut = count // 4
    middle = np.partition(flat, (cut, count - cut - 1), axis=-1)[..., cut : count - cut]
    return np.asarray(middle.mean(axis=-1))


def cvar(scores: Array, fraction: float) -> Array:
    """Average each policy's worst `fraction` of the cells, in (0, 1], then the policies (conditional value at risk).

    Source: Rockafellar and Uryasev 2002, "Conditional value-at-risk for general loss distributions", proposition 8;
        over the parameters of an environment as in Rajeswaran et al. 2017, arXiv:1610.01283, equation 4.
    """
    counted = max(fraction * scores.shape[-1], 1.0)
    # The worst cells have weight 1, the next one the remaining fraction.
    weights = np.clip(counted - np.arange(scores.shape[-1]), 0.0, 1.0)
    return np.asarray((np.sort(scores, axis=-1) @ weights / counted).mean(axis=-1))


def probability_of_improvement(x: Array, y: Array) -> Array:
    """Return how often a policy of `x` beats one of `y` in a cell; ties count half (section 4.3, Mann-Whitney's U)."""
    wins = np.zeros(np.broadcast_shapes(x.shape[:-2], y.shape[:-2]))
    for row in range(y.shape[-2]):  # seed by seed, as all pairs of seeds at once would be a large array
        other = y[..., row : row + 1, :]
        wins += ((x > other) + 0.5 * (x == other)).mean(axis=(-2, -1))
    return np.asarray(wins / y.shape[-2])


def performance_profile(scores: Array, thresholds: ArrayLike) -> Array:
    """Return the share of seeds and cells that score above each threshold, `[..., thresholds]` (equation 3)."""
    flat = scores.reshape(*scores.shape[:-2], -1)
    return np.stack([(flat > level).mean(axis=-1) for level in np.asarray(thresholds)], axis=-1)


def check_level(level: Any) -> None:
    """Raise `ValueError` unless the coverage of intervals is a number in (0, 1)."""
    if not 0 < checked_number(level, "level") < 1:
        raise ValueError(f"`level` must be in (0, 1); got {level}.")


def bootstrap(
    statistic: Callable[..., Any],
    *scores: ArrayLike,
    over: Over = "policies",
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Estimate a statistic and its percentile interval by resampling the seeds of each array of scores separately.

    The statistic takes arrays `[resamples, seeds, cells, ...]` and returns `[resamples, ...]`. `over="policies"` draws
    whole rows, as one policy was played in all cells and its scores are correlated. `over="cells"` draws seeds
    separately in each cell. This stratified bootstrap of Agarwal et al. is right if each score comes from a separate
    training; else its intervals are far too narrow.
    """
    arrays = [np.asarray(each, dtype=np.float64) for each in scores]
    if over not in ("policies", "cells"):
        raise ValueError(f"`over` must be 'policies' or 'cells'; got {over!r}.")
    check_level(level)
    value = np.asarray(statistic(*(each[None] for each in arrays)), dtype=np.float64)[0]
    if any(len(each) < 2 for each in arrays):
        return Estimate(value, np.full_like(value, np.nan), np.full_like(value, np.nan))
    generators = [np.random.default_rng((seed, index)) for index in range(len(arrays))]
    chunk = max(1, _MAX_ELEMENTS // sum(each.size for each in arrays))
    values = []
    for start in range(0, resamples, chunk):
        drawn = []
        for each, generator in zip(arrays, generators, strict=True):
            seeds, cells = each.shape[:2]
            size = min(chunk, resamples - start), seeds, 1 if over == "policies" else cells
            drawn.append(each[generator.integers(0, seeds, size), np.arange(cells)])
        values.append(np.asarray(statistic(*drawn), dtype=np.float64))
    low, high = np.quantile(np.concatenate(values), [(1 - level) / 2, (1 + level) / 2], axis=0)
    return Estimate(value, np.asarray(low), np.asarray(high))


def mean_curve(curves: Sequence[tuple[ArrayLike, ArrayLike]], *, level: float = 0.95) -> Curve:
    """Average learning curves, given as steps and values of each run, at the steps of `align`, with an interval."""
    steps, values = align(curves)
    return Curve(steps, *bootstrap(lambda scores: scores.mean(axis=-2), values, level=level))


def align(curves: Sequence[tuple[ArrayLike, ArrayLike]]) -> tuple[Array, Array]:
    """Interpolate the finite points of curves at common steps: steps `[points]`, values `[curves, points]`."""
    cleaned = []
    for steps, values in curves:
        at, of = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
        at, of = (each[np.isfinite(of)][::-1] for each in (at, of))  # reversed, so `unique` keeps a step's last value
        at, first = np.unique(at, return_index=True)
        cleaned.append((at, of[first]))
    common = np.unique(np.concatenate([at for at, _ in cleaned]))
    common = common[common >= max(at[0] for at, _ in cleaned)]
    if len(common) > _MAX_POINTS:
        common = common[np.unique(np.linspace(0, len(common) - 1, _MAX_POINTS).round().astype(int))]
    # A run that has stopped keeps its last value; without it the mean would jump when good runs stop early.
    return common, np.stack([np.interp(common, *each) for each in cleaned])


_STATISTICS: Final = {
    "mean": ("mean", "mean return over seeds and cells"),
    "iqm": ("IQM", "mean of the middle half of all seeds and cells"),
    "cvar_10": ("CVaR 10%", "mean over each policy's worst 10% of the cells, averaged over seeds"),
    "cvar_1": ("CVaR 1%", "mean over each policy's worst 1% of the cells, averaged over seeds"),
    "worst_cell": ("own worst cell", "worst cell of each policy, which may be another for each, averaged over seeds"),
    "inside": ("inside", "mean over cells inside the support of the training"),
    "outside": ("outside", "mean over cells outside the support of the training"),
    "gap": ("gap", "inside less outside"),
    "improvement": ("P(improves)", "probability to beat a policy of the baseline in a cell; a tie counts as half"),
}
HEADINGS: Final = {name: heading for name, (heading, _) in _STATISTICS.items()}
MEANINGS: Final = dict(_STATISTICS.values())
NOTHING: Final = (math.nan,) * 3  # a missing statistic and its interval


class Summary(NamedTuple):
    """The table of a report and its notes: a row for each group, columns such as `iqm`, `iqm_low` and `iqm_high`."""

    frame: pandas.DataFrame
    baseline: str  # the label of the group that `improvement` compares with; empty if there is only one group
    over: Over
    level: float
    notes: tuple[str, ...]


def summarize(
    evaluations: Evaluations,
    *,
    baseline: str | None = None,
    over: Over = "policies",
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Summary:
    """Compute the statistics of each group and its probability of improvement over a baseline, the first by default."""
    groups = evaluations.groups
    base = groups[0] if baseline is None else evaluations.group(baseline)
    how = {"level": level, "resamples": resamples, "seed": seed}
    rows = []
    for group in groups:
        estimates = _estimates(group, over, how)
        if group is not base:
            estimates["improvement"] = _improvement(group.scores, base.scores, over, how)
        row: dict[str, object] = {"training": group.training, **group.vary, "label": group.label}
        row |= {"seeds": len(group.seeds), "cells": group.scores.shape[1]}
        for name in HEADINGS:
            value, low, high = map(float, estimates.get(name, NOTHING))
            row |= {name: value, f"{name}_low": low, f"{name}_high": high}
        rows.append(row)
    notes = [*evaluations.notes, *_on_intervals(groups, over, percent(level)), evaluations.counts]
    return Summary(pandas.DataFrame(rows), base.label if len(groups) > 1 else "", over, level, tuple(notes))


def _estimates(group: Group, over: Over, how: dict[str, Any]) -> dict[str, Estimate]:
    """Estimate the statistics of a group from the same resamples, so that a gap matches its inside and outside."""
    # All but the interquartile mean average values of single policies, which are computed once, not per resample.
    own = {name: each for name, each in of_policies(group.scores, group.inside).items() if np.isfinite(each).all()}
    estimates = {name: bootstrap(mean, values[:, None], **how) for name, values in own.items()}
    if over == "cells":
        # A row mixed from several policies has other worst cells than any of them, mostly worse ones.
        names = [name for name in own if name not in ("cvar_10", "cvar_1", "worst_cell")]

        def of_drawn(drawn: Array) -> Array:
            each = of_policies(drawn[..., 0], drawn[..., 1] > 0)
            return np.stack([each[name].mean(axis=-1) for name in names], axis=-1)

        # Each score is drawn together with its `inside` flag.
        joint = bootstrap(of_drawn, np.stack([group.scores, group.inside], axis=-1), over=over, **how)
        estimates |= {name: Estimate(*each) for name, *each in zip(names, *joint, strict=True)}
    return estimates | {"iqm": bootstrap(iqm, group.scores, over=over, **how)}


def of_policies(scores: Array, inside: NDArray[np.bool_]) -> dict[str, Array]:
    """Compute statistics of each policy, `[..., seeds]`, from `[..., seeds, cells]`; NaN without such cells."""
    alone = scores[..., None, :]  # each policy as a group of one
    with np.errstate(invalid="ignore"):
        inside_mean, outside_mean = (
            np.where(chosen, scores, 0.0).sum(axis=-1) / chosen.sum(axis=-1) for chosen in (inside, ~inside)
        )
    return {
        "mean": scores.mean(axis=-1),
        "cvar_10": cvar(alone, 0.1),
        "cvar_1": cvar(alone, 0.01),
        "worst_cell": scores.min(axis=-1),
        "inside": inside_mean,
        "outside": outside_mean,
        "gap": inside_mean - outside_mean,  # Kirk et al. 2021, arXiv:2111.09794, equation 2
    }


def _improvement(scores: Array, base: Array, over: Over, how: dict[str, Any]) -> Estimate:
    """Estimate the probability of improvement; if whole policies are drawn, from the value of each pair of policies."""
    if over == "cells":
        return bootstrap(probability_of_improvement, scores, base, over=over, **how)
    pairs = probability_of_improvement(scores[:, None, None], base[None, :, None])

    def average(first: Array, second: Array) -> Array:
        return np.asarray(pairs[first.astype(int), second.astype(int).swapaxes(-2, -1)].mean(axis=(-2, -1)))

    return bootstrap(average, *(np.arange(count)[:, None] for count in pairs.shape), **how)


def _on_intervals(groups: tuple[Group, ...], over: Over, level: str) -> list[str]:
    numbers = sorted({len(group.seeds) for group in groups})
    seeds = " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
    in_cells = "seeds anew in each cell, and whole policies for CVaR and the worst cell"
    drawn, notes = in_cells if over == "cells" else "whole policies", []
    if numbers[-1] > 1:
        notes.append(f"Intervals: {level}, percentiles of a bootstrap over seeds ({seeds}) that draws {drawn}.")
    if 1 < numbers[-1] < 5:
        notes.append("With fewer than 5 seeds such intervals are too narrow: take them as a lower bound.")
    if numbers[0] == 1:
        alone = named([group.label for group in groups if len(group.seeds) == 1])
        notes.append(f"One seed has no interval, and says nothing of other seeds: {alone}.")
    return notes


def named(names: Sequence[str]) -> str:
    """Return names as a text, with at most the first five."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def in_words(estimate: Sequence[float], decimals: int) -> str:
    """Return an estimate with its interval as a text, such as "412 [398, 425]"; "-" for a missing statistic."""
    value, low, _ = estimate
    if math.isnan(value):
        return "-"
    fixed = decimals <= 8 and abs(value) < 1e15  # else 1.234e-09, or 1.234e+15
    shown, *ends = (f"{round(each, decimals) + 0.0:.{decimals}f}" if fixed else f"{each:.4g}" for each in estimate)
    return shown if math.isnan(low) else f"{shown} [{', '.join(ends)}]"


def estimates_of(frame: pandas.DataFrame, name: str) -> pandas.DataFrame:
    """Return the three columns of a statistic: its value and the ends of its interval."""
    return frame[[name, f"{name}_low", f"{name}_high"]]


def _decimals(frame: pandas.DataFrame, name: str) -> int:
    """Return the decimals for a statistic: two digits of its narrowest interval, at most 4 of its largest value."""
    if name == "improvement":
        return 3
    widths = frame[f"{name}_high"] - frame[f"{name}_low"]
    largest = float(frame[name].abs().max())
    scale = min(widths[widths > 0], default=largest / 10)
    if scale <= 0:
        return 0
    room = 3 - math.floor(math.log10(largest)) if largest > 0 else 2
    return max(0, min(1 - math.floor(math.log10(scale)), room))


def cells_of(summary: Summary) -> list[list[str]]:
    """Return the table as texts: the headings, then a row for each group."""
    frame = summary.frame
    shown = frame[["label", "seeds"]].astype(str).set_axis(["", "seeds"], axis=1)
    for name in (name for name in HEADINGS if frame[name].notna().any()):
        digits = _decimals(frame, name)
        shown[HEADINGS[name]] = [in_words(each, digits) for each in estimates_of(frame, name).to_numpy()]
    if summary.baseline:
        shown.loc[frame["label"] == summary.baseline, HEADINGS["improvement"]] = "baseline"
    return [list(shown), *shown.to_numpy().tolist()]

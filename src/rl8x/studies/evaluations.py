"""A study's table of evaluations as scores: for each training and set of hyperparameters an array `[seeds, cells]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl8x.names import did_you_mean
from rl8x.output import counted
from rl8x.studies.statistics import Array
from rl8x.studies.table import (
    CELL,
    ENV_STEPS,
    EPISODES,
    FINAL,
    INSIDE,
    LENGTHS,
    RETURNS,
    SEED,
    TEST,
    TRAINING,
    UPDATES,
    VARY,
)

if TYPE_CHECKING:
    import pandas

Supports = Mapping[str, Mapping[str, tuple[float, float]]]
"""By training and parameter the lowest and highest value that was trained on; equal where it was fixed."""


@dataclass(frozen=True)
class Group:
    """The policies of one training with one set of hyperparameters, one for each seed.

    Attributes:
        training: Its name.
        vary: The hyperparameters that the study varies.
        label: Its name, made of the training and hyperparameters in which groups differ.
        seeds: `[seeds]`.
        scores: Mean returns of the last policies, `[seeds, cells]`.
        inside: Whether each cell lies in what the policy was trained on, `[seeds, cells]`: distributions that move go
            with each seed to other ends.
    """

    training: str
    vary: Mapping[str, Any]
    label: str
    seeds: tuple[Any, ...]
    scores: Array
    inside: NDArray[np.bool_]


class Counts(NamedTuple):
    """How much was played to evaluate policies, and to train them.

    Attributes:
        policies: Policies that were evaluated, those of points of training included.
        episodes: Episodes of all evaluations in the table.
        steps: Their environment steps; None where the table has no lengths.
        training_steps: Environment steps that the last policies were trained on, all together.
        training_updates: Their updates; None where the table does not have them.
    """

    policies: int
    episodes: int
    steps: int | None
    training_steps: int
    training_updates: int | None = None


@dataclass(frozen=True)
class Evaluations:
    """The content of a table of evaluations.

    Attributes:
        groups: In the order of the table.
        cells: The test cells, a row each and a column for each test parameter, in the order of the scores' columns.
        points: The whole table without what was left out, with a column `group`, the position in `groups`.
        counts: How many policies, episodes and steps the evaluations took.
        notes: The rows that were left out, in sentences.
    """

    groups: tuple[Group, ...]
    cells: pandas.DataFrame
    points: pandas.DataFrame
    counts: Counts
    notes: tuple[str, ...] = field(default=())

    def group(self, name: str) -> Group:
        """Find a group by its label, or by its training where that has one group; raises `ValueError`."""
        matches = [each for each in self.groups if each.label == name]
        matches = matches or [each for each in self.groups if each.training == name]
        if len(matches) == 1:
            return matches[0]
        labels = [each.label for each in (matches or self.groups)]
        problem = "is the training of several groups" if matches else "is no group of this study"
        raise ValueError(f"{name!r} {problem}; there are {'; '.join(labels)}.{did_you_mean(name, labels)}")


def read_evaluations(table: pandas.DataFrame) -> Evaluations:
    """Read a table of evaluations, with the columns of `rl8x.studies.table`.

    A row that is there twice counts by its last copy. A policy that lacks a cell, or whose return is not finite in one,
    is left out and noted.

    Raises:
        ValueError: If the table has no rows, lacks a column, or no policy is complete.
    """
    _check(table)
    tests = [name for name in table.columns if name.startswith(TEST)]
    varied = [name for name in table.columns if name.startswith(VARY)]
    if CELL not in table.columns:
        table = table.assign(**{CELL: table.groupby(tests).ngroup() if tests else 0})
    table = table.assign(**{name: table[name].map(_plain) for name in varied})
    names = [TRAINING, *varied]
    table = table.drop_duplicates([*names, SEED, *_times(table), FINAL, CELL], keep="last")
    table = table.assign(group=table.groupby(names, sort=False, dropna=False).ngroup())
    final = table[table[FINAL].astype(bool)]
    if final.empty:
        raise ValueError("no policy of the study has been evaluated at the end of its training; let the study finish.")
    cells = final[[CELL, *tests]].drop_duplicates(CELL).sort_values([*tests, CELL]).reset_index(drop=True)
    position_of = {cell: position for position, cell in enumerate(cells[CELL])}
    final = final.assign(**{CELL: final[CELL].map(position_of)})
    distinct = {name: list(final[name].unique()) for name in names}
    groups: list[tuple[int, Group]] = []
    left_out: set[tuple[int, Any]] = set()
    notes: list[str] = []
    for number, rows in final.groupby("group", sort=True):
        first = rows.iloc[0]
        vary = {name.removeprefix(VARY): first[name] for name in varied if first[name] is not None}
        group, incomplete = _group(rows, cells, str(first[TRAINING]), vary, _label(distinct, first, varied))
        notes += incomplete.values()
        left_out |= {(number, seed) for seed in incomplete}
        if group is not None:
            groups.append((number, group))
    if not groups:
        raise ValueError(f"no policy of the study is complete: {notes[0]}.")
    position = {number: index for index, (number, _) in enumerate(groups)}
    kept = [(number, seed) not in left_out for number, seed in zip(table["group"], table[SEED], strict=True)]
    points = table[kept]
    points = points[points["group"].isin(position)]
    points = points.assign(group=points["group"].map(position))
    all_groups = tuple(group for _, group in groups)
    renamed = cells[tests].rename(columns=lambda name: name.removeprefix(TEST))
    return Evaluations(all_groups, renamed, points, _counts(table, names), tuple(notes))


def _check(table: pandas.DataFrame) -> None:
    needed = (TRAINING, SEED, ENV_STEPS, FINAL, INSIDE, EPISODES, RETURNS)
    missing = [name for name in needed if name not in table.columns]
    if table.empty:  # maybe without columns too: all trainings have failed so far
        raise ValueError("the table of evaluations is empty: no training of the study has been evaluated yet.")
    if missing:
        raise ValueError(f"the table of evaluations lacks the columns {', '.join(missing)}.")


def _times(table: pandas.DataFrame) -> list[str]:
    """List the columns that tell a policy's points of training apart; what learns from data counts updates alone."""
    return [name for name in (ENV_STEPS, UPDATES) if name in table.columns]


def clock_of(points: pandas.DataFrame) -> str:
    """Return the column that counts the progress of training: transitions, or updates if there are no transitions."""
    return UPDATES if UPDATES in points.columns and not points[ENV_STEPS].any() else ENV_STEPS


def _plain(value: Any) -> Any:
    """Make a varied hyperparameter something that can be compared: None for what is missing, texts for lists."""
    if isinstance(value, float) and np.isnan(value):
        return None
    return str(value) if isinstance(value, list | dict) else value


def _label(distinct: Mapping[str, list[Any]], row: Any, varied: list[str]) -> str:
    """Name a group by what differs between groups, given the values that a column has in any of them."""
    parts = [str(row[TRAINING])] if len(distinct[TRAINING]) > 1 else []
    for name in varied:
        value = row[name]
        if len(distinct[name]) > 1 and value is not None:
            short = name.removeprefix(VARY).removeprefix("algorithm_config.")
            parts.append(f"{short}={_number(value, distinct[name]) if isinstance(value, float) else value}")
    return ", ".join(parts) or str(row[TRAINING])


def _number(value: float, values: list[Any]) -> str:
    """Write one of several values, a number, in six digits, unless that is how another is written too."""
    numbers = {each for each in values if isinstance(each, float)}
    return f"{value:g}" if len({f"{each:g}" for each in numbers}) == len(numbers) else repr(float(value))


def _group(
    rows: pandas.DataFrame, cells: pandas.DataFrame, training: str, vary: Mapping[str, Any], label: str
) -> tuple[Group | None, dict[Any, str]]:
    """Gather the scores of a group; also returns why each seed that is not complete was left out."""
    wide, within = (
        rows.pivot_table(index=SEED, columns=CELL, values=name, aggfunc="last", dropna=False).reindex(
            columns=range(len(cells))
        )
        for name in (RETURNS, INSIDE)
    )
    present = rows.groupby(SEED)[CELL].nunique()
    each_finite = np.isfinite(wide.to_numpy(dtype=np.float64))
    finite = each_finite.all(axis=1)
    why = {}
    for seed, is_finite in zip(wide.index, each_finite, strict=True):
        if not is_finite.all():
            lacks = len(cells) - present[seed]
            reason = f"lacks {lacks} of {len(cells)} cells" if lacks else _not_finite(cells, np.flatnonzero(~is_finite))
            why[seed] = f"{label}, seed {seed} is left out: it {reason}"
    complete = wide[finite]
    if complete.empty:
        return None, why
    scores, inside = complete.to_numpy(dtype=np.float64), within[finite].to_numpy().astype(bool)
    return Group(training, vary, label, tuple(complete.index), scores, inside), why


def _not_finite(cells: pandas.DataFrame, positions: np.ndarray[Any, Any]) -> str:
    """Say in how many cells returns are not finite, and which is the first."""
    first = cells.iloc[positions[0]]
    at = ", ".join(f"{name.removeprefix(TEST)}={first[name]:g}" for name in cells.columns if name.startswith(TEST))
    such = f", such as {at}" if at else ""
    return f"has returns that are not finite in {counted(len(positions), 'cell', 'cells')} of {len(cells)}{such}"


def _counts(table: pandas.DataFrame, names: list[str]) -> Counts:
    policies = table.drop_duplicates([*names, SEED, *_times(table), FINAL])
    steps = None
    if LENGTHS in table.columns and table[LENGTHS].notna().all():
        steps = round(float((table[EPISODES] * table[LENGTHS]).sum()))
    last = policies[policies[FINAL].astype(bool)]
    updates = int(last[UPDATES].sum()) if UPDATES in last.columns else None
    return Counts(len(policies), int(table[EPISODES].sum()), steps, int(last[ENV_STEPS].sum()), updates)


def counts_in_words(counts: Counts) -> str:
    """Write what the evaluations cost, in a sentence."""
    evaluated = f"{counted(counts.policies, 'policy', 'policies')} in {counted(counts.episodes, 'episode', 'episodes')}"
    if counts.steps is None:
        return f"Evaluations online: {evaluated}."
    from_data = not counts.training_steps and counts.training_updates
    training = counted(from_data, "update", "updates") if from_data else f"{counts.training_steps:,}"
    return (
        f"Evaluations online: {evaluated}, {counted(counts.steps, 'transition', 'transitions')}; "
        f"training took {training}."
    )

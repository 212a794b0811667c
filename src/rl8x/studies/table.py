"""A study's table: its columns, its files, and the scores of each group of policies in it.

The table has a row for each trained policy, point of its training, and test cell. A policy is one training (its name),
one set of varied hyperparameters (columns `vary.NAME`), and one seed. A test cell is one value for each test parameter
(columns `test.NAME`). The table is a pandas frame; in files it is `{"columns": [...], "data": [[...], ...]}`, the form
of `mlflow.log_table`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas
from numpy.typing import NDArray

from rl8x.config.spec import AlgorithmSpec
from rl8x.disk import replace_synced
from rl8x.names import did_you_mean
from rl8x.output import counted

TRAINING: Final = "training"  # the name of the training configuration, such as `wide`
SEED: Final = "seed"
RUN: Final = "run_id"  # MLflow's ID of the child run; empty if the study is not tracked
ENV_STEPS: Final = "env_steps"  # transitions of training before the evaluation; 0 if it learns from a data set
UPDATES: Final = "updates"  # updates before the evaluation
FINAL: Final = "final"  # whether the policy is the last of its training
INSIDE: Final = "inside"  # whether the cell lies inside the support of the training
CELL: Final = "cell"  # its number, from 0: two cells of a sample may have the same values
# What is measured in a cell: episodes, mean, standard deviation and minimum of their undiscounted returns, mean steps
EPISODES, RETURNS, LENGTHS = "episodes", "returns", "lengths"
MEASURED: Final = (EPISODES, RETURNS, "returns_std", "returns_min", LENGTHS)
VARY: Final = "vary."
TEST: Final = "test."

EVALUATIONS: Final = "evaluations.json"
DEFINITION: Final = "study.json"
STUDY_TAG: Final = "rl8x.study"
RESULT: Final = "result.json"  # the result of a training, in its folder

_NEEDED: Final = (TRAINING, SEED, ENV_STEPS, UPDATES, FINAL, INSIDE, CELL, EPISODES, RETURNS, LENGTHS)

Supports = Mapping[str, Mapping[str, tuple[float, float]]]
"""The lowest and highest value in training, by training and parameter; equal if the parameter was fixed."""


def who(frame: pandas.DataFrame) -> list[str]:
    """List the columns that identify a group of policies; with the seed they identify a policy."""
    return [TRAINING, *(name for name in frame if name.startswith(VARY))]


def policies(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Return each policy's returns over cells: `mean`, `min`, `inside`, `outside`, `gap`; NaN if one return is."""
    by = [*who(frame), SEED]
    parts = {"mean": frame, "min": frame, "inside": frame[frame[INSIDE]], "outside": frame[~frame[INSIDE]]}
    grouped = {name: rows.groupby(by, sort=False, dropna=False)[RETURNS] for name, rows in parts.items()}
    found = {name: rows.agg("min" if name == "min" else "mean", skipna=False) for name, rows in grouped.items()}
    return pandas.concat(found, axis=1).assign(gap=lambda own: own["inside"] - own["outside"]).reset_index()


def as_plain(frame: pandas.DataFrame) -> dict[str, list[Any]]:
    """Return a table as plain data."""
    return {"columns": list(frame.columns), "data": frame.to_numpy(dtype=object).tolist()}


def from_plain(data: Mapping[str, Any]) -> pandas.DataFrame:
    """Make a table from plain data."""
    return pandas.DataFrame(data["data"], columns=data["columns"])


def read(path: Path) -> dict[str, Any]:
    """Read a mapping from a file of a study; raise `ValueError` if the file is missing or damaged."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: {path.parent} is no folder of a study that was evaluated.") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a mapping; got {type(data).__name__}.")
    return data


def read_if_there(path: Path) -> dict[str, Any] | None:
    """Read a mapping from a file of a study; None if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        return read(path)
    return None


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a file of a study atomically."""
    replace_synced(path, json.dumps(data, indent=None if "columns" in data else 1).encode() + b"\n")


def read_points(folder: Path) -> dict[int, dict[str, Any]]:
    """Read the tests of a training, each a table as plain data, by the trainer's steps."""
    steps = sorted(int(path.stem) for path in (folder / "points").glob("*.json") if path.stem.isdecimal())
    return {at: point for at in steps if (point := read_if_there(point_file(folder, at))) is not None}


def point_file(folder: Path, steps: int) -> Path:
    """Return the file of a training's test after `steps` steps of the trainer."""
    return folder / "points" / f"{steps}.json"


def read_training(folder: Path, run_id: str) -> pandas.DataFrame:
    """Read the table of a finished training; its last point is that of the final policy."""
    parts = [from_plain(point) for point in read_points(folder).values()]
    if not parts:  # the files were removed
        return pandas.DataFrame()
    parts[-1][FINAL] = True
    return pandas.concat(parts, ignore_index=True).assign(**{RUN: run_id})


def plain_name(text: str) -> str:
    """Return a text as the name of a file or folder."""
    return re.sub(r"[^\w.-]", "-", text).strip(".") or "-"


def about(definition: Mapping[str, Any]) -> dict[str, str]:
    """Return the `task` and the `algorithm` of a study's definition, each maybe several; empty without a definition."""
    if not definition:
        return {}
    varied = definition.get("vary") or {}
    tasks = varied.get("env") or [definition.get("env") or definition.get("eval_env")]
    algorithms = varied.get("algorithm") or [definition.get("algorithm") or AlgorithmSpec.algorithm]
    names = (str(name).rpartition(".")[2].removesuffix("Config") for name in algorithms)
    shown = (name.upper() if name.islower() else name for name in names)
    return {"task": ", ".join(map(str, tasks)), "algorithm": ", ".join(shown)}


@dataclass(frozen=True)
class Group:
    """The policies of one training with one set of hyperparameters, one for each seed."""

    training: str
    vary: Mapping[str, Any]  # by the names of their columns
    label: str  # the values in which groups differ
    seeds: tuple[Any, ...]
    scores: NDArray[np.float64]  # mean returns of the last policies, `[seeds, cells]`
    inside: NDArray[np.bool_]  # cells in the policy's support, `[seeds, cells]`; moving ranges differ by seed


@dataclass(frozen=True)
class Evaluations:
    """The content of a table of evaluations."""

    groups: tuple[Group, ...]
    cells: pandas.DataFrame  # a row for each test cell, in the order of the scores' columns
    points: pandas.DataFrame  # the table without policies that were left out, with each row's `group` label
    counts: str  # numbers of policies, episodes and transitions, in words
    notes: tuple[str, ...]

    def group(self, name: str) -> Group:
        """Find a group by its label, or by its training if that has one group; else raise `ValueError`."""
        matches = [each for each in self.groups if each.label == name]
        matches = matches or [each for each in self.groups if each.training == name]
        if len(matches) == 1:
            return matches[0]
        labels = [each.label for each in (matches or self.groups)]
        problem = "is the training of several groups" if matches else "is no group of this study"
        raise ValueError(f"{name!r} {problem}; there are {'; '.join(labels)}.{did_you_mean(name, labels)}")


def read_evaluations(table: pandas.DataFrame) -> Evaluations:
    """Read a table, with the last of duplicate rows; omit and note policies that lack a cell or a finite return."""
    if table.empty:  # maybe without columns too: all trainings have failed so far
        raise ValueError("the table of evaluations is empty: no training of the study has been evaluated yet.")
    if missing := [name for name in _NEEDED if name not in table]:
        raise ValueError(f"the table of evaluations lacks the columns {', '.join(missing)}.")
    tests, by = [name for name in table if name.startswith(TEST)], who(table)
    point = [*by, SEED, ENV_STEPS, UPDATES, FINAL]  # training on a data set counts only updates
    table = table.assign(group=table.groupby(by, sort=False, dropna=False).ngroup())
    table = table.drop_duplicates([*point, CELL], keep="last")
    final = table[table[FINAL].astype(bool)].drop_duplicates(["group", SEED, CELL], keep="last")
    if final.empty:
        raise ValueError("no policy of the study has been evaluated at the end of its training; let the study finish.")
    cells = final[[CELL, *tests]].drop_duplicates(CELL).sort_values([*tests, CELL])
    scores, inside = (
        final.pivot(index=["group", SEED], columns=CELL, values=name)[cells[CELL]] for name in (RETURNS, INSIDE)
    )
    firsts = final.drop_duplicates("group").set_index("group")
    labels = {number: _label(firsts, first) for number, first in firsts.iterrows()}
    finite = np.isfinite(scores.astype(np.float64))
    notes = [
        f"{labels[group]}, seed {seed} is left out: it {_why_left_out(cells, inside.loc[group, seed], is_finite)}"
        for (group, seed), is_finite in finite.iterrows()
        if not is_finite.all()
    ]
    complete = finite.all(axis=1)
    groups = {
        number: Group(
            training=str(firsts.loc[number, TRAINING]),
            vary=firsts.loc[number, by[1:]].to_dict(),
            label=labels[number],
            seeds=tuple(own.index.get_level_values(SEED)),
            scores=own.to_numpy(dtype=np.float64),
            inside=inside.loc[own.index].to_numpy().astype(bool),
        )
        for number, own in scores[complete].groupby(level="group")
    }
    if not groups:
        raise ValueError(f"no policy of the study is complete: {notes[0]}.")
    left_out = pandas.MultiIndex.from_frame(table[["group", SEED]]).isin(complete.index[~complete])
    points = table.assign(group=table["group"].map(labels))[~left_out & table["group"].isin(groups)]
    named = cells[tests].rename(columns=lambda name: name.removeprefix(TEST)).reset_index(drop=True)
    counts = _counts(table, table.drop_duplicates(point))
    return Evaluations(tuple(groups.values()), named, points, counts, tuple(notes))


def clock_of(points: pandas.DataFrame) -> str:
    """Return the column that counts the progress of training: transitions, or updates if there are no transitions."""
    return ENV_STEPS if points[ENV_STEPS].any() else UPDATES


def _label(firsts: pandas.DataFrame, row: Any) -> str:
    """Name a group by the values in which groups differ; `firsts` has a row for each group."""
    parts = [str(row[TRAINING])] if firsts[TRAINING].nunique() > 1 else []
    for name in who(firsts)[1:]:
        value, values = row[name], firsts[name].unique()
        if len(values) > 1:
            if isinstance(value, float):  # six digits, unless two values would read the same
                numbers = [each for each in values if isinstance(each, float)]
                is_short = len({f"{each:g}" for each in numbers}) == len(numbers)
                value = f"{value:g}" if is_short else repr(float(value))
            parts.append(f"{name.removeprefix(VARY).removeprefix('algorithm_config.')}={value}")
    return ", ".join(parts) or str(row[TRAINING])


def _why_left_out(cells: pandas.DataFrame, inside: pandas.Series, is_finite: pandas.Series) -> str:
    """Return how many cells a policy lacks, or in how many its return is not finite, with the first of these."""
    if lacks := int(inside.isna().sum()):
        return f"lacks {lacks} of {len(cells)} cells"
    first = cells.iloc[int(np.argmin(is_finite))]
    at = ", ".join(f"{name.removeprefix(TEST)}={first[name]:g}" for name in cells if name.startswith(TEST))
    such, many = f", such as {at}" if at else "", counted(int((~is_finite).sum()), "cell")
    return f"has returns that are not finite in {many} of {len(cells)}{such}"


def _counts(table: pandas.DataFrame, tested: pandas.DataFrame) -> str:
    """Return a sentence with the policies and points that were `tested`, in how many episodes, and the training."""
    policies = counted(len(tested[[*who(tested), SEED]].drop_duplicates()), "policy", "policies")
    points = "" if tested[FINAL].all() else f" at {counted(len(tested), 'point')} of their training"
    episodes = counted(int(table[EPISODES].sum()), "episode")
    steps = counted(round(float((table[EPISODES] * table[LENGTHS]).sum())), "transition")
    transitions, updates = tested[tested[FINAL].astype(bool)][[ENV_STEPS, UPDATES]].sum().astype(int)
    training = counted(updates, "update") if updates and not transitions else f"{transitions:,}"
    return f"Evaluations online: {policies}{points} in {episodes}, {steps}; training took {training}."

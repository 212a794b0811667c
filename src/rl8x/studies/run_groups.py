"""Runs to be compared: a metric that all have, the params in which they differ, and groups by values of params."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from rl8x.names import did_you_mean
from rl8x.studies.terminal import cut_middle
from rl8x.tracking.database_runs import RunRecord
from rl8x.tracking.names import legal_name
from rl8x.tracking.sender import PARAM_CHANGE_TAG

MAX_VALUE: Final = 40
"""Letters of a param's value that a table or label shows."""
_PREFERRED: Final = ("eval/returns/mean", "episodes/returns/mean", "eval/horizon_returns/mean", "returns/mean")
_PREFIX: Final = "algorithm_config."
_FACTS: Final = ("execution.compiled_from", "model.num_parameters")  # which follow from other params, or from chance


def common_metric(runs: Sequence[RunRecord]) -> str:
    """Choose the metric to compare: returns of evaluations, else of training, that all runs have.

    Raises:
        ValueError: If the runs have no metric in common.
    """
    common = set.intersection(*(set(run.metrics) for run in runs))
    for name in _PREFERRED:
        if name in common:
            return name
    useful = sorted(name for name in common if not name.startswith(("profiling/", "memory/", "algorithm/", "env/")))
    if useful:
        return useful[0]
    without = [run.name for run in runs if not run.metrics]
    why = f"; {', '.join(without[:5])} have none at all" if without else ""
    raise ValueError(f"the {len(runs)} runs have no metric in common{why}. Leave runs out, or name a metric.")


def params_of(run: RunRecord) -> dict[str, str]:
    """Return a run's params; where it went on with another value, which MLflow has as a tag: `0.01, later 0.001`."""
    changed = {name: run.tags.get(legal_name(PARAM_CHANGE_TAG + name)) for name in run.params}
    return {
        name: value if changed[name] is None else f"{value}, later {changed[name]}"
        for name, value in run.params.items()
    }


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """List the params that do not have one value in all runs, in the order of the runs, but those that others tell.

    `model_config.hidden_sizes` is what was given, `model.hidden_sizes` what the model has, which each run can say.
    """
    params = [params_of(run) for run in runs]
    names = dict.fromkeys(name for own in params for name in own)
    found = [name for name in names if len({own.get(name) for own in params}) > 1]
    found = [name for name in found if name not in _FACTS] or found
    twins = {name: "{}.{}".format(*name.split("_config.", 1)) for name in found if "_config." in name}
    return [name for name in found if not all(twins.get(name) in own for own in params)]


def param_name(name: str, runs: Sequence[RunRecord]) -> str:
    """Find a param by its name in MLflow, or as run files have it: `lr` may be called `algorithm_config.lr`.

    Raises:
        ValueError: If no run has it.
    """
    known = dict.fromkeys(param for run in runs for param in run.params)
    for candidate in (name, name.removeprefix(_PREFIX), _PREFIX + name):
        if candidate in known:
            return candidate
    differ = differing(runs)
    raise ValueError(
        f"no run has the param {name!r}; those that differ are {', '.join(differ)}.{did_you_mean(name, known)}"
    )


def grouped_runs(runs: Sequence[RunRecord], by: Sequence[str]) -> dict[str, list[RunRecord]]:
    """Put runs into groups by the values of params, in the order of their values; each alone where there are none."""
    groups: dict[str, list[RunRecord]] = {}
    if not by:
        names = Counter(run.name for run in runs)
        for run in runs:  # names need not be unique, IDs are
            groups[run.name if names[run.name] == 1 else f"{run.name} ({run.id[:8]})"] = [run]
        return groups
    params = {run.id: params_of(run) for run in runs}
    for run in sorted(runs, key=lambda run: [_order(params[run.id].get(name)) for name in by]):
        label = ", ".join(f"{name}={cut_middle(str(params[run.id].get(name)), MAX_VALUE)}" for name in by)
        groups.setdefault(label, []).append(run)
    return groups


def _order(value: str | None) -> tuple[int, float, str]:
    """Sort numbers before other values, and what is missing last."""
    if value is None:
        return 2, 0.0, ""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value

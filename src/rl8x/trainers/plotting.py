"""Learning curves of a trainer's run, drawn from what its tracker has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rl8x import drawing, keys
from rl8x.drawing import LIGHT, Curve
from rl8x.names import did_you_mean
from rl8x.tracking import MemoryTracker, MLflowTracker, Tracker
from rl8x.tracking.database_runs import Points
from rl8x.tracking.reading import RunReader

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What one panel shows of returns, where nothing is named; the first line of which a run has any.
_RETURNS: Final[tuple[dict[str, str], ...]] = (
    {
        "episodes of the training": "episodes/returns/mean",
        "evaluations": "eval/returns/mean",
        "horizons in evaluations": "eval/horizon_returns/mean",
    },
    {"horizons of the training": "returns/mean"},
)
_WIDTH: Final = 3
"""Panels in a row."""


def plot_run(tracker: Tracker, metrics: Sequence[str], known: Sequence[str], clock: str) -> Figure:
    """Draw learning curves.

    Args:
        tracker: What has the run.
        metrics: One panel each; none are the returns, of the training and of evaluations in one panel.
        known: Every metric that a row may have.
        clock: The counter that metrics are plotted against.

    Raises:
        ValueError: If the tracker keeps no metrics, or has none of these so far.
    """
    named = [{name: name} for name in metrics]
    wanted = [name for group in named or _RETURNS for name in group.values()]
    histories = {name: points for name, points in _histories(tracker, wanted).items() if np.isfinite(points[1]).any()}
    for name in metrics:
        if name not in histories:
            hint = did_you_mean(name, known) if name not in known else " It has no value yet."
            raise ValueError(f"this run has no metric {name!r}.{hint}")
    panels = named or [group for group in _RETURNS if histories.keys() & set(group.values())][:1]
    if not panels:
        raise ValueError("this run has logged no returns yet: draw it once it has made some steps.")
    drawn = [{label: _curve(histories[name]) for label, name in group.items() if name in histories} for group in panels]
    words = "transitions of training" if clock == keys.ENV_STEPS else "updates"
    return drawing.draw_panels(drawn, [*metrics] or ["mean return"], words, LIGHT, width=_WIDTH)


def _curve(points: Points) -> Curve:
    steps, values = (np.asarray(part, dtype=np.float64) for part in points)
    finite = np.isfinite(values)
    nothing = np.full(int(finite.sum()), np.nan)
    return Curve(steps[finite], values[finite], nothing, nothing)


def _histories(tracker: Tracker, names: Sequence[str]) -> Mapping[str, Any]:
    """Return steps and values of the metrics that a tracker's run has, by name."""
    if isinstance(tracker, MemoryTracker):
        rows = {name: tracker.history(name) for name in names}
        return {name: tuple(zip(*points, strict=True)) for name, points in rows.items() if points}
    if not isinstance(tracker, MLflowTracker):
        raise ValueError(
            f"there is nothing to draw: a {type(tracker).__name__} keeps no metrics to read back. Track the run in "
            "MLflow, or give the trainer a MemoryTracker."
        )
    tracker.flush()
    run_id = tracker.run_id
    if run_id is None:
        raise ValueError(f"there is nothing to draw: {tracker.location} has no such run yet.")
    histories = RunReader(tracker.tracking_uri).histories([run_id], names)
    return {name: runs[run_id] for name, runs in histories.items() if run_id in runs}

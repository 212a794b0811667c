"""The tracked run of a whole study, the parent of its trainings' runs, with results averaged over seeds."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rl8x._version import __version__
from rl8x.disk import replace_synced
from rl8x.output import counted
from rl8x.studies import table
from rl8x.studies.definition import StudyConfig
from rl8x.studies.find import STUDY_TAG, about
from rl8x.studies.statistics import mean_curve
from rl8x.tracking import MLflowTracker, NullTracker, Tracker, TrackingError, log_table
from rl8x.tracking.journal import Unsent
from rl8x.tracking.location import locate
from rl8x.tracking.names import NameTable
from rl8x.tracking.secrets import hide_in_data

if TYPE_CHECKING:
    import pandas as pd

# Metrics of a run at most, and points of each.
_MAX_KEYS: Final = 80
_MAX_POINTS: Final = 500
# At idle priority on a busy computer MLflow was imported in more than 90 s.
_PATIENCE_S: Final = 600.0
REPORTED: Final = "reported.json"


class ParentRun:
    """The tracked run of a study; it has been begun when this is made.

    Args:
        study: The study.
        key: The run's own key, by which it is found again.

    Attributes:
        tracker: Keeps the run; a `NullTracker` where nothing is tracked.

    Raises:
        TrackingError: If the store does not answer, so that no run of a training could name its parent.
    """

    def __init__(self, study: StudyConfig, key: str) -> None:
        self.study = study
        self.tracker: Tracker = _tracker(study, key)
        tested = [f"{name}: {_described(value)}" for name, value in study.test.items()]
        params = {
            "study.name": study.name,
            "study.trainings": ", ".join(study.train),
            "study.seeds": len(study.seeds),
            "study.test": "; ".join(tested),
            "study.episodes": study.episodes,
            **{f"study.{table.VARY}{name}": _described(values) for name, values in study.vary.items()},
            **({"study.trials": study.trials} if study.searches else {}),
        }
        self._reported = study.folder / REPORTED
        self._about, self._result = about(study.to_dict()), ""
        tags = {STUDY_TAG: study.name, "rl8x.study_folder": str(study.folder), "rl8x.version": __version__}
        tags |= {f"rl8x.{name}": text for name, text in self._about.items()}
        self.tracker.start(params=params, tags=tags, repeats=self._repeats())
        self.tracker.describe(self._description())
        if isinstance(self.tracker, MLflowTracker):
            self.tracker.flush(_PATIENCE_S)  # of a store that is down it is a few seconds
            if self.tracker.run_id is None:
                where = self.tracker.location
                self.tracker.finish("FAILED")
                raise TrackingError(f"the study's run cannot be made in {where}: it does not answer; try again later")

    def _reports(self) -> list[dict[str, Any]]:
        """Read on what was reported, by this process and those before."""
        with contextlib.suppress(OSError, ValueError):
            return list(json.loads(self._reported.read_text()))
        return []

    def _repeats(self) -> bool:
        """Whether this report will repeat earlier ones, so that points which the store has are not sent again.

        A report on what failed in one before, or on more trials, has the same steps and other values: all its points
        are sent, and are the last of their steps.
        """
        now: dict[str, Any] = {"trials": self.study.trials, "failed": []}
        return all(report == now for report in self._reports())

    def _description(self) -> str:
        """Describe the study in Markdown, first what came out of it."""
        study, folder = self.study, shlex.quote(str(self.study.folder))
        trainings = ", ".join(f"`{name}`" for name in study.train)
        varied = "".join(f"; `{name}` {_described(values)}" for name, values in study.vary.items())
        tested = "; ".join(f"`{name}` {_described(values)}" for name, values in study.test.items())
        lines = [
            self._result,
            f"**Study of {self._about['algorithm']} on `{self._about['task']}`**: training {trainings}{varied}, "
            f"{counted(len(study.seeds), 'seed', 'seeds')} each; tested in {tested}.",
            f"Its report: `rl8x report {folder}`",
            f"Its runs side by side: `rl8x compare {folder}`",
        ]
        return "\n\n".join(line for line in lines if line)

    @property
    def store_uri(self) -> str:
        """The whole address of the store."""
        return locate(self.study.run.get("tracking_uri")).uri

    def log_results(
        self,
        frame: pd.DataFrame,
        curves: Sequence[tuple[str, Sequence[tuple[int, float]]]],
        files: Iterable[Path],
        *,
        failed: Iterable[str] = (),
    ) -> None:
        """Log what came out: curves, results, the best, and the table of all evaluations.

        Args:
            frame: The study's table.
            curves: Of each training the group that it is averaged with, and the returns in its course by its clock.
            files: Of the study's folder; the first is the table.
            failed: The trainings that are missing since they failed.
        """
        reports = [*self._reports(), {"trials": self.study.trials, "failed": list(failed)}]
        replace_synced(self._reported, json.dumps(reports).encode())
        final = _complete(frame[frame[table.FINAL]])
        results = {} if final.empty else _results(final)
        if results:
            trained = table.ENV_STEPS if final[table.ENV_STEPS].any() else table.UPDATES
            self.tracker.log_metrics(results, int(final[trained].max()))
            name, means = _best(final)
            self._result = f"Best `{name}`: mean return {means['mean']:.4g} over seeds and test cells."
            self.tracker.set_tags({"study.best": name, "rl8x.result": f"{means['mean']:.4g}, mean return of {name}"})
            self.tracker.describe(self._description())
        rows: dict[int, dict[str, float]] = {}
        for name, points in _series(curves, (_MAX_KEYS - len(results)) // 3).items():
            for step, value in points:
                rows.setdefault(step, {})[name] = value
        for step, row in sorted(rows.items()):
            self.tracker.log_metrics(row, step)
        whole, *others = files
        log_table(self.tracker, whole)
        for path in others:
            self.tracker.log_artifact(path)

    def finish(self, *, failed: Sequence[str], interrupted: bool = False) -> bool:
        """End the run; `failed` are the trainings that did. Returns whether the store has all of it."""
        tags = {"study.failed": "; ".join(failed) or "none"}
        self.tracker.set_tags(tags)
        self.tracker.finish("KILLED" if interrupted else "FAILED" if failed else "FINISHED")
        where = self.tracker.whereabouts() if isinstance(self.tracker, MLflowTracker) else None
        return where is None or where.unsent == Unsent()


def _tracker(study: StudyConfig, key: str) -> Tracker:
    if study.run.get("tracking") is False:
        return NullTracker()
    uri, experiment = study.run.get("tracking_uri"), study.run.get("experiment_name")
    options: dict[str, Any] = {"experiment_name": experiment, "run_name": study.name, "tracking_uri": uri}
    return MLflowTracker(**options, run_key=key, finish_timeout_s=_PATIENCE_S)


def child_tracking(study: StudyConfig, parent: ParentRun, run_key: str, run_name: str) -> dict[str, Any] | None:
    """Return what a training needs to track its run in the same store, as plain data; None where nothing is tracked."""
    if not isinstance(parent.tracker, MLflowTracker):
        return None
    return {
        # The whole address: on a cluster a worker has neither this working directory nor this environment.
        "uri": parent.store_uri,
        "experiment": study.run.get("experiment_name"),
        "spool_dir": str(parent.tracker.spool_root),
        "parent_run_id": parent.tracker.run_id,
        "run_key": run_key,
        "run_name": run_name,
    }


def _described(values: Any) -> str:
    """Write the values of a test parameter or a varied key as a run's params show them."""
    if isinstance(values, list) and len(values) > 8 and all(isinstance(value, int | float) for value in values):
        return f"{len(values)} values from {min(values)} to {max(values)}"
    return str(hide_in_data(values))


def _who(frame: pd.DataFrame) -> list[str]:
    """List the columns that tell policies apart."""
    return [table.TRAINING, *(name for name in frame.columns if name.startswith(table.VARY)), table.SEED]


def _complete(final: pd.DataFrame) -> pd.DataFrame:
    """Leave out policies with a return that is not finite, as the report does: other cells' mean says nothing of it."""
    finite = final[table.RETURNS].map(np.isfinite)
    return final[finite.groupby([final[name] for name in _who(final)], dropna=False).transform("all")]


def _policies(final: pd.DataFrame) -> pd.DataFrame:
    """Average each policy's cells: all, those inside and outside, and the worst."""
    who = _who(final)
    grouped = final.groupby(who, sort=False, dropna=False)
    policies = grouped[table.RETURNS].agg(["mean", "min"])
    for name, within in (("inside", True), ("outside", False)):
        of_these = final[final[table.INSIDE] == within].groupby(who, sort=False, dropna=False)[table.RETURNS]
        policies[name] = of_these.mean().reindex(policies.index)
    return policies.reset_index()


def _best(final: pd.DataFrame) -> tuple[str, pd.Series]:
    """Return the best training, by the mean over its seeds and all cells, and the means of its seeds."""
    policies = _policies(final)
    who = [name for name in policies.columns if name == table.TRAINING or name.startswith(table.VARY)]
    means = policies.groupby(who, sort=False, dropna=False)[["mean", "min", "inside", "outside"]].mean()
    row = means.loc[means["mean"].idxmax()]
    names = row.name if isinstance(row.name, tuple) else (row.name,)
    varied = [f"{name.removeprefix(table.VARY)}={value}" for name, value in zip(who[1:], names[1:], strict=True)]
    return " ".join([str(names[0]), *varied]), row


def _results(final: pd.DataFrame) -> dict[str, float]:
    """Name what came out as metrics: of all policies, and of the best training."""
    policies, (_, best) = _policies(final), _best(final)
    metrics = {"result/policies": float(len(policies)), "result/cells": float(len(final) / len(policies))}
    for name, of in (("result", policies.mean(numeric_only=True)), ("best", best)):
        for column in ("mean", "min", "inside", "outside"):
            if np.isfinite(of[column]):
                metrics[f"{name}/returns/{column}"] = float(of[column])
        if np.isfinite(of["inside"]) and np.isfinite(of["outside"]):
            metrics[f"{name}/returns/gap"] = float(of["inside"] - of["outside"])
    return metrics


def _series(curves: Sequence[tuple[str, Sequence[tuple[int, float]]]], most: int) -> dict[str, list[tuple[int, float]]]:
    """Average the curves of trainings that differ by their seeds only: mean, and ends of the 95% interval.

    Args:
        curves: The group of each training, and its returns by its clock.
        most: Groups at most; the best at their ends come first.
    """
    groups: dict[str, list[Sequence[tuple[int, float]]]] = {}
    for group, curve in curves:
        if points := [point for point in curve if np.isfinite(point[1])]:
            groups.setdefault(group, []).append(points)
    ordered = sorted(groups.items(), key=lambda item: -np.mean([curve[-1][1] for curve in item[1]]))
    names = NameTable()
    names.legal({_curve_name(group, name): 0 for group in groups for name in ("mean", "low", "high")})
    series: dict[str, list[tuple[int, float]]] = {}
    for group, members in ordered[:most]:
        separate = [([x for x, _ in member], [y for _, y in member]) for member in members]
        mean = mean_curve(separate, max_points=_MAX_POINTS)
        steps = [int(step) for step in mean.steps]
        for name, values in (("mean", mean.mean), ("low", mean.low), ("high", mean.high)):
            if np.isfinite(values).all():
                series[names.add(_curve_name(group, name))] = list(zip(steps, map(float, values), strict=True))
    return series


def _curve_name(group: str, name: str) -> str:
    return f"returns/{group.replace('=', ' ')}/{name}"

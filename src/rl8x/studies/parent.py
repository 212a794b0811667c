"""The tracked run of a whole study, the parent of its trainings' runs, with results averaged over seeds."""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from rl8x import __version__
from rl8x.output import counted, measured
from rl8x.studies import table
from rl8x.studies.definition import StudyConfig, Training
from rl8x.studies.statistics import mean_curve
from rl8x.tracking import MLflowTracker, NullTracker, Tracker, TrackingError, log_table, parent_tag
from rl8x.tracking.journal import Unsent
from rl8x.tracking.location import locate, store_of
from rl8x.tracking.protocol import NameTable
from rl8x.tracking.secrets import hide_in_data

_MAX_KEYS: Final = 80  # most metrics of the run
_PATIENCE_S: Final = 600.0  # importing MLflow at idle priority on a busy computer took more than 90 s
_MEANS: Final = ["mean", "min", "inside", "outside", "gap"]
_ENDS: Final = ("mean", "low", "high")  # of a curve


class ParentRun:
    """The tracked run of a study, found by its key and begun at once; `repeats`: it will log the same report again."""

    def __init__(self, study: StudyConfig, key: str, *, repeats: bool, mlruns: object = None) -> None:
        self.study, self.key = study, key
        named: dict[str, Any] = store_of(study.folder, study.run.get("tracking_uri"), mlruns)
        self.store_uri = locate(named["tracking_uri"]).uri  # the whole address
        self.tracker: Tracker = NullTracker()
        if study.run.get("tracking") is not False:
            named |= {"experiment_name": study.run.get("experiment_name"), "run_name": study.name, "run_key": key}
            self.tracker = MLflowTracker(**named, finish_timeout_s=_PATIENCE_S)
        params = {
            "study.name": study.name,
            "study.trainings": ", ".join(study.train),
            "study.seeds": len(study.seeds),
            "study.test": "; ".join(f"{name}: {_described(value)}" for name, value in study.test.items()),
            "study.episodes": study.episodes,
        }
        params |= {f"study.{table.VARY}{name}": _described(values) for name, values in study.vary.items()}
        params |= {"study.trials": study.trials} if study.searches else {}
        self._about = table.about(study.to_dict())
        tags = {table.STUDY_TAG: study.name, "rl8x.study_folder": str(study.folder), "rl8x.version": __version__}
        tags |= {f"rl8x.{name}": text for name, text in self._about.items()}
        self.tracker.start(params=params, tags=tags, repeats=repeats)
        self.tracker.describe(self._description(""))
        if isinstance(self.tracker, MLflowTracker):
            self.tracker.flush(_PATIENCE_S)  # returns after a few seconds if the store is down
            if self.tracker.run_id is None:  # the trainings' runs could not name their parent
                where = self.tracker.location
                self.tracker.finish("FAILED")
                raise TrackingError(f"the study's run cannot be made in {where}: it does not answer; try again later")

    def _description(self, result: str) -> str:
        """Return a description of the study in Markdown, with its result first."""
        study, folder = self.study, shlex.quote(str(self.study.folder))
        trainings = ", ".join(f"`{name}`" for name in study.train)
        varied = "".join(f"; `{name}` {_described(values)}" for name, values in study.vary.items())
        tested = "; ".join(f"`{name}` {_described(values)}" for name, values in study.test.items())
        what = "**Study of {algorithm} on `{task}`**".format_map(self._about)
        lines = [
            f"{what}: training {trainings}{varied}, {counted(len(study.seeds), 'seed')} each; tested in {tested}.",
            f"Its report: `rl8x report {folder}`",
            f"Its runs side by side: `rl8x compare {folder}`",
        ]
        return "\n\n".join(filter(None, [result, *lines]))

    def journal_of(self, training: Training) -> Path | None:
        """Return the journal of a training's run, named after the run's key; None if the study is not tracked."""
        if not isinstance(self.tracker, MLflowTracker):
            return None
        return self.tracker.spool_root / uuid.uuid5(uuid.UUID(self.key), training.key).hex

    def child_options(self, training: Training) -> dict[str, Any] | None:
        """Return the tracker's options for a training, as plain data; None if the study is not tracked."""
        if (journal := self.journal_of(training)) is None:
            return None
        return {
            # The full URI, as a worker on a cluster has another working directory and other environment variables.
            "tracking_uri": self.store_uri,
            "experiment_name": self.study.run.get("experiment_name"),
            "spool_dir": str(journal.parent),
            "tags": {**parent_tag(str(self.tracker.run_id)), table.STUDY_TAG: self.study.name},
            "run_key": journal.name,
        }

    def log_results(self, frame: pd.DataFrame, curves: Iterable[tuple[str, Sequence[Sequence[float]]]]) -> None:
        """Log the results: curves averaged by group, metrics, the best training, and the study's files."""
        final, metrics = frame[frame[table.FINAL]], dict[str, float]()
        if (found := _results(final)) is not None:
            name, mean, metrics = found
            self.tracker.log_metrics(metrics, int(final[table.clock_of(final)].max()))
            self.tracker.set_tags({"study.best": name, "rl8x.result": f"{measured(mean)}, mean return of {name}"})
            result = f"Best `{name}`: mean return {measured(mean)} over seeds and test cells."
            self.tracker.describe(self._description(result))
        series = pd.DataFrame(_series(curves, (_MAX_KEYS - len(metrics)) // 3)).sort_index()
        for step, row in series.iterrows():
            self.tracker.log_metrics(row.dropna().to_dict(), int(step))
        log_table(self.tracker, self.study.folder / table.EVALUATIONS)
        self.tracker.log_artifact(self.study.folder / table.DEFINITION)

    def finish(self, *, failed: Sequence[str], interrupted: bool) -> bool:
        """End the run, given the `failed` trainings; return whether all its rows have reached the store."""
        self.tracker.set_tags({"study.failed": "; ".join(failed) or "none"})
        self.tracker.finish("KILLED" if interrupted else "FAILED" if failed else "FINISHED")
        where = self.tracker.whereabouts() if isinstance(self.tracker, MLflowTracker) else None
        return where is None or where.unsent == Unsent()


def _described(values: Any) -> str:
    """Return the values of a test parameter or a varied key as a text for the run's params, without passwords."""
    if isinstance(values, list) and len(values) > 8 and all(isinstance(value, int | float) for value in values):
        return f"{len(values)} values from {min(values)} to {max(values)}"
    return str(hide_in_data(values))


def _results(final: pd.DataFrame) -> tuple[str, float, dict[str, float]] | None:
    """Return the best training by mean over seeds and cells, its mean, and metrics of all policies and of the best."""
    policies = table.policies(final)
    policies = policies[np.isfinite(policies["mean"])]  # as in the report
    if policies.empty:
        return None
    by = table.who(policies)
    groups = policies.groupby(by, sort=False, dropna=False)[_MEANS].mean().reset_index()
    best = groups.loc[groups["mean"].idxmax()]
    metrics = {"result/policies": float(len(policies)), "result/cells": float(final[table.CELL].nunique())}
    for name, of in (("result", policies[_MEANS].mean()), ("best", best[_MEANS])):
        metrics |= {f"{name}/returns/{part}": float(value) for part, value in of.items() if np.isfinite(value)}
    varied = (f"{name.removeprefix(table.VARY)}={best[name]}" for name in by[1:])
    return " ".join([str(best[table.TRAINING]), *varied]), float(best["mean"]), metrics


def _series(curves: Iterable[tuple[str, Sequence[Sequence[float]]]], most: int) -> dict[str, dict[int, float]]:
    """Average the curves of each of the `most` best groups, by last value; return means and 95% intervals by step."""
    groups: dict[str, list[Any]] = {}
    for group, points in curves:
        if points:
            groups.setdefault(f"returns/{group.replace('=', ' ')}", []).append(np.transpose(points))
    ordered = sorted(groups, key=lambda group: -np.mean([curve[1, -1] for curve in groups[group]]))
    names = NameTable()
    names.legal({f"{group}/{name}": 0 for group in groups for name in _ENDS})
    series: dict[str, dict[int, float]] = {}
    for group in ordered[:most]:
        mean = mean_curve([(at, values) for at, values in groups[group]])
        for name, values in zip(_ENDS, mean[1:], strict=True):
            if np.isfinite(values).all():
                series[names.add(f"{group}/{name}")] = dict(zip(map(int, mean.steps), map(float, values), strict=True))
    return series

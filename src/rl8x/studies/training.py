"""Runs one training of a study, new or resumed, up to its last test; in any process.

Its inputs are plain data and its outputs files in its folder, so that a lost process loses nothing:

    checkpoints/        the training's checkpoints
    points/STEPS.json   results in the test cells after STEPS steps of the trainer
    result.json         the results and the curve of returns; exists once the training is done
    pruned              exists if a search has pruned the training
    error.txt           the traceback of a failure
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas
import torch

from rl8x import keys
from rl8x.checkpoint import CheckpointError, listed
from rl8x.envs.cells import Support, inside, support
from rl8x.output import described
from rl8x.studies import table
from rl8x.studies.definition import StudyConfig, Training, tested_env
from rl8x.studies.search import should_prune
from rl8x.tracking import MLflowTracker, NullTracker, Thinning, Tracker, log_table
from rl8x.tracking.locks import FolderLock
from rl8x.tracking.secrets import hide
from rl8x.trainers import Trainer, TrainStats
from rl8x.trainers.grid import CellEvaluator

ERROR: Final = "error.txt"
PRUNED: Final = "pruned"
TESTED: Final = ("test/returns/mean", "test/returns/min", "test/returns/inside", "test/returns/outside")
# How long a training waits for another process that runs it, such as one left by a lost driver.
_BUSY_WAIT_S: Final = 3600.0
# Long, as no user waits for one training of many: its rows should arrive before the next one begins.
_PATIENCE_S: Final = 600.0


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job of `Study`: train and test one policy; return its `key`, and `result`, or `error` in one line."""
    folder, key = Path(job["folder"]), job["key"]
    if not folder.parent.is_dir():
        return {"key": key, "error": f"{folder.parent} is not there: all workers must see the study's folder"}
    lock = FolderLock(folder)
    try:
        folder.mkdir(exist_ok=True)
        if not lock.acquire(_BUSY_WAIT_S):
            return {"key": key, "error": f"{lock.owner()} is still at it"}
        done = table.read_if_there(folder / table.RESULT)
        if done is None and job["threads"] is not None:
            torch.set_num_threads(job["threads"])
        return {"key": key, "result": _TrainingJob(job).run_to_end() if done is None else done}
    except Exception as error:
        with contextlib.suppress(OSError):
            # A traceback may contain file names that cannot be encoded; that must not end the other trainings.
            (folder / ERROR).write_text(hide(traceback.format_exc()), encoding="utf-8", errors="backslashreplace")
        return {"key": key, "error": " ".join(hide(described(error)).split())[:300]}
    finally:
        lock.release()


class _TrainingJob:
    """The training and the tests of one job; a callback of its trainer."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job, self.folder = job, Path(job["folder"])
        self.study = StudyConfig.from_dict(job["study"], trust=job["trust"])
        self.cells = self.study.cells()
        self.training = Training(job["training"], job["vary"], job["seed"], job["trial"])
        self.checkpoints = self.folder / "checkpoints"
        run = self.study.run_of(self.training)
        self.run = run.replace(checkpoints={**run.trainer.checkpoints, "directory": str(self.checkpoints)})
        self.metric_names = TESTED
        self.searches = self.training.trial is not None
        self._measured = -1, pandas.DataFrame(), Support()  # the step of the last test, and its results

    def run_to_end(self) -> dict[str, Any]:
        """Train, test the last policy, and log, store and return the result."""
        trainer = self._trainer()
        trainer.plan(self.run)
        # It tests in the training's environment, or without one in `eval_env`.
        named = trainer.algorithm.env_factory is None and trainer.algorithm.env is None
        maker = self.run.env.maker(self.run.trust, env=tested_env(self.run)) if named else None
        about: dict[str, Any] = {"episodes": self.study.episodes, "seed": self.study.test_seed, "env_factory": maker}
        self.evaluator = CellEvaluator(trainer.algorithm, self.cells, **about)
        own: Any = [*self.run.run.conditions(self.run.trust), self._is_pruned] if self.searches else ...
        trainer.run(stop_conditions=own, progress="none")
        result = self._conclude(trainer)
        table.write(self.folder / table.RESULT, result)
        with contextlib.suppress(OSError):
            (self.folder / ERROR).unlink(missing_ok=True)
        return result

    def _trainer(self) -> Trainer:
        """Make the trainer, resumed from the newest good checkpoint if there is one."""
        options: dict[str, Any] = {"tracker": self._tracker(), "callbacks": [self]}
        if listed(self.checkpoints):
            options |= {"auto": True, "algorithm": self.run.make_algorithm(), "trust": True}
            try:
                return Trainer.resume(self.checkpoints, **options)
            except CheckpointError as error:
                raise CheckpointError(f"remove {self.folder} to train it anew: {error}") from error
        return Trainer.from_spec(self.run, **options)

    def _tracker(self) -> Tracker:
        """Make the tracker of a child of the study's run."""
        if self.job["tracking"] is None:
            return NullTracker()
        training = self.training
        params = {"study.name": self.study.name, "study.training": training.training, "study.seed": training.seed}
        params |= {"study.trial": training.trial} if self.searches else {}
        params |= {f"{table.VARY}{name}": value for name, value in training.vary.items()}
        return MLflowTracker(
            **self.job["tracking"],
            run_name=self.run.trainer.run_name,
            params=params,
            finish_timeout_s=_PATIENCE_S,
            outage_timeout_s=_PATIENCE_S / 10,
            curves=False,  # the study draws its own
            thinning=Thinning(self.folder / "rows.jsonl"),
        )

    def __call__(self, trainer: Trainer, stats: TrainStats) -> dict[str, float] | None:
        """Test the policy if that is due, and mark the trial if the search prunes it; return the mean returns."""
        steps = trainer.state[keys.STEPS]
        points = self.study.evaluate_at
        if points is None or (steps not in points if isinstance(points, Sequence) else steps % points):
            return None
        means = _means(self._measure(trainer)[0])
        if self.searches and should_prune(self.folder.parent, self.training, steps, means["test/returns/mean"]):
            (self.folder / PRUNED).touch()
        return means

    def _measure(self, trainer: Trainer) -> tuple[pandas.DataFrame, Support]:
        """Test the current policy; return its rows of the table, and the current support of training."""
        env, steps = trainer.algorithm.env, trainer.state[keys.STEPS]
        if self._measured[0] == steps:
            return self._measured[1:]
        given: Any = self.study.train[self.training.training], self.evaluator.parameters, 1
        trained = given if env is None else (env.present_config(), env.parameters, env.num_copies)
        frame = self._table(trainer.state, inside(self.cells, *trained), self.evaluator.evaluate())
        self._measured = steps, frame, support(*trained)
        path = table.point_file(self.folder, steps)
        path.parent.mkdir(exist_ok=True)
        table.write(path, table.as_plain(frame))
        return self._measured[1:]

    def _table(self, state: Mapping[str, Any], inside: Any, measured: Mapping[str, Any]) -> pandas.DataFrame:
        """Return the measurements of the cells as a table with the columns of `rl8x.studies.table`."""
        varied = {
            f"{table.VARY}{name}": value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for name, value in self.training.vary.items()
        }
        who = {table.TRAINING: self.training.training, **varied, table.SEED: self.training.seed, table.RUN: ""}
        trained = {table.ENV_STEPS: state[keys.ENV_STEPS], table.UPDATES: state[keys.UPDATES], table.FINAL: False}
        tested = {f"{table.TEST}{name}": values for name, values in self.cells.items()}
        scores = {name: measured[name] for name in table.MEASURED}
        cells = {table.INSIDE: inside, table.CELL: range(len(inside)), **tested, **scores}
        return pandas.DataFrame({**who, **trained, **cells})

    def _is_pruned(self, row: Mapping[str, float]) -> bool:
        """Whether the search has pruned this trial; a stop condition."""
        return (self.folder / PRUNED).exists()

    def _conclude(self, trainer: Trainer) -> dict[str, Any]:
        """Test the last policy; add the results to the ended tracked run, which keeps its status; return the result."""
        (frame, drawn), pruned = self._measure(trainer), self.searches and self._is_pruned({})
        state, clock, tracker = trainer.state, trainer.algorithm.clock, trainer.tracker
        for steps in table.read_points(self.folder):
            if steps > state[keys.STEPS]:  # from before a kill, if the resumed training ended earlier
                table.point_file(self.folder, steps).unlink()
        means, headline = _means(frame), trainer.record.results.headline
        row = {name.replace("test/", "result/", 1): value for name, value in means.items()}
        trainer.record.log(row, trains=False)
        if pruned:
            tracker.set_tags({"rl8x.pruned": "true"})
        tracker.flush()
        run_id = tracker.run_id or ""
        path = self.folder / table.EVALUATIONS
        table.write(path, table.as_plain(table.read_training(self.folder, run_id)))
        log_table(tracker, path)
        trainer.close()
        return {
            "run_id": run_id,
            "steps": state[keys.STEPS],
            "clock": clock,
            "at": state[clock],
            "stop_reason": "pruned by the search" if pruned else trainer.stop_reason,
            "pruned": pruned,
            "support": drawn,
            "means": means,
            "curve": [] if headline is None else headline[1].points,
        }


def _means(frame: pandas.DataFrame) -> dict[str, float]:
    """Return mean and minimum returns over all cells, and means inside and outside the support, if there are any."""
    means, within = table.policies(frame).iloc[0], frame[table.INSIDE]
    shown = {"mean": True, "min": True, "inside": within.any(), "outside": not within.all()}
    return {f"test/returns/{name}": float(means[name]) for name, there in shown.items() if there}

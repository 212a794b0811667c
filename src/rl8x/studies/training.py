"""One training of a study, begun or resumed, up to its last test; in any process.

Its inputs are plain data and its outputs files in its folder, so that a lost process loses nothing:

    checkpoints/        of the training
    points/STEPS.json   what was measured in the test cells after so many steps of the trainer
    curve.jsonl         the returns of evaluations in mid-training, or of training, one point a line
    progress            steps so far
    result.json         that it is done, and what came out
    pruned              that a search has given it up
    error.txt           the traceback, where it failed
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rl8x import keys
from rl8x.checkpoint import CheckpointError, listed
from rl8x.config import RunSpec
from rl8x.disk import replace_synced
from rl8x.envs.cells import inside, support
from rl8x.output import described
from rl8x.studies import table
from rl8x.studies.definition import StudyConfig, Training, tested_env
from rl8x.studies.find import EVALUATIONS, STUDY_TAG
from rl8x.tracking import MLflowTracker, NullTracker, Thinning, Tracker, log_table, parent_tag
from rl8x.tracking.locks import FolderLock
from rl8x.tracking.secrets import hide

if TYPE_CHECKING:
    import torch

    from rl8x.trainers import Trainer, TrainStats
    from rl8x.trainers.grid import CellEvaluator

RESULT: Final = "result.json"
CURVE: Final = "curve.jsonl"
POINTS: Final = "points"
PROGRESS: Final = "progress"
ERROR: Final = "error.txt"
PRUNED: Final = "pruned"
TESTED: Final = ("test/returns/mean", "test/returns/min", "test/returns/inside", "test/returns/outside")
# How long a training waits for another process that runs it, such as one that a lost driver left behind.
_BUSY_WAIT_S: Final = 3600.0
# Nobody waits at a terminal for one training of many: its rows shall arrive before the next one begins.
_PATIENCE_S: Final = 600.0
_SECONDS_PER_NOTE: Final = 1.0


def run_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train and test one policy, unless that is done; a failure is returned, not raised.

    Args:
        job: Plain data: `study` (the definition), `training`, `seed`, `vary`, `trial`, `folder`, `threads`, `tracking`
            (None, or what `_tracker` takes) and `trust`.

    Returns:
        `key`, and `result`, or `error` in one line.
    """
    folder = Path(job["folder"])
    if not folder.parent.is_dir():
        return {"key": job["key"], "error": f"{folder.parent} is not there: all workers must see the study's folder"}
    lock = FolderLock(folder)
    try:
        folder.mkdir(exist_ok=True)
        if not lock.acquire(_BUSY_WAIT_S):
            return {"key": job["key"], "error": f"{lock.owner()} is still at it"}
        try:
            done = read_result(folder)
            if done is None:
                _set_threads(job["threads"])
                done = _TrainingJob(job).run_to_end()
            return {"key": job["key"], "result": done}
        finally:
            lock.release()
    except Exception as error:
        with contextlib.suppress(OSError):
            # A traceback may contain file names that cannot be encoded, which must not end the other trainings.
            (folder / ERROR).write_text(hide(traceback.format_exc()), encoding="utf-8", errors="backslashreplace")
        return {"key": job["key"], "error": " ".join(hide(described(error)).split())[:300]}


def read_result(folder: Path) -> dict[str, Any] | None:
    """Read the result of a training; None where it is not done."""
    with contextlib.suppress(OSError, ValueError):
        result = json.loads((folder / RESULT).read_text())
        return result if isinstance(result, dict) else None
    return None


def read_points(folder: Path) -> dict[int, dict[str, Any]]:
    """Read what was measured of a training, by the steps of the trainer."""
    points = {}
    for path in (folder / POINTS).glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            points[int(path.stem)] = json.loads(path.read_text())
    return dict(sorted(points.items()))


def read_curve(folder: Path) -> list[tuple[int, float]]:
    """Read the returns of a training by its algorithm's clock; where a point was repeated, the last one counts."""
    points: dict[int, float] = {}
    with contextlib.suppress(OSError):
        for line in (folder / CURVE).read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                point = json.loads(line)
                points[int(point["at"])] = float(point["returns"])
    return sorted(points.items())


def _cut_curve(path: Path, at: int) -> None:
    """Leave out what comes after a clock, which is trained again and may come out otherwise, and what a kill tore."""
    with contextlib.suppress(FileNotFoundError):
        lines, kept = path.read_bytes().splitlines(keepends=True), []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                kept += [line] if line.endswith(b"\n") and json.loads(line)["at"] <= at else []
        if kept != lines:
            replace_synced(path, b"".join(kept))


def _digest(policy: torch.nn.Module) -> str:
    """Return what tells the weights and moments of a policy from others."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in policy.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            digest.update(name.encode() + tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _tracker(job: Mapping[str, Any]) -> Tracker:
    """Make the tracker of a training: a child of the study's run, with the same params as all others."""
    tracking = job["tracking"]
    if tracking is None:
        return NullTracker()
    params = {"study.name": job["study"]["name"], "study.training": job["training"], "study.seed": job["seed"]}
    if job["trial"] is not None:
        params["study.trial"] = job["trial"]
    params |= {f"{table.VARY}{name}": value for name, value in job["vary"].items()}
    return MLflowTracker(
        experiment_name=tracking["experiment"],
        run_name=tracking["run_name"],
        tracking_uri=tracking["uri"],
        spool_dir=tracking["spool_dir"],
        tags={**parent_tag(tracking["parent_run_id"]), STUDY_TAG: job["study"]["name"]},
        params=params,
        run_key=tracking["run_key"],
        finish_timeout_s=_PATIENCE_S,
        outage_timeout_s=_PATIENCE_S / 10,
        curves=False,  # the study draws its own
        thinning=Thinning(Path(job["folder"]) / "rows.jsonl"),
    )


class _TrainingJob:
    """The training of one job, and what is measured of it; a callback of its trainer."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job, self.folder = job, Path(job["folder"])
        self.study = StudyConfig.from_dict(job["study"], trust=job["trust"])
        self.cells = self.study.cells()
        self.training = Training(job["training"], job["vary"], job["seed"], job["trial"])
        self.run = self._run()
        self.metric_names = TESTED
        self._evaluator: CellEvaluator | None = None
        self._searches = job["trial"] is not None
        self._noted = 0.0
        evaluates = self.run.run.steps_per_eval is not None
        self._return = "eval/returns/mean" if evaluates else f"episodes/{keys.RETURNS}/mean"

    def _run(self) -> RunSpec:
        data = self.study.run_data(self.training)
        data["checkpoints"] = {**data.get("checkpoints", {}), "directory": str(self.folder / "checkpoints")}
        return RunSpec.from_plain(data, trust=self.job["trust"])

    def run_to_end(self) -> dict[str, Any]:
        """Train, test the last policy, log and keep what came out."""
        (self.folder / POINTS).mkdir(exist_ok=True)
        trainer = self._trainer()
        trainer.plan(self.run)
        _cut_curve(self.folder / CURVE, trainer.state[trainer.algorithm.clock])
        own: Any = [*self.run.run.conditions(self.run.trusted), self._is_pruned] if self._searches else ...
        trainer.run(stop_conditions=own, progress="none")
        result = self._conclude(trainer)
        replace_synced(self.folder / RESULT, json.dumps(result, indent=1).encode() + b"\n")
        with contextlib.suppress(OSError):
            (self.folder / ERROR).unlink(missing_ok=True)
        return result

    def _trainer(self) -> Trainer:
        """Make the trainer, or have it go on from the newest good checkpoint."""
        from rl8x.trainers import Trainer

        tracker, directory = _tracker(self.job), self.folder / "checkpoints"
        if listed(directory):
            with contextlib.suppress(CheckpointError):
                return Trainer.resume(
                    directory,
                    auto=True,
                    algorithm=self.run.make_algorithm(),
                    tracker=tracker,
                    callbacks=[self],
                    trust=True,
                )
        return Trainer.from_spec(self.run, tracker=tracker, callbacks=[self])

    # -- in the course of it

    def __call__(self, trainer: Trainer, stats: TrainStats) -> dict[str, float] | None:
        """Take a row: keep the curve's points, and test where that is due."""
        steps = trainer.state[keys.STEPS]
        if self._return in stats.fresh:
            point = {"at": trainer.state[trainer.algorithm.clock], "returns": stats[self._return]}
            with open(self.folder / CURVE, "a") as file:
                file.write(json.dumps(point) + "\n")
        if time.monotonic() - self._noted > _SECONDS_PER_NOTE:
            self._noted = time.monotonic()
            with contextlib.suppress(OSError):
                (self.folder / PROGRESS).write_text(str(steps))
        if not self._is_due(steps):
            return None
        measured = self._measure(trainer)
        self._prune(measured, steps)
        return _means(measured)

    def _is_due(self, steps: int) -> bool:
        points = self.study.evaluate_at
        return False if points is None else steps in points if isinstance(points, list) else steps % points == 0

    def _measure(self, trainer: Trainer) -> dict[str, Any]:
        """Test the present policy, or read what was measured of the very same before a kill."""
        from rl8x.trainers.grid import CellEvaluator

        algorithm, steps = trainer.algorithm, trainer.state[keys.STEPS]
        path = self.folder / POINTS / f"{steps}.json"
        policy = _digest(algorithm.policy)
        with contextlib.suppress(OSError, ValueError):
            known = dict(json.loads(path.read_text()))
            if known.get("policy") == policy:
                return known
        if self._evaluator is None:
            self._evaluator = CellEvaluator(
                algorithm,
                self.cells,
                episodes=self.study.episodes,
                seed=self.study.test_seed,
                env_factory=self._factory(algorithm),
            )
        env = algorithm.env
        config = self.study.train[self.training.training] if env is None else env.present_config()
        parameters = self._evaluator.parameters if env is None else env.parameters
        num_envs = 1 if env is None else env.num_envs
        measured = {
            table.ENV_STEPS: trainer.state[keys.ENV_STEPS],
            table.UPDATES: trainer.state[keys.UPDATES],
            "policy": policy,
            "support": support(config, parameters, num_envs),
            table.INSIDE: inside(self.cells, config, parameters, num_envs).tolist(),
            **{name: values.tolist() for name, values in self._evaluator.evaluate().items()},
        }
        replace_synced(path, json.dumps(measured).encode())
        return measured

    def _factory(self, algorithm: Any) -> Any:
        """Return what makes an environment to test in, where the algorithm trains without one."""
        if algorithm.env_factory is not None or algorithm.env is not None:
            return None
        return self.run.env.maker(self.run.trusted, env=tested_env(self.run))

    def _prune(self, measured: Mapping[str, Any], steps: int) -> None:
        """End a trial that a search gives up."""
        if self._searches:
            from rl8x.studies.search import should_prune

            if should_prune(self.folder.parent, self.training, steps, float(np.mean(measured[table.RETURNS]))):
                (self.folder / PRUNED).touch()

    def _is_pruned(self, row: Mapping[str, float]) -> bool:
        """Whether the search has given this trial up: a stop condition."""
        return (self.folder / PRUNED).exists()

    # -- its end

    def _conclude(self, trainer: Trainer) -> dict[str, Any]:
        """Test the last policy; add what came out to the tracked run, which is over and stays so."""
        measured, pruned = self._measure(trainer), self._searches and (self.folder / PRUNED).exists()
        for steps in read_points(self.folder):
            if steps > trainer.state[keys.STEPS]:  # a kill came later than this end, of a training that cannot repeat
                (self.folder / POINTS / f"{steps}.json").unlink()
        curve = read_curve(self.folder)
        means = _means(measured)
        result = {
            "key": self.job["key"],
            "run_id": "",
            "steps": trainer.state[keys.STEPS],
            "clock": trainer.algorithm.clock,
            "at": trainer.state[trainer.algorithm.clock],
            "stop_reason": "pruned by the search" if pruned else trainer.stop_reason,
            "pruned": pruned,
            "support": measured["support"],
            "means": means,
        }
        row = {name.replace("test/", "result/", 1): value for name, value in means.items()}
        if finite := [value for _, value in curve if math.isfinite(value)]:
            row["best/returns/mean"] = max(finite)
        trainer.record.log(row, trains=False)
        if pruned:
            trainer.tracker.set_tags({"rl8x.pruned": "true"})
        if isinstance(trainer.tracker, MLflowTracker):
            trainer.tracker.flush()
            result["run_id"] = trainer.tracker.run_id or ""
        path = self.folder / EVALUATIONS
        rows = rows_of(self.training, self.cells, read_points(self.folder), str(result["run_id"]))
        replace_synced(path, json.dumps(rows).encode())
        log_table(trainer.tracker, path)
        trainer.close()
        return result


def _means(measured: Mapping[str, Any]) -> dict[str, float]:
    """Average returns over all cells, and over those inside and outside of the training's support, if there are any."""
    returns, within = np.asarray(measured[table.RETURNS]), np.asarray(measured[table.INSIDE], dtype=bool)
    means = {"test/returns/mean": float(returns.mean()), "test/returns/min": float(returns.min())}
    if within.any():
        means["test/returns/inside"] = float(returns[within].mean())
    if not within.all():
        means["test/returns/outside"] = float(returns[~within].mean())
    return means


def rows_of(
    training: Training, cells: Mapping[str, Any], points: Mapping[int, Mapping[str, Any]], run_id: str
) -> dict[str, Any]:
    """Make the table of one policy, `{"columns": [...], "data": [[...], ...]}`; the columns are those of `table`."""
    measured = (table.EPISODES, table.RETURNS, table.RETURNS_STD, table.RETURNS_MIN, table.LENGTHS)
    columns = [
        table.TRAINING,
        *(f"{table.VARY}{name}" for name in training.vary),
        table.SEED,
        table.RUN,
        table.ENV_STEPS,
        table.UPDATES,
        table.FINAL,
        table.INSIDE,
        table.CELL,
        *(f"{table.TEST}{name}" for name in cells),
        *measured,
    ]
    varied = [
        value if isinstance(value, bool | int | float | str) else json.dumps(value) for value in training.vary.values()
    ]
    data = []
    for steps, point in points.items():
        trained = point[table.ENV_STEPS], point[table.UPDATES]
        who = [training.training, *varied, training.seed, run_id, *trained, steps == max(points)]
        within = point[table.INSIDE]
        of_cells = [within, range(len(within)), *(values.tolist() for values in cells.values())]
        for row in zip(*of_cells, *(point[name] for name in measured), strict=True):
            data.append([*who, *row])
    return {"columns": columns, "data": data}

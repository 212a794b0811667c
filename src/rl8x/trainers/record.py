"""The record of a run: its tracked run, the metadata of its checkpoints, and its last lines."""

from __future__ import annotations

import os
import platform
import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from rl8x import __version__, keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import flatten_params, qualified_name
from rl8x.checkpoint import Checkpoint
from rl8x.checkpoint.load import CHECKPOINTS_TAG, resolve, spool_of
from rl8x.checkpoint.manager import CheckpointManager
from rl8x.checkpoint.tree import RANKS, gathered, num_ranks
from rl8x.config.files import unwritable_in
from rl8x.config.spec import TrainerSpec
from rl8x.distributed import ranks
from rl8x.envs.parameters import AnyEnvConfig, Given, function_form, function_name, inherited_config, shown_value
from rl8x.importing import texts
from rl8x.plain import dump_run
from rl8x.tracking import MLflowTracker, NullTracker, Tracker
from rl8x.tracking.location import beside
from rl8x.tracking.protocol import Status
from rl8x.tracking.secrets import hide_in_data
from rl8x.trainers.description import Description, command
from rl8x.trainers.evaluation import Evaluations, values_under
from rl8x.trainers.resume import Origin, handle_for, job, torch_generators
from rl8x.trainers.rows import counter_name
from rl8x.trainers.run_state import RunState

RUN_FILE: Final = "run.yaml"
_CONFIGS: Final = ("env_config.", "eval_env_config.")


class Record(Description):
    """Writes a trainer's runs to one tracked run, to its checkpoints and to its last lines."""

    def __init__(
        self,
        algorithm: GenericAlgorithmBase[Any],
        tracker: Tracker,
        checkpoints: CheckpointManager,
        trainer: TrainerSpec,
        evaluations: Evaluations,
    ) -> None:
        super().__init__(algorithm, tracker, checkpoints, trainer, evaluations)
        self.is_written = False  # whether a file, or a `RunSpec` of a script, made the run
        self.is_open = False  # whether the tracked run has begun, or gone on, and not ended since
        self.log_ms = 0.0  # that the last row took
        self._handle: str | None = None
        self._process: int | None = None  # that began what is kept of the run
        self._repeats = self._only_adds = False
        self._resume_tags: Mapping[str, str] = {}
        self._logged: dict[str, Any] = {}  # once: MLflow changes no param that it has
        self._shown: set[str] = set()  # all that ever were
        self._tagged: Path | None = None
        self._database: str | None = None
        # What is trained under, once that is known: a run that begins with an evaluation does not say it yet.
        self._config: Given | None = None
        if algorithm.env is None:
            env = evaluations.env
            self._config = {} if env is None else env.parameter_state.following.given

    # -- the tracked run

    def resume(
        self, checkpoint: Checkpoint, origin: Origin, results: Mapping[str, Any], eval_config: Given | None = None
    ) -> None:
        """Continue the tracked run and the checkpoints of another process, whose last rows may come again."""
        self.checkpoints.go_on_from(checkpoint, origin.known)
        self.resolved = resolve(self.algorithm)  # with the seed that was drawn then
        tracked = checkpoint.metadata["run"]
        if isinstance(self.tracker, MLflowTracker):
            self.tracker.resumed_spool = spool_of(checkpoint.path.parent, checkpoint.metadata)
            self.tracker.names_before = tracked["names"] or {}
        self.results.load_state_dict(results)
        trained = {} if self.algorithm.env is None else self.algorithm.env.parameter_state.in_force.given
        steered_by = function_name(checkpoint.spec.run.env_config)
        self._shown = {*self._config_params(trained, eval_config, steered_by)}
        for name, value in checkpoint.metadata["resolved"]["config"].items():
            self._shown |= flatten_params(name, value).keys() if name in origin.overrides else set()
        self._shown |= self._params_of_ranks(num_ranks(checkpoint.state)).keys()
        self._handle, self._repeats, self._resume_tags = handle_for(tracked, self.tracker), True, origin.tags

    def prepare(self, run: RunState) -> None:
        """Note the options of a `run()` before it begins."""
        self.run = run
        self.steered_by = function_name(run.options.env_config)
        self.spec = replace(self.spec, run=run.options)
        horizons, given = self.algorithm.horizons, None if callable(run.env_config) else run.env_config
        if horizons is not None:
            state = horizons.env.parameter_state
            following = state.following.given if given is None else given
            self._config = following if horizons.reset_is_due() else state.in_force.given

    def open(self, *, trains: bool = True) -> None:
        """Begin or continue the tracked run; what is only added to a run that is over leaves its status alone."""
        self.check_process()
        if self.is_open:
            if not (trains and self._only_adds):
                return
            self.close("FINISHED")
        if not (isinstance(self.tracker, NullTracker) and self.checkpoints.options is None):
            self._process = os.getpid()
        fresh = self._handle is None
        self._only_adds = not fresh and not trains
        known = self._config is not None
        self._logged = {name: value for name, value in self.params.items() if known or not name.startswith(_CONFIGS)}
        self._shown |= self._logged.keys()
        self.tracker.start(
            params=self._logged,
            tags={
                "rl8x.version": __version__,
                "rl8x.command": command(),
                **{f"rl8x.{name}": value for name, value in self.labels.items()},
                **({} if fresh or self._only_adds else {"rl8x.stop_reason": ""}),  # until it ends again
                **self._resume_tags,
            },
            resume=self._handle,
            # What is only added to a run is no row of its training that comes again.
            repeats=self._repeats and not self._only_adds,
            keeps_status=self._only_adds,
        )
        self._handle, self._repeats = self.tracker.resume_handle, self._repeats and self._only_adds
        self.is_open = True
        if not self._only_adds:
            self._describe(finished=False)
        if fresh and self.run is not None:
            self._log_run_file(self.run)

    def _log_run_file(self, run: RunState) -> None:
        """Keep the run file, if one can hold all of the run; it cannot hold callbacks."""
        plain = self.spec.to_plain()
        is_whole = self.is_written or not (run.callbacks or any(text.startswith("__main__.") for text in texts(plain)))
        if is_whole and not [*unwritable_in(plain)]:
            self.tracker.log_text(dump_run(dict(hide_in_data(plain))), RUN_FILE)

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process has begun the run, of which this one is a fork."""
        return self._process not in (None, os.getpid())

    def check_process(self) -> None:
        """Raise where the run is another process's."""
        if self.is_elsewhere:
            raise RuntimeError(
                f"this trainer's run belongs to process {self._process}, and this is a fork of it, which would write "
                "into that run: make a trainer here, or go on with the run by Trainer.resume(...) once it has ended."
            )

    def log(self, row: Mapping[str, float], *, trains: bool = True) -> None:
        """Log a row at the algorithm's clock; for `trains` see `open`."""
        self.open(trains=trains)
        begin, step = time.perf_counter(), self.algorithm.counters[self.algorithm.clock]
        # MLflow's pages list metrics as they first came, and compare runs by the first.
        first = {name: row[name] for name in (*keys.EVALUATED_RETURNS, *keys.TRAINED_RETURNS) if name in row}
        self.tracker.log_metrics({**first, **row}, step)
        self.results.take(row, step)
        self.log_ms = (time.perf_counter() - begin) * 1e3

    def close(
        self, status: Status, stop_reason: str | None = None, evaluation: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """End the tracked run, if it is open, with the last evaluation's metrics; None keeps its stop reason."""
        if not self.is_open or self.is_elsewhere:
            return
        if not self._only_adds:
            self.update_params("lr_schedule")  # callbacks may have set the learning rate
        self.is_open = False
        if stop_reason is not None:
            self.tracker.set_tags({"rl8x.stop_reason": stop_reason})
        self.tracker.set_tags(self.algorithm.tags)
        if self._tagged is not None:
            self.tag_checkpoints()
        if not self._only_adds:
            self._log_results(finished=status == "FINISHED")
            ended = self.ending(status, stop_reason, evaluation)
            self._describe(finished=status == "FINISHED", ended=ended)
        self.tracker.finish(status)

    def _describe(self, *, finished: bool, ended: str | None = None) -> None:
        directory = self.checkpoints.directory
        text = self.page(ended, finished=finished)
        self.tracker.describe(text, None if directory is None else shlex.quote(str(directory.absolute())))

    def _log_results(self, *, finished: bool) -> None:
        """Log the results: a tag, and in MLflow a figure of the curves and, as a run may go on, at its end metrics."""
        courses, row = self.results.courses, self.results.row
        if not row:
            return
        self.tracker.set_tags({"rl8x.result": str(self.results)})
        if not isinstance(self.tracker, MLflowTracker):
            return
        clock = self.algorithm.clock
        if finished:
            self.tracker.log_metrics(row, self.algorithm.counters[clock])
        series = {name: course.points for name, course in courses.items()}
        if any(len(points) > 1 for points in series.values()):
            title = f"{self.labels['algorithm']} on {self.labels['task']}"
            self.tracker.log_curves(series, title, counter_name(clock))

    # -- params

    @property
    def params(self) -> dict[str, Any]:
        """The params of the run: hyperparameters, physics, options, versions and the machine."""
        env, config = self.algorithm.env, self._config
        if config is None:
            config = {} if env is None else env.parameter_state.following.given
        eval_config = None if self.run is None else self.run.eval_env_config
        present = {
            **self.algorithm.params,
            **self._params_of_ranks(ranks().size),
            **({} if self.run is None else self.spec.params),
            **self._config_params(config, eval_config, self.steered_by),
            "versions.rl8x": __version__,
            "versions.torch": torch.__version__,
            "versions.python": platform.python_version(),
        }
        # Then what is no longer so, as MLflow keeps what was.
        return present | dict.fromkeys(sorted(self._shown - present.keys()))

    def _params_of_ranks(self, size: int) -> dict[str, int]:
        """Return the params of so many ranks; one has none."""
        env = self.algorithm.env
        total = {} if env is None else {"num_envs.total": env.num_copies * size}
        return {"ranks": size, **total} if size > 1 else {}

    def _config_params(self, config: Given, eval_config: Given | None, steered_by: str | None) -> dict[str, Any]:
        """Return the environment's parameters as params, and those of evaluations that differ or were shown."""
        env, evaluations = self.algorithm.env, self.evaluations
        trained = {} if env is None or steered_by is not None else values_under(config, env)
        params = {f"env_config.{name}": shown_value(value) for name, value in trained.items()}
        if steered_by is not None:
            params["env_config"] = f"function {steered_by}"
        played = evaluations.played_in
        if played is None:
            return params
        if eval_config is not None or steered_by is None:
            config = inherited_config(config, played.num_copies) if eval_config is None else eval_config
            for name, value in values_under(config, played).items():
                param = f"eval_env_config.{name}"
                if name in (eval_config or {}) or value != trained.get(name) or param in self._shown:
                    params[param] = shown_value(value)
        params["num_eval_envs"] = evaluations.num_envs
        params["eval_env"] = "training environment" if evaluations.env is None else type(played.unwrapped).__name__
        return params

    def note_config(self, env_config: AnyEnvConfig | None) -> None:
        """Log the `env_config` of a collect if it is new; of a function its name, as the rows have the values."""
        env, steered_by, config = self.algorithm.env, self.steered_by, self._config
        if callable(env_config):
            steered_by = function_name(function_form(env_config))
        elif env is not None:
            in_force = env.parameter_state.in_force
            steered_by, config = steered_by if in_force.steered else None, in_force.given
        if (steered_by, config) != (self.steered_by, self._config):
            self.steered_by, self._config = steered_by, config
            self.update_params()

    def update_params(self, *names: str) -> None:
        """Log params that are new or have changed, of all or of some `names`."""
        present = {name: value for name, value in self.params.items() if not names or name in names}
        new = {name: value for name, value in present.items() if str(self._logged.get(name, ...)) != str(value)}
        if self.is_open and new:
            self.tracker.log_params(new)
            self._logged.update(new)
            self._shown |= new.keys()

    # -- checkpoints

    def tag_checkpoints(self) -> None:
        """Tag the tracked run with the folder of its checkpoints, if they have another than before."""
        directory = self.checkpoints.directory
        if directory is not None and directory != self._tagged:
            self.tracker.set_tags({CHECKPOINTS_TAG: str(directory.absolute())})
            self._tagged = directory

    def save(
        self, state: Mapping[str, Any], run: RunState | None, status: str = "RUNNING", *, is_best: bool = False
    ) -> None:
        """Write a checkpoint in the background, if the run has any; the run is None in a loop over `step()`."""
        manager, counters = self.checkpoints, self.algorithm.counters
        if not ranks().first("whether there are checkpoints", manager.is_ready(counters[keys.STEPS])):
            return
        own = {"trainer": state, "torch_generators": torch_generators(self.algorithm.device)}
        try:
            others = gathered(own, manager.kept_segments if manager.is_open else ())
            # A condition may remember by now what it did not at first.
            run_state = None if run is None else run.state_dict()
        except TypeError as error:
            if manager.is_open:
                manager.skip(counters[keys.STEPS], error)
            return
        if not manager.is_open:  # rank 0 has them
            return
        metadata = {
            "status": status,
            "stop_reason": run.last.stop_reason if run is not None and run.last is not None else None,
            "counters": dict(counters),
            "run": {"key": manager.key, "job": job(), **self._tracked_run()},
            "spec": self.spec.to_plain(),
            "resolved": self.resolved,
        }
        all_state = {
            **own,
            "run": run_state,
            "best": manager.best,
            **({RANKS: others} if others else {}),
            "results": self.results.state_dict(),
        }
        manager.save(counters[keys.STEPS], metadata, all_state, is_best=is_best)

    def _tracked_run(self) -> dict[str, Any]:
        """Return metadata that identifies the tracked run, with paths beside the checkpoints relative to them."""
        tracker, directory = self.tracker, self.checkpoints.directory
        spool: Path | None = getattr(tracker, "spool_folder", None)
        relative = None
        if spool is not None and directory is not None:
            relative = os.path.relpath(spool.resolve(), directory.resolve())
        # The tracker names the database where it was, and the folder of both may have been moved since.
        if directory is not None:
            self._database = beside(directory, getattr(tracker, "database", None)) or self._database
        return {
            "tracker": qualified_name(type(tracker)),
            "handle": tracker.resume_handle,
            "id": tracker.run_id,
            "location": tracker.location,
            "spool": relative,
            "names": getattr(tracker, "names", None),
            "database": self._database,
        }

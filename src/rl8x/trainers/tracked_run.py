"""The tracked run of a trainer: when it begins, goes on and ends, and what is told of it beside its rows."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rl8x._version import __version__
from rl8x.plain_yaml import dump_run
from rl8x.tracking.protocol import Status
from rl8x.tracking.secrets import hide
from rl8x.trainers import description
from rl8x.trainers.env_configs import CONFIGS, PlainConfig, config_params

if TYPE_CHECKING:
    from rl8x.trainers.run_state import Run
    from rl8x.trainers.trainer import GenericTrainerBase


class TrackedRun:
    """Tells the trainer's tracker of its run, which begins with the first row or with `run()`.

    A second `run()` of a trainer goes on in the same tracked run; another trainer with the same tracker begins one.
    Params are told once: MLflow changes none that it has.

    Args:
        trainer: Whose run it is.

    Attributes:
        is_open: Whether it has begun, or gone on, and not ended since.
        log_ms: Milliseconds that the last row took.
        conditions: Stop conditions of the last `run()` as plain data; None for those that have no such form.
    """

    def __init__(self, trainer: GenericTrainerBase[Any]) -> None:
        self._trainer = trainer
        self.is_open = False
        self.log_ms = 0.0
        self.conditions: list[Any] = []
        self._handle: str | None = None
        self._repeats = False
        self._only_adds = False
        self._resume_tags: dict[str, str] = {}
        self._run_params: dict[str, Any] = {}
        self._run_file: dict[str, Any] | None = None
        self._told: dict[str, Any] = {}
        # What is trained under, once that is known: a run that begins with an evaluation does not tell it yet.
        self._config: PlainConfig | None = None
        self._eval_config: PlainConfig | None = None

    def resume(self, handle: str | None, tags: Mapping[str, str]) -> None:
        """Go on with the tracked run of another process, whose last rows may come again.

        Args:
            handle: Its `resume_handle`; None begins another one.
            tags: What it is told of the resume.
        """
        self._handle, self._repeats, self._resume_tags = handle, True, dict(tags)

    def prepare(self, run: Run) -> None:
        """Take over what a `run()` is made of, before it begins."""
        trainer, given = self._trainer, run.plain["env_config"]
        env = trainer.algorithm.env
        self._eval_config = run.plain["eval_env_config"]
        if not trainer.algorithm.reset_is_due():
            self._config = env.config
        else:
            self._config = env.next_config if given is None else given
        self._run_params, self._run_file = run.params, description.run_file(trainer, run)
        self.conditions = run.specs

    def open(self, *, trains: bool = True) -> None:
        """Begin the tracked run, or go on with it.

        Args:
            trains: Whether training goes on; what is only added to a run that is over leaves its status alone.
        """
        if self.is_open:
            if not (trains and self._only_adds):
                return
            self.close("FINISHED")
        tracker, fresh = self._trainer.tracker, self._handle is None
        self._only_adds = not fresh and not trains
        tags = {"rl8x.version": __version__, "rl8x.command": description.command(), **self._resume_tags}
        known = self._config is not None
        self._told = {name: value for name, value in self.params.items() if known or not name.startswith(CONFIGS)}
        tracker.start(
            params=self._told,
            tags=tags,
            resume=self._handle,
            repeats=self._repeats,
            keeps_status=self._only_adds,
        )
        self._handle, self._repeats = tracker.resume_handle, False
        self.is_open = True
        if not self._only_adds:
            tracker.describe(description.describe(self._trainer))
        if fresh and self._run_file is not None:
            tracker.log_text(dump_run(self._run_file), description.RUN_FILE)

    def log(self, row: Mapping[str, float], *, trains: bool = True) -> None:
        """Log a row at the trainer's clock; `trains` as `open` takes it."""
        self.open(trains=trains)
        begin = time.perf_counter()
        trainer = self._trainer
        trainer.tracker.log_metrics(row, trainer.state[trainer.algorithm.clock])
        self.log_ms = (time.perf_counter() - begin) * 1e3

    def log_failure(self, trace: str) -> None:
        """Keep the traceback of what ended the run."""
        if self.is_open:
            self._trainer.tracker.log_text(hide(trace), "traceback.txt")

    def close(self, status: Status) -> None:
        """End the tracked run, if it is open."""
        if not self.is_open:
            return
        trainer, self.is_open = self._trainer, False
        if trainer.stop_reason is not None:
            trainer.tracker.set_tags({"rl8x.stop_reason": trainer.stop_reason})
        trainer.tracker.set_tags(trainer.algorithm.tags)
        if not self._only_adds:
            trainer.tracker.describe(description.describe(trainer, status))
        trainer.tracker.finish(status)

    @property
    def params(self) -> dict[str, Any]:
        """Everything that the run is made of: hyperparameters, physics, options, versions and the machine."""
        algorithm, evaluator = self._trainer.algorithm, self._trainer.evaluator
        eval_env = algorithm.env if evaluator is None else evaluator.env
        config = algorithm.env.next_config if self._config is None else self._config
        return {
            **algorithm.params,
            **self._run_params,
            **config_params(algorithm.env, eval_env, config, self._eval_config),
            "num_eval_envs": eval_env.num_envs,
            "eval_env": "training environment" if evaluator is None else type(eval_env).__name__,
            "versions.rl8x": __version__,
            "versions.torch": torch.__version__,
            "versions.python": platform.python_version(),
        }

    def note_config(self) -> None:
        """Keep what a collect ran under, and tell the tracked run where it is new."""
        config = self._trainer.algorithm.env.config
        if config != self._config:
            self._config = config
            self.update_params()

    def update_params(self) -> None:
        """Tell the tracked run those params that are new or others by now."""
        new = {name: value for name, value in self.params.items() if str(self._told.get(name, ...)) != str(value)}
        if self.is_open and new:
            self._trainer.tracker.log_params(new)
            self._told.update(new)

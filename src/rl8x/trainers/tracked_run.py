"""The tracked run of a trainer: when it begins, goes on and ends, and what is logged of it beside its rows."""

from __future__ import annotations

import importlib.util
import platform
import time
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from rl8x._version import __version__
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.online import OnlineAlgorithm
from rl8x.envs import Env
from rl8x.envs.parameters import inherited_config, shown_value
from rl8x.plain_yaml import dump_run
from rl8x.tracking import MLflowTracker, NullTracker, Tracker
from rl8x.tracking.protocol import Status
from rl8x.tracking.secrets import hide
from rl8x.trainers.description import RUN_FILE, command, describe, describe_ending
from rl8x.trainers.record import Record
from rl8x.trainers.run_state import RunState

PlainConfig = Mapping[str, object]
_CONFIGS: Final = ("env_config.", "eval_env_config.")


class TrackedRun:
    """Logs a trainer's run to its tracker; it begins with the first row or with `run()`.

    A second `run()` of a trainer goes on in the same tracked run; another trainer with the same tracker begins one.
    Params are logged once: MLflow changes none that it has.

    Args:
        record: What is known of the run, its tracker among it.
        eval_env: The evaluation environment of its own; None where there is none.

    Attributes:
        is_open: Whether it has begun, or gone on, and not ended since.
        log_ms: Milliseconds that the last row took.
    """

    def __init__(self, record: Record, eval_env: Env | None) -> None:
        self._record = record
        self._algorithm = record.algorithm
        self._eval_env = eval_env
        self.is_open = False
        self.log_ms = 0.0
        self._handle: str | None = None
        self._repeats = False
        self._only_adds = False
        self._resume_tags: dict[str, str] = {}
        self._run_params: Mapping[str, Any] = {}
        self._run_file: dict[str, Any] | None = None
        self._logged: dict[str, Any] = {}
        # What is trained under, once that is known: a run that begins with an evaluation does not say it yet.
        self._config: PlainConfig | None = None
        if record.algorithm.env is None:
            self._config = {} if eval_env is None else eval_env.next_config
        self._eval_config: PlainConfig | None = None

    def resume(self, handle: str | None, tags: Mapping[str, str]) -> None:
        """Go on with the tracked run of another process, whose last rows may come again.

        Args:
            handle: Its `resume_handle`; None begins another one.
            tags: What it records of the resume.
        """
        self._handle, self._repeats, self._resume_tags = handle, True, dict(tags)

    def prepare(self, run: RunState, run_file: dict[str, Any] | None) -> None:
        """Take over what a `run()` is made of, before it begins; `run_file` makes it again, if there is one."""
        self._run_params, self._run_file = run.params, run_file
        self._eval_config = run.plain["eval_env_config"]
        config = _training_config(self._algorithm, run.plain["env_config"])
        self._config = self._config if config is None else config

    def open(self, *, trains: bool = True) -> None:
        """Begin the tracked run, or go on with it.

        Args:
            trains: Whether training goes on; what is only added to a run that is over leaves its status alone.
        """
        if self.is_open:
            if not (trains and self._only_adds):
                return
            self.close("FINISHED")
        tracker, fresh = self._record.tracker, self._handle is None
        self._only_adds = not fresh and not trains
        tags = {"rl8x.version": __version__, "rl8x.command": command(), **self._resume_tags}
        known = self._config is not None
        self._logged = {name: value for name, value in self.params.items() if known or not name.startswith(_CONFIGS)}
        tracker.start(
            params=self._logged,
            tags=tags,
            resume=self._handle,
            repeats=self._repeats,
            keeps_status=self._only_adds,
        )
        self._handle, self._repeats = tracker.resume_handle, False
        self.is_open = True
        if not self._only_adds:
            tracker.describe(describe(self._algorithm, self._record.command))
        if fresh and self._run_file is not None:
            tracker.log_text(dump_run(self._run_file), RUN_FILE)

    def log(self, row: Mapping[str, float], *, trains: bool = True) -> None:
        """Log a row at the algorithm's clock; `trains` as `open` takes it."""
        self.open(trains=trains)
        begin = time.perf_counter()
        self._record.tracker.log_metrics(row, self._algorithm.counters[self._algorithm.clock])
        self.log_ms = (time.perf_counter() - begin) * 1e3

    def log_failure(self, trace: str) -> None:
        """Keep the traceback of what ended the run."""
        if self.is_open:
            self._record.tracker.log_text(hide(trace), "traceback.txt")

    def close(
        self, status: Status, stop_reason: str | None = None, evaluation: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """End the tracked run, if it is open.

        Args:
            status: How it ended.
            stop_reason: Why; None leaves the reason that it has.
            evaluation: The metrics of the last evaluation.
        """
        if not self.is_open:
            return
        self.is_open = False
        if stop_reason is not None:
            self._record.tracker.set_tags({"rl8x.stop_reason": stop_reason})
        self._record.tracker.set_tags(self._algorithm.tags)
        if not self._only_adds:
            ended = describe_ending(self._algorithm, status, stop_reason, evaluation)
            self._record.tracker.describe(describe(self._algorithm, self._record.command, ended))
        self._record.tracker.finish(status)

    # -- params

    @property
    def params(self) -> dict[str, Any]:
        """Everything that the run is made of: hyperparameters, physics, options, versions and the machine."""
        env, config = self._algorithm.env, self._config
        if config is None:
            config = {} if env is None else env.next_config
        return {
            **self._algorithm.params,
            **self._run_params,
            **_config_params(env, self._eval_env, config, self._eval_config),
            "versions.rl8x": __version__,
            "versions.torch": torch.__version__,
            "versions.python": platform.python_version(),
        }

    def note_config(self) -> None:
        """Keep what a collect ran under, and log it where it is new."""
        env = self._algorithm.env
        if env is not None and env.config != self._config:
            self._config = env.config
            self.update_params()

    def update_params(self) -> None:
        """Log those params that are new or others by now."""
        new = {name: value for name, value in self.params.items() if str(self._logged.get(name, ...)) != str(value)}
        if self.is_open and new:
            self._record.tracker.log_params(new)
            self._logged.update(new)


def _training_config(algorithm: GenericAlgorithmBase[Any], given: PlainConfig | None) -> PlainConfig | None:
    """Return what the next step of a run trains under, in plain form; None without a training environment.

    Args:
        algorithm: What is trained.
        given: The run's `env_config` in plain form.
    """
    if not isinstance(algorithm, OnlineAlgorithm):
        return None
    if not algorithm.reset_is_due():
        return algorithm.env.config
    return algorithm.env.next_config if given is None else given


def _config_params(
    env: Env | None, eval_env: Env | None, config: PlainConfig, eval_config: PlainConfig | None
) -> dict[str, Any]:
    """Name the value of each parameter of the environment, and those of evaluations where they are others.

    Args:
        env: The training environment; None where there is none.
        eval_env: An evaluation environment of its own; None where there is none.
        config: What is trained under; without training environment what the evaluation environment came with.
        eval_config: What is evaluated under; None is `config`.
    """
    trained = {} if env is None else _in_force(env, config)
    params = {f"env_config.{name}": shown_value(value) for name, value in trained.items()}
    played = env if eval_env is None else eval_env
    if played is None:
        return params
    inherited = inherited_config(config, played.num_envs) if eval_config is None else eval_config
    for name, value in _in_force(played, inherited).items():
        if name in (eval_config or {}) or value != trained.get(name):
            params[f"eval_env_config.{name}"] = shown_value(value)
    params["num_eval_envs"] = played.num_envs
    params["eval_env"] = "training environment" if eval_env is None else type(eval_env).__name__
    return params


def _in_force(env: Env, config: PlainConfig) -> dict[str, object]:
    return {name: config.get(name, parameter.default) for name, parameter in env.parameters.items()}


def default_tracker() -> Tracker:
    """Return a tracker to MLflow, or one that keeps nothing where MLflow is not installed, with a warning."""
    if importlib.util.find_spec("mlflow") is not None:
        return MLflowTracker()
    warnings.warn(
        "MLflow is not installed: this run is not tracked. `pip install mlflow`, or pass tracker=NullTracker().",
        stacklevel=3,
    )
    return NullTracker()

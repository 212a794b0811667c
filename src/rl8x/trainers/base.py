"""The trainer: a state machine around an algorithm.

It counts, evaluates, asks the stop conditions, and tracks every metric; it knows nothing of how an algorithm learns.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import psutil
import torch

from rl8x import keys
from rl8x._version import __version__
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.conditions import Condition, as_conditions, check_names
from rl8x.envs import Env
from rl8x.stats import Stats
from rl8x.tracking.protocol import NullTracker, Tracker
from rl8x.trainers.evaluation import EpisodeEvaluator, fitted_config, make_evaluator
from rl8x.trainers.progress import Progress, ProgressReporter
from rl8x.trainers.stats import EvalStats, TrainStats
from rl8x.trainers.timing import Timer

AlgorithmT = TypeVar("AlgorithmT", bound=GenericAlgorithmBase[Any])
TrainerState = dict[str, int]
EvalEnv = str | bool | Env | Callable[..., Env] | None
StopConditions = Sequence[Condition | Callable[[Mapping[str, float]], bool]]
Callback = Callable[["GenericTrainerBase[Any]", TrainStats], None]


class GenericTrainerBase(Generic[AlgorithmT]):
    """Drives an algorithm: `step()`, `eval()`, and `run()` until a condition stops it.

    Args:
        algorithm: What is trained.
        tracker: Where params and metrics go; None is MLflow, or nothing where MLflow is not installed.
        eval_env: Where `eval()` plays. True, an instance or a factory: an environment of its own, in which whole episodes are
            played at any time. False or None: the training environment, under the rule of `horizons_per_env_reset`. `"auto"`:
            an own one for episodic tasks, the training environment for tasks that never end.
        num_eval_envs: Copies, and so episodes, of an own evaluation environment that the trainer makes; None is the training's
            number, at most 128.
        callbacks: Called with the trainer and each row of statistics, after it was tracked.
    """

    def __init__(
        self,
        algorithm: AlgorithmT,
        *,
        tracker: Tracker | None = None,
        eval_env: EvalEnv = "auto",
        num_eval_envs: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.algorithm = algorithm
        self.tracker = default_tracker() if tracker is None else tracker
        self.callbacks = tuple(callbacks)
        self.evaluator: EpisodeEvaluator | None = make_evaluator(algorithm, eval_env, num_eval_envs)
        self.stop_reason: str | None = None
        self._eval_row: dict[str, float] = {}
        self._tracking_ms = 0.0
        self._tracked = False
        # A second run() of a trainer goes on in the same tracked run; another trainer with the same tracker begins one.
        self._resume: str | None = None
        self._run_params: dict[str, Any] = {}
        self._process = psutil.Process()

    @property
    def state(self) -> TrainerState:
        """The running counters by metric name: collects, steps, updates, environment steps and episodes."""
        return self.algorithm.counters

    @property
    def metric_names(self) -> frozenset[str]:
        """Every metric that a row of this trainer may have."""
        return frozenset((*keys.TRAINER_METRICS, *self.algorithm.metrics))

    # -- one step, one evaluation -----------------------------------------------------------------------------------------

    def step(self, *, env_config: Mapping[str, Any] | None = None) -> TrainStats:
        """Collect experience and update the policy once; track the row of metrics.

        Args:
            env_config: Values for the environment's parameters, applied where a reset is due.

        Returns:
            The row, with the latest evaluation's metrics beside it.
        """
        row = self._step(env_config)
        return self._finish_row(row, frozenset(row))

    def eval(self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True) -> EvalStats:
        """Evaluate the present policy and track the metrics under `eval/`.

        Args:
            env_config: Values for the environment's parameters in this evaluation.
            deterministic: Whether the policy takes its most likely action rather than a sample.

        Raises:
            RuntimeError: If the training environment is used and is not at a reset.
            ValueError: If `env_config` could not be applied.
        """
        row = self._eval(env_config, deterministic)
        self._track(row)
        return EvalStats(row)

    def _step(self, env_config: Mapping[str, Any] | None) -> dict[str, float]:
        algorithm, state, device = self.algorithm, self.state, self.algorithm.device
        transitions, begin = state[keys.ENV_STEPS], time.perf_counter()
        with Timer(device) as collecting:
            collected = algorithm.collect(env_config=env_config)
        with Timer(device) as learning:
            learned = algorithm.step()
        row = dict(Stats.merge(collected, learned))  # the one copy to the host
        state[keys.ENV_EPISODES] += int(row.get(keys.EPISODES_ENDED, 0))
        row.update(state)
        row["profiling/collect_ms"], row["profiling/step_ms"] = collecting.elapsed_ms, learning.elapsed_ms
        row["profiling/env_steps_per_s"] = (state[keys.ENV_STEPS] - transitions) / (time.perf_counter() - begin)
        row["profiling/tracking_ms"] = self._tracking_ms
        row["memory/process_mb"] = self._process.memory_info().rss / 1e6
        row.update(algorithm.memory_stats())
        self._track(row)
        return row

    def _eval(self, env_config: Mapping[str, Any] | None, deterministic: bool) -> dict[str, float]:
        with Timer(self.algorithm.device) as timer:
            if self.evaluator is not None:
                config = self.algorithm.env.config if env_config is None else env_config
                config = fitted_config(config, self.evaluator.env.num_envs)
                stats = dict(self.evaluator.evaluate(config, deterministic=deterministic))
            else:
                self._check_eval_turn(env_config)
                stats = dict(self.algorithm.evaluate(env_config=env_config, deterministic=deterministic))
        row = {keys.EVAL_PREFIX + name: value for name, value in stats.items()}
        row["profiling/eval_ms"] = timer.elapsed_ms
        self._eval_row = {name: value for name, value in row.items() if name.startswith(keys.EVAL_PREFIX)}
        return row

    def _check_eval_turn(self, env_config: Mapping[str, Any] | None) -> None:
        every, collects = self.algorithm.horizons_per_env_reset, self.state[keys.COLLECTS]
        if every > 0 and collects % every:
            raise RuntimeError(
                f"`eval()` in the training environment needs `algorithm/collects` to be a multiple of `horizons_per_env_reset` = "
                f"{every}; it is {collects}. Call `step()` {every - collects % every} more time(s), or give the trainer an `eval_env`."
            )
        if every < 0 and collects > 0 and env_config is not None:
            raise ValueError(
                "An `env_config` for this evaluation would never apply: the training environment was reset once, at the first "
                "collect (`horizons_per_env_reset` < 0). Give the trainer an `eval_env`, or use horizons_per_env_reset=1."
            )

    def _finish_row(self, row: dict[str, float], fresh: frozenset[str]) -> TrainStats:
        stats = TrainStats({**self._eval_row, **row}, fresh)
        for callback in self.callbacks:
            callback(self, stats)
        return stats

    # -- running ----------------------------------------------------------------------------------------------------------

    def run(
        self,
        *,
        env_config: Mapping[str, Any] | None = None,
        eval_env_config: Mapping[str, Any] | None = None,
        steps_per_eval: int | None = None,
        stop_conditions: StopConditions | Condition | None = None,
        max_steps: int | None = None,
        progress: Progress = "auto",
    ) -> TrainStats:
        """Step until a condition says stop, evaluating now and then.

        Args:
            env_config: Values for the environment's parameters, applied at each reset.
            eval_env_config: The same for evaluations; None evaluates under the training's.
            steps_per_eval: An evaluation after every so many steps; None is never. Where the training environment is used, it
                must be a multiple of `horizons_per_env_reset`.
            stop_conditions: The run stops when any of these is met. Without one it goes on until interrupted.
            max_steps: The run stops after so many steps of this call; None sets no limit.
            progress: `"auto"` (a bar on a terminal, lines elsewhere), `"bar"`, `"lines"` or `"none"`.

        Returns:
            The last row, with `stop_reason` set.
        """
        conditions = as_conditions(stop_conditions)
        self._check_run(conditions, steps_per_eval, max_steps, eval_env_config)
        for condition in conditions:
            condition.bind(self)
            condition.start()
        self._run_params = {
            "run.steps_per_eval": steps_per_eval,
            "run.max_steps": max_steps,
            "run.stop_conditions": [repr(condition) for condition in conditions],
            "run.env_config": env_config,
            "run.eval_env_config": eval_env_config,
        }
        reporter = ProgressReporter(progress, max_steps)
        status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED"
        try:
            self._start_tracking()
            stats = self._loop(conditions, env_config, eval_env_config, steps_per_eval, max_steps, reporter)
        except (KeyboardInterrupt, SystemExit):
            status, self.stop_reason = "KILLED", "interrupted"
            raise
        except BaseException as error:
            status, self.stop_reason = "FAILED", f"{type(error).__name__}: {error}"
            if self._tracked:
                self.tracker.log_text(traceback.format_exc(), "traceback.txt")
            raise
        finally:
            reporter.close()
            self._finish_tracking(status)
        reporter.say(f"stopped after {self.state[keys.STEPS]:,} steps: {self.stop_reason}")
        return stats

    def _loop(
        self,
        conditions: list[Condition],
        env_config: Mapping[str, Any] | None,
        eval_env_config: Mapping[str, Any] | None,
        steps_per_eval: int | None,
        max_steps: int | None,
        reporter: ProgressReporter,
    ) -> TrainStats:
        self.stop_reason = None
        steps = 0
        while True:
            row = self._step(env_config)
            steps += 1
            if steps_per_eval is not None and steps % steps_per_eval == 0:
                evaluated = self._eval(eval_env_config, deterministic=True)
                self._track(evaluated)
                row = row | evaluated | self.state
            stats = self._finish_row(row, frozenset(row))
            reporter.update(stats)
            # Every condition sees every row: one that counts must not miss any because another was met.
            met = [condition for condition in conditions if condition(stats)]
            reasons = [condition.reason(stats) for condition in met]
            if max_steps is not None and steps >= max_steps:
                reasons.append(f"max_steps={max_steps}")
            if reasons:
                stats.stop_reason = self.stop_reason = "; ".join(reasons)
                return stats

    def _check_run(
        self,
        conditions: list[Condition],
        steps_per_eval: int | None,
        max_steps: int | None,
        eval_env_config: Mapping[str, Any] | None,
    ) -> None:
        for name, value in (("steps_per_eval", steps_per_eval), ("max_steps", max_steps)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"`{name}` must be a whole number, at least 1, or None; got {value!r}.")
        every = self.algorithm.horizons_per_env_reset
        if self.evaluator is None and steps_per_eval is not None:
            if every > 0 and steps_per_eval % every:
                raise ValueError(
                    f"`steps_per_eval` must be a multiple of `horizons_per_env_reset`; got {steps_per_eval} and {every}. "
                    f"Try {-(-steps_per_eval // every) * every}, or give the trainer an `eval_env`."
                )
            if every > 0:
                self._check_eval_turn(None)
            if every < 0 and eval_env_config is not None:
                raise ValueError(
                    "`eval_env_config` would never apply: the training environment is reset once, at the first collect "
                    "(`horizons_per_env_reset` < 0). Give the trainer an `eval_env`, or use horizons_per_env_reset=1."
                )
        check_names(conditions, self.metric_names)

    def __iter__(self) -> Iterator[TrainStats]:
        """Yield the statistics of one `step()` after another, for as long as the caller takes them."""
        while True:
            yield self.step()

    def evaluate_now(self) -> Mapping[str, float] | None:
        """Evaluate, track, and return the metrics, for a condition that wants to be confirmed; None out of turn."""
        every = self.algorithm.horizons_per_env_reset
        if self.evaluator is None and every > 0 and self.state[keys.COLLECTS] % every:
            return None
        return self.eval()

    # -- tracking ---------------------------------------------------------------------------------------------------------

    def _start_tracking(self) -> None:
        if self._tracked:
            return
        self.tracker.start(params=self.params, tags=self._tags(), resume=self._resume)
        self._resume = self.tracker.resume_handle
        self._tracked = True

    def _track(self, row: Mapping[str, float]) -> None:
        self._start_tracking()
        begin = time.perf_counter()
        self.tracker.log_metrics(row, self.state[self.algorithm.clock])
        self._tracking_ms = (time.perf_counter() - begin) * 1e3

    def _finish_tracking(self, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        if not self._tracked:
            return
        self._tracked = False
        if self.stop_reason is not None:
            self.tracker.set_tags({"rl8x.stop_reason": self.stop_reason})
        self.tracker.finish(status)

    def close(self) -> None:
        """End the tracked run of a loop over `step()`; `run()` does so itself."""
        self._finish_tracking("FINISHED")

    @property
    def params(self) -> dict[str, Any]:
        """Everything that a run is made of: hyperparameters, run options, versions and the machine."""
        return {
            **self.algorithm.params,
            **self._run_params,
            "eval_env": "training environment" if self.evaluator is None else type(self.evaluator.env).__name__,
            "versions.rl8x": __version__,
            "versions.torch": torch.__version__,
            "versions.python": platform.python_version(),
        }

    def _tags(self) -> dict[str, str]:
        tags = {"rl8x.version": __version__, "rl8x.command": " ".join(sys.argv)}
        if not self.algorithm.env.gives_final_obs:
            tags["rl8x.final_obs"] = "missing: time limits bootstrap from the observation after the reset"
        return tags

    # -- saving -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on."""
        return {
            "algorithm": self.algorithm.state_dict(),
            "evaluator": None if self.evaluator is None else self.evaluator.state_dict(),
            "eval_row": dict(self._eval_row),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.algorithm.load_state_dict(state["algorithm"])
        if self.evaluator is not None and state["evaluator"] is not None:
            self.evaluator.load_state_dict(state["evaluator"])
        self._eval_row = dict(state["eval_row"])


class Trainer(GenericTrainerBase[GenericAlgorithmBase[Any]]):
    """The trainer that users make: `Trainer(PPOConfig(...).build(CartPole)).run(stop_conditions=[...])`."""


def default_tracker() -> Tracker:
    """Return a tracker to MLflow, or one that keeps nothing where MLflow is not installed, with a warning."""
    if importlib.util.find_spec("mlflow") is not None:
        from rl8x.tracking import MLflowTracker

        return MLflowTracker()
    warnings.warn(
        "MLflow is not installed: this run is not tracked. `pip install mlflow`, or pass tracker=NullTracker().",
        stacklevel=3,
    )
    return NullTracker()

"""The trainer: collects, learns, evaluates, tracks and saves until a condition stops it, with any algorithm."""

from __future__ import annotations

import contextlib
import math
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import EllipsisType
from typing import Any, Final, Generic, NoReturn, Self, TypeVar

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase, check_algorithm, refuse_torch_modes
from rl8x.algorithms.config import EnvLike
from rl8x.algorithms.hyperparameters import check_names_in
from rl8x.checkpoint import Checkpoint, CheckpointError, CheckpointsLike
from rl8x.checkpoint.files import checked_state
from rl8x.checkpoint.manager import CheckpointManager
from rl8x.checkpoint.tree import RANKS, num_ranks, of_rank
from rl8x.conditions import Condition
from rl8x.conditions.base import nearest_metrics
from rl8x.config.files import unwritable, unwritable_in
from rl8x.config.spec import RunOptions, RunSpec, TrainerSpec
from rl8x.distributed import ranks
from rl8x.envs.parameters import AnyEnvConfig, followed_in, parsed
from rl8x.execution.compiler import compiler
from rl8x.output import counted, described, shown
from rl8x.plain import own_values
from rl8x.tracking import MLflowTracker, NullTracker, Tracker
from rl8x.tracking.protocol import Status, status_of
from rl8x.tracking.runs import shown_path
from rl8x.tracking.secrets import hide
from rl8x.trainers.artifacts import Shows, check_models
from rl8x.trainers.evaluation import Evaluations, check_evaluation_name
from rl8x.trainers.ranks import SignalGuard, agree, begin, check_alike, interruption, warn_of_other_number
from rl8x.trainers.record import Record
from rl8x.trainers.resume import (
    TRAINER_OPTIONS,
    Origin,
    newest,
    prepare,
    set_torch_generators,
    unfinished,
    with_generators_of,
)
from rl8x.trainers.rows import EvalStats, Progress, ProgressReporter, Timer, TrainStats, check_progress
from rl8x.trainers.run_state import RUN_OPTIONS, RunState, StopConditions
from rl8x.trainers.train_step import Callback, OnNonFinite, TrainStep, callback_name, checked_callbacks, declared_by

AlgorithmT = TypeVar("AlgorithmT", bound=GenericAlgorithmBase[Any])
TrainerState = dict[str, int]
EvalEnv = EnvLike | bool | None
_GIVEN_ENV: Final = "the evaluation environment was an instance or a factory"
# Metrics of collecting, which algorithms without an environment do not have.
_COLLECTED = {*keys.COLLECT_METRICS, "profiling/env_steps_per_s"}
_BEGUN: Final = ("run_id", "resume_handle")  # attributes of a tracker that has begun
# Interval of checks for signals and time limits while waiting for programs.
_SECONDS_PER_LOOK: Final = 0.2


class GenericTrainerBase(Shows, Generic[AlgorithmT]):
    """Trains an algorithm: `run()` until a condition stops it, or one `step()` and `eval()` at a time."""

    def __init__(
        self,
        algorithm: AlgorithmT,
        *,
        tracker: Tracker | None = None,
        eval_env: EvalEnv = "auto",
        num_eval_envs: int | None = None,
        checkpoints: CheckpointsLike = None,
        on_non_finite: OnNonFinite = "stop",
        log_models: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Prepare a trainer; nothing is tracked or saved before the first `run()` or `step()`.

        Args:
            algorithm: The algorithm that is trained.
            tracker: Stores params and metrics; None is MLflow.
            eval_env: The environment of `eval()`. True, an instance or a factory: a separate one, for whole episodes
                (`eval/returns/*`). False or None: the training's, for the horizons between two resets (in episodic
                tasks `eval/horizon_returns/*`). `"auto"`: a separate one for episodic tasks, made like the training's
                or copied from it, else the training's. An algorithm that learns from a data set has none by default.
            num_eval_envs: Copies, and so episodes, of a separate evaluation environment; None is the training's number,
                but at most 128. An instance that can only be copied keeps its number.
            checkpoints: When and where the run is saved: a `Checkpoints`, a path, or True for the defaults; False never
                saves. None saves with the defaults, in a folder beside the tracked run, if that is on disk.
            on_non_finite: What to do if observations, actions, rewards, losses, gradients or weights are not finite.
                `"stop"` ends the run as FAILED with a diagnosis. `"skip"` restores the weights before the step,
                `"rollback"` those of the last checkpoint; both go on, and stop after ten such steps in a row.
            log_models: Whether a `run()` ends by logging the `last` policy as a model, and the `best` if there is one.
            callbacks: Called with the trainer and each row, after it is tracked and before the conditions judge it. A
                callback may declare metrics, as a list of names in its attribute `metric_names`, and return their
                values, which are tracked and added to the row. `trainer.stop("why")` in a callback ends the run.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If an argument is not legal, or an environment to evaluate in does not fit.
        """
        check_algorithm(algorithm)
        refuse_torch_modes()
        # `isinstance` would read the protocol's properties, some of which look for the store.
        needed = [name for name in vars(Tracker) if name[0] != "_" and name not in _BEGUN]
        lacking = [name for name in needed if not (hasattr(type(tracker), name) or hasattr(tracker, name))]
        if tracker is not None and (lacking or isinstance(tracker, type)):
            lacks = f", without {', '.join(lacking)}" if lacking else ""
            raise TypeError(f"`tracker` must keep runs, as MLflowTracker(...) does; got {shown(tracker)}{lacks}.")
        self.algorithm: AlgorithmT = algorithm
        if ranks().size > 1:
            begin(algorithm)
        algorithm.plan_execution(math.inf)
        self.evaluations = Evaluations(algorithm, eval_env, num_eval_envs)
        self.callbacks: tuple[Callback, ...] = ()
        self.callbacks = checked_callbacks(callbacks, self.metric_names)
        if ranks().is_first:
            self.tracker = MLflowTracker() if tracker is None else tracker
            if log_models is True:
                check_models(algorithm.policy, self.tracker)
        else:
            self.tracker, checkpoints = NullTracker(), False
        self.checkpoints = CheckpointManager(checkpoints, self.tracker)
        written: Any = eval_env if isinstance(eval_env, bool | str | None) else unwritable(_GIVEN_ENV)
        saves = {} if self.checkpoints.options is None else self.checkpoints.options.to_plain()
        saves.pop("directory", None)  # a checkpoint's own path gives it
        options: Any = {"num_eval_envs": num_eval_envs, "on_non_finite": on_non_finite, "log_models": log_models}
        made = TrainerSpec(eval_env=written, checkpoints=saves, **options)
        self.record = Record(algorithm, self.tracker, self.checkpoints, made, self.evaluations)
        best = self.checkpoints.best_metric
        if best is not None and best not in self.metric_names:
            near = nearest_metrics(best, self.metric_names)
            raise ValueError(f"Checkpoints: `best` must be a metric of this trainer; got {best!r}.{near}")
        self.train_step = TrainStep(algorithm, self.record, on_non_finite)
        self.origin = Origin()
        self.stop_reason: str | None = None
        self.ending: list[str] = []

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `TypeError`, as a copy would continue the same run in the same folder."""
        raise TypeError(
            "a trainer drives one run, and can be neither copied nor pickled: copy.deepcopy(trainer.algorithm.policy) "
            "is what acts; trainer.save() and Trainer.resume(...) go on elsewhere."
        )

    @classmethod
    def from_spec(cls, spec: RunSpec, *, tracker: Tracker | None = None, callbacks: Sequence[Callback] = ()) -> Self:
        """Make the trainer of a run, and check that its parts fit together; its next `run()` takes the spec's options.

        Args:
            spec: The run, as `RunSpec.from_file` or `rl8x.tuned` returns it.
            tracker: Stores params and metrics; None makes the spec's tracker.
            callbacks: Called with the trainer and each row of statistics, see the class.

        Raises:
            TypeError: If `spec` is no `RunSpec`, or one of its values has a wrong type.
            ValueError: If one of its values is not legal, or its parts do not fit together.
        """
        if not isinstance(spec, RunSpec):
            raise TypeError(
                f"`spec` must be a RunSpec, as RunSpec.from_file('run.yaml') returns it; got {shown(spec)}."
            )
        options: Any = {name: getattr(spec.trainer, name) for name in TRAINER_OPTIONS}
        trainer = cls(
            spec.make_algorithm(),  # type: ignore[arg-type]
            tracker=spec.trainer.make_tracker() if tracker is None else tracker,
            checkpoints=spec.trainer.make_checkpoints(),
            callbacks=callbacks,
            **options,
        )
        trainer.record.spec, trainer.record.is_written, trainer.origin = spec, True, Origin(planned=spec.run)
        trainer.check_run()
        return trainer

    @classmethod
    def resume(
        cls,
        source: str | Path,
        *,
        auto: bool = False,
        algorithm: AlgorithmT | None = None,
        overrides: Mapping[str, Any] | None = None,
        tracker: Tracker | None = None,
        eval_env: EvalEnv | EllipsisType = ...,
        num_eval_envs: int | EllipsisType | None = ...,
        callbacks: Sequence[Callback] = (),
        checkpoints: CheckpointsLike | EllipsisType = ...,
        on_non_finite: OnNonFinite | EllipsisType = ...,
        log_models: bool | EllipsisType = ...,
        trust: bool = False,
    ) -> Self:
        """Make a trainer from a checkpoint; its next `run()` continues the saved run, to the same bits.

        Args:
            source: Path of a checkpoint or of a run's folder of checkpoints, or the run's name or ID in MLflow.
            auto: Take the run's newest good checkpoint if the requested one is damaged.
            algorithm: An algorithm built like the saved one; None builds it from the checkpoint, which needs an
                environment and a model that can be imported by name.
            overrides: Hyperparameters to change from now on; the tracked run records them.
            tracker: Stores params and metrics; None is the saved run's, if that was MLflow or a `NullTracker`. Any
                other tracker must be given.
            eval_env: The environment of `eval()`, see the class; `...` keeps the saved choice. Another environment
                resets the best value of evaluation metrics.
            num_eval_envs: Copies of a separate evaluation environment; `...` keeps their number.
            callbacks: Called with the trainer and each row of statistics, see the class.
            checkpoints: When and where the run is saved, see the class; `...` is as before, in the same folder.
            on_non_finite: What to do if numbers are not finite, see the class; `...` is as before.
            log_models: Whether the run ends by logging its policies as models; `...` is as before.
            trust: Whether to use a store that only the checkpoint names, and to import modules that it names, which
                runs their code; else only modules already imported, or of rl8x, torch and Gymnasium, are used.

        Raises:
            CheckpointError: If there is no such checkpoint or it cannot be used; the message names the newest good one.
        """
        made: Any = {"algorithm": algorithm, "tracker": tracker}
        chosen: Any = {"eval_env": eval_env, "num_eval_envs": num_eval_envs, "checkpoints": checkpoints}
        chosen |= {"on_non_finite": on_non_finite, "log_models": log_models}
        if not isinstance(overrides, Mapping | None):
            raise TypeError(
                f"`overrides` must be a mapping of hyperparameters, as {{'lr': 1e-4}}; got {shown(overrides)}."
            )
        given = {name: value for name, value in made.items() if value is not None}
        given |= {name: value for name, value in chosen.items() if value is not ...}
        checkpoint, origin, options = prepare(source, auto=auto, trust=trust, overrides=dict(overrides or {}), **given)
        trainer = cls(callbacks=callbacks, **options)
        own, saved = trainer.record.spec, checkpoint.spec
        changed = {name: getattr(own.trainer, name) for name in chosen.keys() & given.keys()}
        env = saved.env if algorithm is None else own.env
        trainer.record.spec = replace(saved, env=env, trainer=replace(saved.trainer, **changed), trust=trust)
        trainer.go_on_from(checkpoint, origin)
        return trainer

    # -- a run

    def run(
        self,
        *,
        env_config: AnyEnvConfig | EllipsisType | None = ...,
        eval_env_config: Mapping[str, Any] | EllipsisType | None = ...,
        steps_per_eval: int | EllipsisType | None = ...,
        evals_per_film: int | EllipsisType | None = ...,
        stop_conditions: StopConditions | Condition | EllipsisType | None = ...,
        max_steps: int | EllipsisType | None = ...,
        progress: Progress | EllipsisType = ...,
    ) -> TrainStats:
        """Step until a stop condition is met, with evaluations at regular intervals.

        After `resume()` the first `run()` continues the interrupted one, and after `from_spec()` it is the run of the
        spec: options that are `...` keep their saved or specified values. In any other `run()` they are None. After
        torchrun has restarted a job (`--max-restarts`), the run continues from the job's last checkpoint.

        A condition, `max_steps` or `stop()` ends the run. SIGINT, SIGTERM and SIGHUP end it after the current step, and
        it is saved as KILLED. A second SIGINT ends it at once. SIGUSR1 only saves.

        Args:
            env_config: Values for the environment's parameters, applied at each reset; None changes nothing. Or a
                function that returns them, called before each collect with the trainer's `known`; it is not saved, and
                must be given again to a resumed run.
            eval_env_config: The same for evaluations; a list has one value for each evaluation copy. None evaluates
                under the training's values; from a list of them it takes evenly spaced ones.
            steps_per_eval: Steps between evaluations, in the training environment a multiple of
                `horizons_per_env_reset`; None never evaluates.
            evals_per_film: Evaluations between films of an episode, artifacts `films/step-....gif`; None makes none.
            stop_conditions: The run stops when any of these is met. Without one it runs until interrupted.
            max_steps: The run stops after this many steps of this `run()`, including those before a resume of it; None
                sets no limit.
            progress: `"auto"`, the default (a bar on a terminal and in a notebook, lines elsewhere), `"bar"`, `"lines"`
                or `"none"`.

        Returns:
            The last row, with `stop_reason` set.

        Raises:
            TypeError: If a stop condition is not a condition, or an option has a wrong type.
            ValueError: If an option is not legal, before the first step.
            NonFiniteError: If numbers are not finite and `on_non_finite` is "stop".
            RuntimeError: If called within another `run()` of this trainer, in `torch.inference_mode()`, or in a process
                that was forked after the run began.
            CheckpointError: If another process is training the run, or has continued it.
            TrackingError: If the tracker cannot store runs.
            KeyboardInterrupt: After SIGINT, once the run is saved.
            SystemExit: `128 + n` after SIGTERM and SIGHUP, once the run is saved. Or a callback's own: the run is then
                FINISHED if its code is 0 or None, else KILLED.
        """
        if self.train_step.is_in_progress:
            raise RuntimeError("this trainer is in a run() already: one at a time, and not from its callbacks.")
        refuse_torch_modes()
        self.record.check_process()
        given = {
            "env_config": env_config,
            "eval_env_config": eval_env_config,
            "steps_per_eval": steps_per_eval,
            "evals_per_film": evals_per_film,
            "stop_conditions": stop_conditions,
            "max_steps": max_steps,
        }
        if not isinstance(progress, EllipsisType):
            check_progress(progress)
        self._go_on_after_restart()
        run = self._checked_run(given)
        check_alike("the start of the run", run.options.to_plain() | {"callbacks": run.callbacks})
        with self._taken():
            if ranks().first("whether the run is elsewhere", self.checkpoints.superseded):
                self._go_on_from_newest()
                run = self._checked_run(given)
            self._prepare(run, progress)
            with run.signals, self._tracked(run):
                stats = self._begin(run)
                while stats is None or stats.stop_reason is None:
                    if run.is_interrupted or (run.signals.stop is not None and ranks().size == 1):
                        self.record.save(self.state_dict(), run, "KILLED")
                        raise run.signals.exception()
                    if self.algorithm.execution.awaits(self.state[keys.STEPS]):
                        stats = self._await_programs(run)
                        if run.is_interrupted or stats.stop_reason is not None:
                            continue
                    if self.train_step.begin():
                        self._save_at_once(run)
                    row = self._make_row(run)
                    if run.evaluation_is_due:
                        row |= self.eval() | self.state
                    if run.film_is_due:
                        self._log_film()
                    stats = self.train_step.finish(row, self)
                    run.judge(stats, self.train_step.eval_row, self.train_step.take_stop())
                    run.reporter.update(stats, run.total_steps(self.state))
                    self._save_if_due(run, stats)
                self.stop_reason = stats.stop_reason
            return stats

    @contextlib.contextmanager
    def _taken(self) -> Iterator[None]:
        """Keep other processes from writing this run's checkpoints until exit."""
        self.checkpoints.take()  # before the tracked run begins, as another process may have the run
        try:
            self.train_step.take_stop()  # drop the reason of a run that failed
            self.train_step.in_run = True
            yield
        finally:
            self.train_step.in_run, self.train_step.open_row = False, None
            self.checkpoints.end()  # last, as a remaining lock marks a run that was killed before its end

    def _prepare(self, run: RunState, progress: Progress | EllipsisType) -> None:
        """Configure the trainer's parts for a run, before it begins."""
        algorithm = self.algorithm
        algorithm.plan_execution(run.most_steps)
        self._measure_anew(*self._measures_alike(run))
        self.evaluations.env_config = run.eval_env_config
        self.record.prepare(run)
        shown: Any = self.origin.planned.progress if isinstance(progress, EllipsisType) else progress
        shown = shown if ranks().is_first else "none"
        run.reporter = ProgressReporter(shown, run.total_steps(self.state), algorithm.clock)
        run.signals = SignalGuard(quiet=run.reporter.mode == "none")
        compiler().say = run.reporter.say  # for its messages while the run waits

    def _measures_alike(self, run: RunState) -> tuple[bool, bool]:
        """Return whether a run evaluates, and whether it trains, under the same configuration as before."""
        before, now = self.record.spec.run, run.options
        same = (before.env_config, before.eval_env_config) == (now.env_config, now.eval_env_config)
        if self.origin.saved is not None and same:  # a resumed run, even if a configuration is not in force yet
            return True, True
        return self.evaluations.are_alike(run.env_config, run.eval_env_config)

    def _measure_anew(self, evaluates_alike: bool, trains_alike: bool) -> None:
        """Forget the latest evaluation, and the best of metrics that are measured differently from here on."""
        if not evaluates_alike:
            self.train_step.forget_evaluation()
        self.record.measure_anew(evaluates_alike=evaluates_alike, trains_alike=trains_alike)

    def _begin(self, run: RunState) -> TrainStats | None:
        """Begin the tracked run and its checkpoints; return the last row if the run had already ended."""
        self.record.open()
        self.record.update_params()
        if run.last is None:  # else killed after its end was saved, before the tracked run knew
            self.stop_reason = None
            if self.checkpoints.begin() is not None:
                self.record.tag_checkpoints()
            if run.steps == 0 or ranks().first(
                "whether the run was resumed from an older checkpoint", bool(self.checkpoints.left)
            ):
                # Save before the first tracked row, so that the newest checkpoint always belongs to this course.
                self._save_at_once(run)
        self.origin = Origin()  # last, so that a run that could not begin can be tried again
        return run.last

    def _make_row(self, run: RunState) -> dict[str, float]:
        """Make a step, and return its row; count the step even if non-finite numbers raise."""
        before = self.state[keys.STEPS]
        try:
            return self.train_step.make_row(run.env_config)
        finally:
            run.steps += self.state[keys.STEPS] - before

    def _await_programs(self, run: RunState) -> TrainStats:
        """Save a checkpoint and wait for the compiler; return the latest row, whose `stop_reason` may end the run."""
        execution, stats = self.algorithm.execution, TrainStats(self.train_step.row)
        self.algorithm.prepare()
        missing = max(ranks().share("programs that are missing", compiler().num_missing()))
        if missing:
            self._save_at_once(run)
            run.reporter.say(
                f"step {execution.starts_at + 1} waits for {counted(missing, 'program')} of the compiler; "
                "later runs like this one find them in the cache"
            )
        while missing and not run.is_interrupted and stats.stop_reason is None:
            missing = max(ranks().share("programs that are missing", compiler().num_missing(_SECONDS_PER_LOOK)))
            run.end_by(stats, [*run.overdue(stats), *filter(None, [self.train_step.take_stop()])])
            self._save(run, stats)
        return stats

    @contextlib.contextmanager
    def _tracked(self, run: RunState) -> Iterator[None]:
        """End the tracked run with the right status, whatever happens, and report how to continue it."""
        status: Status = "FINISHED"
        try:
            yield
        except BaseException as error:
            status = status_of(error)
            if status == "FAILED":
                self.stop_reason = hide(described(error))
                if self.record.is_open and not self.record.is_elsewhere:
                    self.tracker.log_text(hide(traceback.format_exc()), "traceback.txt")
            elif run.signals.stop is None:
                self.stop_reason = interruption(error)
            else:
                status, self.stop_reason = "KILLED", f"interrupted by {run.signals.stop.name}"
            raise
        finally:
            run.reporter.close()
            if not self.record.is_elsewhere:
                self._end(run, status)
        if run.signals.stop is not None:
            raise run.signals.exception()

    def _end(self, run: RunState, status: Status) -> None:
        """End the tracked run, and report how to continue it."""
        try:
            with run.reporter.waiting(f"writing the last of the run to {self.tracker.location} ..."):
                self.checkpoints.wait()
                if status != "FAILED" and self.record.spec.trainer.log_models:
                    self._log_models()
                self.record.close(status, self.stop_reason, self.train_step.eval_row)
        finally:
            # If the run failed before its first step, the error alone is reported.
            if status != "FAILED" or run.has_stepped:
                verb, why = "failed" if status == "FAILED" else "stopped", " ".join(str(self.stop_reason).split())
                self.ending = self.record.report(status)
                for line in (f"{verb} after {self.record.steps_made}: {why:.300}", *self.ending):
                    run.reporter.say(line)

    def _save_at_once(self, run: RunState) -> None:
        """Write a checkpoint, and wait until it is on the disk."""
        self.record.save(self.state_dict(), run)
        self.checkpoints.wait()

    def _save_if_due(self, run: RunState, stats: TrainStats) -> None:
        """Save after a step if that is due, asked for, or its row is the best."""
        steps = self.state[keys.STEPS]
        # Metrics that a condition measured, such as `Confirmed`, count for the best.
        is_best = self.checkpoints.improved(stats, stats.fresh - stats.before_step, steps)
        saves = is_best or run.asked_to_save or self.checkpoints.due(steps)
        run.asked_to_save = False
        self._save(run, stats, saves=saves, is_best=is_best)

    def _save(self, run: RunState, stats: TrainStats, saves: bool = False, is_best: bool = False) -> None:
        """Agree with the other ranks on how to go on; save if one of them or a signal asks for it, or the run ends."""
        run.is_interrupted, saves, asked = agree(stats, run.signals, saves)
        if stats.stop_reason is not None:
            run.last = stats
            self.record.save(self.state_dict(), run, "FINISHED", is_best=is_best)
        elif saves or asked:
            self.record.save(self.state_dict(), run, is_best=is_best)
            if asked:
                path = self.checkpoints.wait()
                run.reporter.say("nothing saved: checkpoints are off" if path is None else f"saved {shown_path(path)}")

    def stop(self, why: str) -> None:
        """End the `run()` in progress after its current step: it is saved, and FINISHED for this reason.

        Callbacks, signal handlers and other threads may call it; with several ranks one call is enough. In a loop over
        `step()` a callback may call it: the row gets the reason as `stop_reason`, and `for stats in trainer` ends.

        Args:
            why: The reason, in words; after several calls the first counts.

        Raises:
            ValueError: If the reason is no text, or empty.
            RuntimeError: If no run and no callback is in progress.
        """
        if not isinstance(why, str) or not why.strip():
            raise ValueError(f"`why` must be a text, as in trainer.stop('the budget is spent'); got {shown(why)}.")
        if not self.train_step.is_in_progress:
            raise RuntimeError(
                "trainer.stop() ends a run() in progress, and there is none: call it in a callback, a signal handler "
                "or another thread. A loop over step() ends by `break`."
            )
        if self.train_step.asked_to_stop is None:
            self.train_step.asked_to_stop = hide(" ".join(why.split()))

    def plan(self, spec: RunSpec) -> None:
        """Make a spec the run's description, and its run options the defaults of the next `run()`.

        Args:
            spec: The spec, which describes this trainer's parts too.
        """
        self.origin = replace(self.origin, planned=spec.run)
        self.record.spec = replace(spec, trust=spec.trust or self.record.spec.trust)

    def check_run(self, **options: Any) -> None:
        """Raise the errors that `run()` would raise before its first step; `options` are its own, except `progress`."""
        check_names_in(options, RUN_OPTIONS, "`run()`")
        self._checked_run(options)

    def _checked_run(self, options: Mapping[str, Any]) -> RunState:
        """Check the given options, and return the run that they and the planned options describe."""
        given = {name: value for name, value in options.items() if value is not ...}
        planned, saved = self.origin.planned, self.origin.saved
        names = list(map(callback_name, self.callbacks))
        run = RunState(given, planned, saved, trust=self.record.spec.trust, callbacks=names)
        steps = 0 if saved is None else saved["steps"]
        self.evaluations.check_run(run.options.steps_per_eval, run.eval_env_config, steps=steps)
        configs = self.evaluations.checked_configs(run.env_config, run.eval_env_config, self.known)
        if run.options.evals_per_film is not None:
            self._film_env(1).close()  # raises before the first step if it cannot be filmed
        env, config = self.algorithm.env, self.algorithm.config
        collected = 0 if env is None else env.num_envs * config.horizon * ranks().size
        bounded = {self.algorithm.clock: 0, keys.ENV_STEPS: collected}
        # Without an environment these stay 0, and a condition on them would never end a run.
        known = self.metric_names - ({keys.ENV_STEPS, keys.ENV_EPISODES} if env is None else set())
        run.start(self, configs, known=known, measured=declared_by(self.callbacks), bounded=bounded)
        trained = self.evaluations.next_config if configs["env_config"] is None else configs["env_config"]
        followed = {} if env is None or callable(trained) else followed_in(trained)
        evaluates_alike, _ = self._measures_alike(run)
        run.check_followed(followed, self.metric_names, self.train_step.eval_row if evaluates_alike else {})
        if isinstance(self.tracker, MLflowTracker) and not self.record.is_open:
            self.tracker.check()
        if self.checkpoints.check():
            run.state_dict()  # raises if a condition cannot be saved
            run.warn_of_no_best(self.checkpoints.best_metric)
        return run

    # -- one step, one evaluation

    def step(self, *, env_config: AnyEnvConfig | None = None) -> TrainStats:
        """Collect experience and update the policy once; track the row of metrics.

        Args:
            env_config: Values for the environment's parameters, applied if a reset is due; None keeps the training's
                values, even after an evaluation with others. Or a function of the trainer's `known`.

        Returns:
            The row, with the metrics of the latest evaluation; an `eval()` before the next step updates them.

        Raises:
            ValueError: If the `env_config` is not legal, or would never apply.
            NonFiniteError: If numbers are not finite and `on_non_finite` is "stop".
            RuntimeError: If called within a `run()` of this trainer or in a callback, in `torch.inference_mode()`, or
                in a process that was forked after the run began.
        """
        if self.train_step.is_in_progress:
            raise RuntimeError("a step of this trainer is in progress: a callback cannot make another one.")
        refuse_torch_modes()
        self.record.check_process()
        train_step, self.record.plan = self.train_step, None
        train_step.take_stop()  # drop the reason of a step that failed
        try:
            train_step.begin()
            stats = train_step.finish(train_step.make_row(env_config), self)
        except SystemExit as error:  # raised by a callback; one raised in the caller's loop is not seen here
            self.record.close(status_of(error), interruption(error), train_step.eval_row)
            raise
        asked = ranks().share("whether a callback ends the loop", train_step.take_stop())
        self.stop_reason = stats.stop_reason = next(filter(None, asked), None)
        return stats

    def __iter__(self) -> Iterator[TrainStats]:
        """Yield the row of one `step()` after another, until `stop()` is called."""
        stats = None
        while stats is None or stats.stop_reason is None:
            try:
                stats = self.step()
            except KeyboardInterrupt:
                self.record.close("KILLED", "interrupted", self.train_step.eval_row)
                raise
            yield stats

    def eval(
        self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True, name: str | None = None
    ) -> EvalStats:
        """Evaluate the current policy and track the metrics under `eval/`.

        The metrics are added to the last row of `step()`, as fresh ones; before the first step to the next row.

        Args:
            env_config: Values for the environment's parameters in this evaluation; None takes the run's
                `eval_env_config`, or else the training's values.
            deterministic: Whether the policy takes its most likely action, as in a run's own evaluations, rather than a
                sample.
            name: With a name the metrics are `eval/<name>/...`, and never replace the run's own. None: they are
                `eval/...`; with another `env_config` than the run's, or with samples, they are tracked under a name
                derived from it, such as `eval/gravity 50/...` or `eval/sampled/...`.

        Raises:
            RuntimeError: If the training environment is used and is not at a reset, if there is no environment, in
                `torch.inference_mode()`, or in a process that was forked after the run began.
            ValueError: If `env_config` could not be applied, or the name is not legal in MLflow or is taken.
        """
        refuse_torch_modes()
        self.record.check_process()
        if not isinstance(own_values(deterministic), bool):
            raise TypeError(f"`deterministic` must be True or False; got {shown(deterministic)}.")
        if name is not None:
            check_evaluation_name(name)
        tracked_name = self.evaluations.made_name(env_config, deterministic=deterministic) if name is None else name
        with Timer(self.algorithm.device) as timer:
            stats = self.evaluations.measure(env_config, deterministic=deterministic)
        spent = {"profiling/eval_ms": timer.elapsed_ms}
        groups = ("" if group is None else f"{group}/" for group in (name, tracked_name))
        own, tracked = ({f"{keys.EVAL_PREFIX}{group}{key}": stats[key] for key in stats} for group in groups)
        self.train_step.take_evaluation(own, tracked | spent, is_of_run=tracked_name is None)
        return EvalStats(own | spent)

    def evaluate_now(self) -> Mapping[str, float] | None:
        """Evaluate for `Confirmed`, and return the metrics; None if no evaluation can be made at this step."""
        return self.eval() if self.evaluations.is_their_turn else None

    @property
    def state(self) -> TrainerState:
        """The counters as they are now, by metric name: collects, steps, updates, environment steps and episodes."""
        return dict(self.algorithm.counters)

    @property
    def known(self) -> dict[str, float]:
        """The input of an `env_config` function: metrics of the latest row and evaluation, and the counters."""
        return self.train_step.known

    @property
    def metric_names(self) -> frozenset[str]:
        """Every metric that a row of this trainer may have."""
        env, names = self.algorithm.env, {*keys.TRAINER_METRICS}
        if env is None:
            names -= _COLLECTED
        else:
            names |= {*keys.info_metrics(env.metric_names), *keys.parameter_metrics(env.parameters)}
            names |= set() if env.team is None else {keys.COPY_STEPS, *keys.agent_metrics(env.team.names)}
        evaluated = {keys.EVAL_PREFIX + name for name in self.evaluations.measured}
        return frozenset(names | {*self.algorithm.metrics} | evaluated | declared_by(self.callbacks))

    def evaluation_name(self, name: str) -> str | None:
        """Return the evaluation metric that corresponds to a metric of training rows; None if there is none.

        Args:
            name: The metric of a training row.
        """
        return self.evaluations.name_of(name)

    @property
    def params(self) -> dict[str, Any]:
        """The params of the run: hyperparameters, physics, run options, versions and the machine."""
        return self.record.params

    def save(self) -> Path | None:
        """Write a checkpoint and wait until it is on disk, for loops over `step()`; `run()` saves by itself.

        Within a `run()`, as in a callback, it is written after the conditions have judged the current step.

        Returns:
            The checkpoint's folder; None if the trainer has no checkpoints, if writing failed, and within a `run()`.
        """
        if self.train_step.in_run:
            assert self.record.run is not None
            self.record.run.asked_to_save = True
            return None
        self.record.open(trains=False)
        self.checkpoints.begin()
        self.record.save(self.state_dict(), None)
        return self.checkpoints.end()

    def close(self) -> None:
        """End the tracked run after a loop over `step()`; `run()` ends its own, and a `RuntimeError` says so there."""
        if self.train_step.in_run:
            raise RuntimeError("trainer.close() ends no run() in progress: trainer.stop('why') does.")
        self.record.close("FINISHED", self.stop_reason, self.train_step.eval_row)

    # -- its state, and resuming from a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next step depends on."""
        return {
            "algorithm": self.algorithm.state_dict(),
            "evaluations": self.evaluations.state_dict(),
            **self.train_step.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: A state that `state_dict` returned.
        """
        self.algorithm.load_state_dict(state["algorithm"])
        self.evaluations.load_state_dict(state["evaluations"])
        self.train_step.load_state_dict(state)

    def go_on_from(self, checkpoint: Checkpoint, origin: Origin) -> None:
        """Restore a checkpoint, with its folder and its tracked run; the next `run()` continues its run.

        Args:
            checkpoint: The checkpoint, which must fit this trainer.
            origin: How it was found.
        """
        algorithm, saved_in = self.algorithm, checkpoint.metadata
        # Ranks with separate disks may have found different checkpoints, and would continue with different weights.
        found = {"the run": saved_in["run"]["key"], "the checkpoint": checkpoint.path.name}
        check_alike("the checkpoint to go on from", found)
        saved_spec, own_spec = checkpoint.spec.trainer, self.record.spec.trainer
        before, now = ("auto" if each.eval_env is True else each.eval_env or False for each in (saved_spec, own_spec))
        same_copies = before == now and saved_spec.num_eval_envs == own_spec.num_eval_envs
        try:
            state = checked_state(checkpoint.state)
            self._load_rank(checkpoint.state, evaluates=same_copies)
            if origin.overrides.keys() & {"lr", "lr_schedule"}:
                algorithm.set_lr(None)
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            reason, given = " ".join(described(error).split()), ", ".join(map(repr, origin.overrides))
            advice = f". Leave out of `overrides` what made it so ({given}), or begin a new run" if given else ""
            raise CheckpointError(
                f"the checkpoint {checkpoint.path} does not fit this trainer: {reason[:300].rstrip('.')}{advice}"
            ) from error
        algorithm.seed = saved_in["resolved"]["config"].get("seed", algorithm.seed)
        saved = state["run"]
        self.origin = replace(origin, saved=saved, planned=RunOptions() if saved is None else checkpoint.spec.run)
        self.record.spec = replace(self.record.spec, run=self.origin.planned)
        evaluated_under = self.origin.planned.eval_env_config and parsed(self.origin.planned.eval_env_config)
        self.evaluations.env_config = evaluated_under
        self.record.resume(checkpoint, origin, state["results"], evaluated_under)
        self._measure_anew(before == now or bool([*unwritable_in(before)]), True)  # an unwritable one is assumed equal

    def _load_rank(self, state: Mapping[str, Any], *, evaluates: bool) -> None:
        """Restore this rank's state, or rank 0's learned one; that of evaluations only if they have the same copies."""
        saved, others = {name: state[name] for name in ("trainer", "torch_generators")}, state.get(RANKS) or {}
        warn_of_other_number(num_ranks(state), self.algorithm)
        if ranks().rank < num_ranks(state):
            own = of_rank(saved, others, ranks().rank)
            if num_ranks(state) != ranks().size or not evaluates:  # other copies, or other shares of them
                own = {**own, "trainer": {**own["trainer"], "evaluations": None}}
            self.load_state_dict(with_generators_of(self.algorithm.device, own["trainer"], own["torch_generators"]))
            set_torch_generators(own["torch_generators"], self.algorithm.device)
            return
        self.algorithm.join(saved["trainer"]["algorithm"])
        self.train_step.load_state_dict(saved["trainer"])

    def _go_on_after_restart(self) -> None:
        """Restore the last checkpoint of the same job after torchrun has restarted it, if there is one."""
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
        if not restarted or self.origin.steps is not None or self.algorithm.counters[keys.STEPS] > 0:
            return
        resolved, root = self.record.resolved, self.checkpoints.root
        own = unfinished(self.algorithm, resolved, root) if ranks().is_first else None
        folder = ranks().first("the run to go on with", None if own is None else str(own))
        if folder is not None:
            self.go_on_from(*newest(Path(folder), self.algorithm, Origin(auto=True)))

    def _go_on_from_newest(self) -> None:
        """Restore the newest checkpoint, which another process wrote after this trainer resumed an older one."""
        own, origin = self.checkpoints.directory, self.origin
        folder = ranks().first("the run's folder", None if own is None else str(own))
        if folder is None or origin.named or self.algorithm.counters[keys.STEPS] != origin.steps:
            raise self.checkpoints.superseded_error()
        self.go_on_from(*newest(Path(folder), self.algorithm, origin))


class Trainer(GenericTrainerBase[GenericAlgorithmBase[Any]]):
    """Trains any algorithm: collects, updates, evaluates, tracks, saves, and stops on a condition.

        from rl8x import HitsUpperBound, PPOConfig, Trainer
        from rl8x.envs import CartPole

        config = PPOConfig()
        trainer = Trainer(config.build(CartPole), num_eval_envs=16)
        trainer.run(steps_per_eval=5, stop_conditions=[HitsUpperBound("eval/returns/mean", 475)])

    `run` is a loop over `step` and `eval`; `for stats in trainer` writes your own.

    Attributes:
        algorithm: The algorithm that is trained, with its policy and its environment.
        tracker: Stores params and metrics.
        checkpoints: The manager of its checkpoints.
        stop_reason: Why the last `run()` stopped, or the loop; None before that.
        ending: Lines for the user: where that run is stored, which rows have not arrived, and how to continue it.
    """

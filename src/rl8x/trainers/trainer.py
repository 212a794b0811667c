"""The trainer: collects, learns, evaluates, tracks and saves until a condition stops it, with any algorithm."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Final, Self

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import check_names_in
from rl8x.checkpoint import CheckpointError, read
from rl8x.conditions import Condition
from rl8x.config.spec import RunOptions, RunSpec
from rl8x.distributed import ranks
from rl8x.envs import Env
from rl8x.envs.env_config import AnyEnvConfig, followed_in
from rl8x.output import counted, described
from rl8x.tracking import MLflowTracker, Tracker
from rl8x.tracking.protocol import Status, status_of
from rl8x.tracking.runs import shown_path
from rl8x.tracking.secrets import hide, logger
from rl8x.trainers.artifacts import (
    BEST,
    LAST,
    about_policy,
    check_models,
    film_policy,
    log_film,
    log_policy,
    make_film_env,
    model_metrics,
    policy_at,
)
from rl8x.trainers.base import AlgorithmT, TrainerBase
from rl8x.trainers.callbacks import Callback, callback_name, declared_by
from rl8x.trainers.evaluation import check_evaluation_name
from rl8x.trainers.grid import grid_metrics, log_grid, measure_grid
from rl8x.trainers.plotting import plot_run
from rl8x.trainers.progress import Progress, ProgressReporter
from rl8x.trainers.ranks import agree, check_alike
from rl8x.trainers.resume import TRAINER_OPTIONS
from rl8x.trainers.run_state import RUN_OPTIONS, RunState, StopConditions
from rl8x.trainers.signals import SignalGuard, interruption
from rl8x.trainers.statistics import TrainStats
from rl8x.video import Film

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_log = logger(__name__)
# Between two looks at signals and clocks while programs are waited for.
_SECONDS_PER_LOOK: Final = 0.2


class GenericTrainerBase(TrainerBase[AlgorithmT]):
    """Trains an algorithm with `step()`, `eval()`, and `run()`, which stops on a condition; see `TrainerBase`.

    The progress of a run is kept in its `RunState`. Of the attributes, `run()` sets `stop_reason` and `ending`, and
    clears `origin`, `planned` and `saved_run` once the run has begun.
    """

    @classmethod
    def from_spec(cls, spec: RunSpec, *, tracker: Tracker | None = None, callbacks: Sequence[Callback] = ()) -> Self:
        """Make the trainer of a run, and check that all of it fits together; its next `run()` is the one described.

        Args:
            spec: The run, as `RunSpec.from_file` or `rl8x.tuned` returns it.
            tracker: Stores params and metrics; None makes the one of the spec.
            callbacks: Called with the trainer and each row of statistics, see the class.

        Raises:
            TypeError: If something is of another kind.
            ValueError: If something does not fit.
        """
        options: Any = {name: getattr(spec.trainer, name) for name in TRAINER_OPTIONS}
        trainer = cls(
            spec.make_algorithm(),  # type: ignore[arg-type]
            tracker=spec.trainer.make_tracker() if tracker is None else tracker,
            checkpoints=spec.trainer.make_checkpoints(),
            callbacks=callbacks,
            **options,
        )
        trainer.record.spec, trainer.planned, trainer.record.is_written = spec, spec.run, True
        trainer.check_run()
        return trainer

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

        After `resume()`, the first `run()` continues the interrupted one, and after `from_spec()` it is the one that is
        described: options that are not given, or are `...`, keep their values. Otherwise they are None.

        After torchrun has restarted a job (`--max-restarts`), the run continues from the job's last checkpoint.

        A condition ends it, `max_steps`, or `stop()`. SIGINT, SIGTERM and SIGHUP end it after the current step: the run
        is saved, its status becomes KILLED, and KeyboardInterrupt or SystemExit(128 + n) is raised. A second SIGINT
        ends it at once. SIGUSR1 only saves.

        Args:
            env_config: Values for the environment's parameters, applied at each reset; None changes nothing. Or a
                function that returns such values: it is called before each collect with the trainer's `known`, counters
                and latest metrics by name, and each copy's next episode is played under the values. A function is not
                saved, and must be given again after a resume.
            eval_env_config: The same for evaluations; a list has one value for each evaluation copy. None evaluates
                under the training's values; from a list of them, evaluations with another number of copies take evenly
                spaced ones.
            steps_per_eval: Steps between evaluations; None never evaluates. If evaluations use the training
                environment, it must be a multiple of `horizons_per_env_reset`.
            evals_per_film: Evaluations between films. A film shows an episode under the evaluation's `env_config`, and
                is kept as the artifact `films/step-....gif`; None makes no films.
            stop_conditions: The run stops when any of these is met. Without one it runs until interrupted.
            max_steps: The run stops after this many steps of this `run()`, including those before a resume of it; None
                sets no limit.
            progress: `"auto"`, the default (a bar on a terminal and in a notebook, lines elsewhere), `"bar"`, `"lines"`
                or `"none"`.

        Returns:
            The last row, with `stop_reason` set.

        Raises:
            TypeError: If a stop condition is not a condition.
            ValueError: If an option is not legal, before the first step.
            NonFiniteError: If numbers are not finite and `on_non_finite` is "stop".
            RuntimeError: If called within another `run()` of this trainer, in `torch.inference_mode()`, or in a process
                that was forked after the run began.
            CheckpointError: If another process is training the run, or has continued it.
            TrackingError: If the tracker cannot store runs.
            KeyboardInterrupt: After SIGINT, once the run is saved.
            SystemExit: After SIGTERM and SIGHUP, once the run is saved. A callback's own makes the status FINISHED by
                code 0 or None, else KILLED.
        """
        if self.train_step.is_in_progress:
            raise RuntimeError("this trainer is in a run() already: one at a time, and not from its callbacks.")
        self._check_place()
        options = {
            "env_config": env_config,
            "eval_env_config": eval_env_config,
            "steps_per_eval": steps_per_eval,
            "evals_per_film": evals_per_film,
            "stop_conditions": stop_conditions,
            "max_steps": max_steps,
        }
        self.go_on_after_restart()
        run = self._checked_run(options)
        check_alike("the start of the run", {**run.params, **run.plain})
        self.checkpoints.take()  # before the tracker hears of a run that another process may have
        try:
            self.train_step.take_stop()  # of a run that failed
            self.train_step.in_run = True
            if ranks().first("whether the run is elsewhere", self.checkpoints.outrun):
                self.go_on_from_newest()
                run = self._checked_run(options)
            reporter = self._prepare(run, progress)
            with SignalGuard(quiet=reporter.mode == "none") as signals:
                with self._tracked(run, reporter, signals):
                    stats, stop = self._begin(run), None
                    # Only now: what could not begin can be tried again.
                    self.origin, self.saved_run, self.planned = None, None, RunOptions()
                    while stats is None or stats.stop_reason is None:
                        if stop is not None or (signals.stop is not None and ranks().size == 1):
                            self.record.save(self.state_dict(), run, "KILLED")
                            raise signals.exception()
                        if self.algorithm.execution.awaits(self.algorithm.counters[keys.STEPS]):
                            stats, stop = self._await_programs(run, signals, reporter)
                            if stop is not None or stats.stop_reason is not None:
                                continue
                        self._begin_step(run)
                        row = self.train_step.make_row(run.options["env_config"])
                        run.steps += 1
                        self._evaluate_where_due(run, row)
                        stats = self.train_step.finish(row, self)
                        self._judge(run, stats)
                        reporter.update(stats, run.total_steps(self.state))
                        stop = self._save_where_due(run, stats, signals, reporter)
                    self.stop_reason = stats.stop_reason
                if signals.stop is not None:
                    raise signals.exception()
            return stats
        finally:
            self.train_step.in_run = False
            self.checkpoints.end()  # only now: a lock that was left marks a run that was killed before its end

    def stop(self, why: str) -> None:
        """End the `run()` in progress after its current step: it is saved, and FINISHED for this reason.

        Callbacks, signal handlers and other threads may call it; of several ranks one is enough. In a loop over
        `step()` a callback may: the row gets the reason as its `stop_reason`, and `for stats in trainer` ends with it.

        Args:
            why: The reason, in the words that the run shows; of several the first counts.

        Raises:
            TypeError: If the reason is no text.
            ValueError: If it is empty.
            RuntimeError: If nothing is in progress that could end.
        """
        if not isinstance(why, str):
            raise TypeError(f"`why` must be a text, as in trainer.stop('the budget is spent'); got {why!r}.")
        if not why.strip():
            raise ValueError(
                f"`why` must say why the run ends, as in trainer.stop('the budget is spent'); got {why!r}."
            )
        if not self.train_step.is_in_progress:
            raise RuntimeError(
                "trainer.stop() ends a run() in progress, and there is none: call it in a callback, a signal handler "
                "or another thread. A loop over step() ends by `break`."
            )
        if self.train_step.asked_to_stop is None:
            self.train_step.asked_to_stop = hide(" ".join(why.split()))

    def _prepare(self, run: RunState, progress: Progress | EllipsisType) -> ProgressReporter:
        """Configure the trainer's parts for a run, before it begins; return its progress reporter."""
        algorithm = self.algorithm
        config = algorithm.config
        collected = 0 if algorithm.env is None else config.num_envs * config.horizon * ranks().size
        run.begin(algorithm.counters, {algorithm.clock: 0, keys.ENV_STEPS: collected})
        algorithm.plan_execution(run.most_steps)
        self.evaluations.env_config = run.options["eval_env_config"]
        self.record.prepare(run, callbacks=bool(self.callbacks))
        shown: Any = self.planned.progress if isinstance(progress, EllipsisType) else progress
        shown = shown if ranks().is_first else "none"
        reporter = ProgressReporter(shown, run.total_steps(self.state), algorithm.clock)
        algorithm.execution.announce(reporter.say)
        return reporter

    def _begin(self, run: RunState) -> TrainStats | None:
        """Begin the tracked run and its checkpoints; return the last row if the run had already ended."""
        self.record.open()
        self.record.update_params()
        if run.last is not None:  # killed after its end was saved, before the tracked run knew
            return run.last
        self.stop_reason = None
        if self.checkpoints.begin() is not None:
            self.record.tag_checkpoints()
        if run.steps == 0:
            # A checkpoint before the first tracked row: the run can be resumed whenever it is killed.
            self.record.save(self.state_dict(), run)
            self.checkpoints.wait()
        return None

    def _await_programs(
        self, run: RunState, signals: SignalGuard, reporter: ProgressReporter
    ) -> tuple[TrainStats, signal.Signals | None]:
        """Wait until the programs that the next step needs are compiled, after a checkpoint.

        Returns:
            The latest row, with a stop reason if the run ends meanwhile, and the signal that asks it to end.
        """
        execution, stats, stop = self.algorithm.execution, TrainStats(self.train_step.row), None
        self.algorithm.prepare()
        missing = max(ranks().share("programs that are missing", execution.missing()))
        if missing:
            self.record.save(self.state_dict(), run)
            self.checkpoints.wait()
            reporter.say(
                f"step {execution.starts_at + 1} waits for {counted(missing, 'program', 'programs')} of the compiler; "
                "later runs like this one find them in the cache"
            )
        while missing and stop is None and stats.stop_reason is None:
            missing = max(ranks().share("programs that are missing", execution.missing(_SECONDS_PER_LOOK)))
            run.end_by(stats, [*run.overdue(stats), *filter(None, [self.train_step.take_stop()])])
            stop = self._save(run, stats, signals, reporter)
        return stats, stop

    def _begin_step(self, run: RunState) -> None:
        """Switch to compiled programs if this is the step for it; a checkpoint has one that was not planned."""
        execution = self.algorithm.execution
        planned = execution.waits
        self.train_step.begin()
        if execution.waits and not planned:
            self.record.save(self.state_dict(), run)
            self.checkpoints.wait()

    def _evaluate_where_due(self, run: RunState, row: dict[str, float]) -> None:
        """Evaluate and film if due after this step, and add what was measured to the row."""
        if run.evaluation_is_due:
            row |= self.eval() | self.state
        if run.film_is_due:
            log_film(self.tracker, self.play(), self.state)

    def _judge(self, run: RunState, stats: TrainStats) -> None:
        """Ask the conditions. What a condition measures, as `Confirmed` does, joins the row and counts for the best."""
        self.train_step.open_row = stats
        run.judge(stats, self.train_step.eval_row, self.train_step.take_stop())
        self.train_step.open_row = None

    @contextlib.contextmanager
    def _tracked(self, run: RunState, reporter: ProgressReporter, signals: SignalGuard) -> Iterator[None]:
        """End the tracked run with the right status, whatever happens, and report how to continue it."""
        status: Status = "FINISHED"
        try:
            yield
        except BaseException as error:
            status = status_of(error)
            if status == "FAILED":
                self.stop_reason = hide(described(error))
                self.record.log_failure(traceback.format_exc())
            elif signals.stop is None:
                self.stop_reason = interruption(error)
            else:
                status, self.stop_reason = "KILLED", f"interrupted by {signals.stop.name}"
            raise
        finally:
            reporter.close()
            if not self.record.is_elsewhere:
                self._end(run, status, reporter)

    def _end(self, run: RunState, status: Status, reporter: ProgressReporter) -> None:
        """End the tracked run, and report how to continue it."""
        try:
            with reporter.waiting(f"writing the last of the run to {self.tracker.location} ..."):
                self.checkpoints.wait()
                if status != "FAILED" and self.options.log_models:
                    self._log_models()
                self.record.close(status, self.stop_reason, self.train_step.eval_row)
        finally:
            # If the run failed before its first step, the error alone is reported.
            if status != "FAILED" or run.has_stepped:
                self.ending = self.record.report(status, self.stop_reason, reporter.say)

    def _save_where_due(
        self, run: RunState, stats: TrainStats, signals: SignalGuard, reporter: ProgressReporter
    ) -> signal.Signals | None:
        """Save if due; return the signal that asks the run to end, the same on all ranks."""
        steps = self.algorithm.counters[keys.STEPS]
        is_best = self.checkpoints.improved(stats, stats.fresh - stats.earlier, steps)
        asked, run.asked_to_save = run.asked_to_save, False
        return self._save(run, stats, signals, reporter, is_best or asked or self.checkpoints.due(steps), is_best)

    def _save(
        self,
        run: RunState,
        stats: TrainStats,
        signals: SignalGuard,
        reporter: ProgressReporter,
        saves: bool = False,
        is_best: bool = False,
    ) -> signal.Signals | None:
        """Agree with the other ranks on how to go on, and save if one wants it or the run ends."""
        stop, saves = agree(stats, signals, saves)
        if stats.stop_reason is not None:
            run.last = stats
            self.record.save(self.state_dict(), run, "FINISHED", is_best=is_best)
        elif saves or signals.save:
            self.record.save(self.state_dict(), run, is_best=is_best)
            if signals.save:
                signals.save = False
                path = self.checkpoints.wait()
                reporter.say(
                    "nothing saved: this run has no checkpoints" if path is None else f"saved {shown_path(path)}"
                )
        return stop

    def _log_models(self) -> None:
        """Log the last policy, and the best if there is a `best_metric`; warn if one cannot be logged."""
        path = self.checkpoints.best_path
        try:
            self.log_model(LAST)
            if path is not None:
                best = read(path)
                log_policy(self.tracker, policy_at(best, self.algorithm.policy), name=BEST, **about_policy(best))
        except (CheckpointError, OSError) as error:
            _log.warning("rl8x: not all policies are logged as models: %s", error)

    def check_run(self, **options: Any) -> None:
        """Raise what `run()` would raise before its first step, without running.

        Args:
            options: Those of `run()` except `progress`.

        Raises:
            ValueError: If an option is unknown or not legal.
        """
        check_names_in(options, RUN_OPTIONS, "`run()`")
        self._checked_run(dict.fromkeys(RUN_OPTIONS, ...) | options)

    def _checked_run(self, options: Mapping[str, Any]) -> RunState:
        """Check all options; return the run that they describe."""
        saved = self.saved_run
        names = list(map(callback_name, self.callbacks))
        run = RunState(options, self.planned, saved, trust=self.record.spec.trusted, callbacks=names)
        env_config, eval_config = run.options["env_config"], run.options["eval_env_config"]
        steps = 0 if saved is None else int(saved["steps"])
        self.evaluations.check_run(run.options["steps_per_eval"], eval_config, steps=steps)
        configs = self.evaluations.checked_configs(env_config, eval_config, self.known)
        if run.options["evals_per_film"] is not None:
            self.make_film_env(1).close()  # raises before the first step if it cannot be filmed
        run.start(self, configs, known=self.metric_names, measured=declared_by(self.callbacks))
        env, calls_back = self.algorithm.env, bool(self.callbacks)
        trained = configs["env_config"] or ({} if env is None else env.parameter_state.following.given)
        followed = {} if callable(trained) else followed_in(trained)
        run.check_followed(followed, self.metric_names, self.train_step.eval_row, calls_back=calls_back)
        if isinstance(self.tracker, MLflowTracker) and not self.record.is_open:
            self.tracker.check()
        if self.checkpoints.check():
            run.state_dict()  # raises where a condition cannot be saved
            run.check_best(self.checkpoints.best_metric, calls_back=calls_back)
        return run

    def play(
        self,
        path: str | Path | None = None,
        *,
        copies: int | None = None,
        env_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Film:
        """Film the current policy in a separate environment; notebooks display the returned film.

        Args:
            path: A file to write the film to, in the format of its suffix; None makes a GIF in memory.
            copies: Copies shown side by side; None takes the length of a list in `env_config`, else one.
            env_config: Values for the environment's parameters; None takes those that the run evaluates under.
            **options: `episodes`, `deterministic`, `seed`, `max_steps`, `fps`, `columns` and `captions` of
                `rl8x.video.film`.

        Raises:
            ValueError: If the environment cannot be rendered or made again, or an option is not legal.
        """
        lists = [len(value) for value in (env_config or {}).values() if isinstance(value, list | tuple)]
        copies = max(lists, default=1) if copies is None else copies
        suffix = ".gif" if path is None else Path(path).suffix
        env = self.make_film_env(copies)
        try:
            config = self.evaluations.runs_config() if env_config is None else env_config
            film = film_policy(self.algorithm, env, config, copies, suffix=suffix, **options)
        finally:
            env.close()
        if path is not None:
            film.save(path)
        return film

    def evaluate_grid(
        self, grid: Mapping[str, Any], *, episodes: int = 10, name: str | None = None, seed: int = 0
    ) -> pandas.DataFrame:
        """Evaluate the current policy in every cell of a grid of physics, all cells in one batch.

        The run gets three metrics, the mean over the cells, the worst and the best (`grid/<name>/mean`, `worst_cell`,
        `best_cell`), and one artifact, `grids/<name>/step-...`, with the table and its figure.

        Args:
            grid: Values of the environment's parameters, whose combinations are the cells: numbers, lists or arrays of
                numbers, `{"linspace": [low, high, count]}` or `{"geomspace": ...}`. Others have their defaults.
            episodes: Episodes in each cell. The policy takes its most likely actions.
            name: What the grid is called in the run; None takes its parameters' names.
            seed: Of the random numbers of the episodes: with the same seed every policy meets the same ones.

        Returns:
            A row for each cell: its parameters, `episodes`, `returns` (mean), `returns_std`, `returns_min` and
            `lengths` (mean). `rl8x.trainers.plot_grid` draws it.

        Raises:
            RuntimeError: If there is no environment to evaluate in.
            ValueError: If the environment has no such parameter or value, its episodes never end, or it cannot be made
                again; or an option is not legal.
        """
        if name is not None:
            check_evaluation_name(name)
        frame = measure_grid(self.algorithm, self.evaluator, grid, episodes, seed)
        metrics = grid_metrics(frame, name)
        self.train_step.take_evaluation(metrics, metrics, is_of_run=False)
        if ranks().is_first:
            log_grid(self.tracker, frame, name, self.state[keys.STEPS])
        return frame

    def make_film_env(self, copies: int) -> Env:
        """Make a separate environment to film in.

        Args:
            copies: Its number of copies.

        Raises:
            ValueError: If the environment cannot be rendered or made again.
        """
        return make_film_env(self.algorithm, None if self.evaluator is None else self.evaluator.env, copies)

    def plot(self, *metrics: str) -> Figure:
        """Plot what the run has logged so far; notebooks display the figure.

        Args:
            metrics: One panel each; by default the returns of training and of evaluations.

        Returns:
            The figure.

        Raises:
            ValueError: If the tracker keeps no metrics, or none of these was logged so far.
        """
        return plot_run(self.tracker, metrics, sorted(self.metric_names), self.algorithm.clock)

    def log_model(self, name: str = LAST, *, register: str | None = None, alias: str | None = None) -> None:
        """Log the current policy as a model, with the latest metrics; with several ranks, rank 0 does.

        Args:
            name: The model's name.
            register: A name in MLflow's model registry; the model becomes its next version.
            alias: The version's alias: with `register="cartpole"` and `alias="champion"` the model is then
                `models:/cartpole@champion`.

        Raises:
            TypeError: If the policy cannot be written to a file, or the tracker keeps no models.
        """
        if not ranks().is_first:
            return
        algorithm = self.algorithm
        check_models(algorithm.policy, self.tracker)
        self.record.open(trains=False)
        about = {"step": self.state[algorithm.clock], "metrics": model_metrics(self.known)}
        log_policy(self.tracker, algorithm.policy, name=name, register=register, alias=alias, **about)

    def save(self) -> Path | None:
        """Write a checkpoint and wait until it is on the disk, for loops over `step()`; `run()` saves by itself.

        Within a `run()`, as in a callback, it is written after the current step, once the conditions have judged it.

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
        """End the tracked run after a loop over `step()`; `run()` ends its own."""
        self.record.close("FINISHED", self.stop_reason, self.train_step.eval_row)


class Trainer(GenericTrainerBase[GenericAlgorithmBase[Any]]):
    """Trains any algorithm: collects, updates, evaluates, tracks, saves, and stops on a condition.

        from rl8x import HitsUpperBound, PPOConfig, Trainer
        from rl8x.envs import CartPole

        config = PPOConfig()
        trainer = Trainer(config.build(CartPole), num_eval_envs=16)
        trainer.run(steps_per_eval=5, stop_conditions=[HitsUpperBound("eval/returns/mean", 475)])

    `run` is such a loop over `step` and `eval`; `for stats in trainer` is one of your own.

    Attributes:
        algorithm: The algorithm that is trained, with its policy and its environment.
        tracker: Stores params and metrics.
        checkpoints: The manager of its checkpoints.
        stop_reason: Why the last `run()` stopped, or the loop; None before that.
        ending: Lines for the user: where that run is, which rows have not arrived there, and how to continue it.
    """

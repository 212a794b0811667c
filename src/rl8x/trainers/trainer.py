"""The trainer: a loop around an algorithm, of which it does not know how it learns."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import check_names_in
from rl8x.checkpoint import CheckpointError, read
from rl8x.checkpoint.find import CHECKPOINTS_TAG
from rl8x.conditions import Condition
from rl8x.distributed import ranks
from rl8x.envs import Env
from rl8x.envs.env_config import AnyEnvConfig, followed_in
from rl8x.output import described
from rl8x.tracking import MLflowTracker
from rl8x.tracking.protocol import Status
from rl8x.tracking.runs import shown_path
from rl8x.tracking.secrets import hide, logger
from rl8x.trainers.base import AlgorithmT, TrainerBase
from rl8x.trainers.callbacks import callback_name, declared_by
from rl8x.trainers.films import film_policy, log_film, make_film_env
from rl8x.trainers.models import BEST, LAST, check_models, log_policy, model_metrics, policy_at
from rl8x.trainers.plotting import plot_run
from rl8x.trainers.progress import Progress, ProgressReporter
from rl8x.trainers.ranks import agree, check_alike
from rl8x.trainers.run_state import RUN_OPTIONS, RunState, StopConditions
from rl8x.trainers.signals import SignalGuard
from rl8x.trainers.statistics import TrainStats
from rl8x.video import Film

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_log = logger(__name__)


class GenericTrainerBase(TrainerBase[AlgorithmT]):
    """Drives an algorithm: `step()`, `eval()`, and `run()` until a condition stops it; arguments are `TrainerBase`'s.

    Of the trainer's own state it changes `stop_reason`, `ending` and, once a run has begun, `origin` and `saved_run`.
    What a run has come to is in its `RunState`.
    """

    def run(
        self,
        *,
        env_config: AnyEnvConfig | EllipsisType | None = ...,
        eval_env_config: Mapping[str, Any] | EllipsisType | None = ...,
        steps_per_eval: int | EllipsisType | None = ...,
        evals_per_film: int | EllipsisType | None = ...,
        stop_conditions: StopConditions | Condition | EllipsisType | None = ...,
        max_steps: int | EllipsisType | None = ...,
        progress: Progress = "auto",
    ) -> TrainStats:
        """Step until a condition says stop, evaluating now and then.

        After `resume()` the first `run()` goes on with the interrupted one. What is not given, or given as `...`, is
        then as it was; otherwise it is None.

        Where torchrun has started a job again (`--max-restarts`), the run goes on from the job's last checkpoint.

        SIGINT, SIGTERM and SIGHUP end the run after the step in progress: it is saved, its status becomes KILLED, and
        KeyboardInterrupt or SystemExit(128 + n) is raised; a second SIGINT ends at once. SIGUSR1 only saves.

        Args:
            env_config: Values for the environment's parameters, applied at each reset; None changes nothing. Or a
                function that is called before each collect with the trainer's `known`, counters and latest metrics by
                name, and returns such values: each copy's next episode is played under them. It has no form in a
                file, and is given again after a resume.
            eval_env_config: The same for evaluations, with as many values as they have copies where it has one for
                each. None evaluates under the training's; of its values for each copy, evaluations with another number
                of copies take evenly spaced ones.
            steps_per_eval: An evaluation after every so many steps; None is never. Where the training environment is
                used, it must be a multiple of `horizons_per_env_reset`.
            evals_per_film: After every so many evaluations an episode is filmed, under what evaluations play under, and
                kept as the artifact `films/step-....gif`; None is never.
            stop_conditions: The run stops when any of these is met. Without one it goes on until interrupted.
            max_steps: The run stops after so many steps of this `run()`, those before a resume of it among them; None
                sets no limit.
            progress: `"auto"` (a bar on a terminal and in a notebook, lines elsewhere), `"bar"`, `"lines"` or `"none"`.

        Returns:
            The last row, with `stop_reason` set.

        Raises:
            TypeError: If a condition is none.
            ValueError: If an option is not legal, before the first step.
            NonFiniteError: If numbers are not finite and `on_non_finite` says stop.
            RuntimeError: Within another `run()` of this trainer.
            CheckpointError: If another process is at the run, or has gone on with it.
            TrackingError: If runs cannot be kept where the tracker should.
            KeyboardInterrupt: After SIGINT, once the run is saved.
            SystemExit: After SIGTERM and SIGHUP, once the run is saved.
        """
        if self.train_step.is_in_progress:
            raise RuntimeError("this trainer is in a run() already: one at a time, and none in its callbacks.")
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
            self.train_step.in_run = True
            if ranks().first("whether the run is elsewhere", self.checkpoints.outrun):
                self.go_on_from_newest()
                run = self._checked_run(options)
            reporter = self._prepare(run, progress)
            with SignalGuard(quiet=reporter.mode == "none") as signals:
                with self._tracked(run, reporter, signals):
                    stats, stop = self._begin(run), None
                    self.origin = self.saved_run = None  # only now: what could not begin can be tried again
                    while stats is None or stats.stop_reason is None:
                        if stop is not None or (signals.stop is not None and ranks().size == 1):
                            self.record.save(self.state_dict(), run, "KILLED")
                            raise signals.exception()
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

    def _prepare(self, run: RunState, progress: Progress) -> ProgressReporter:
        """Take over what a run is made of, before it begins; returns what shows how far it has come."""
        algorithm = self.algorithm
        config = algorithm.config
        collected = 0 if algorithm.env is None else config.num_envs * config.horizon * ranks().size
        run.begin(algorithm.counters, {algorithm.clock: 0, keys.ENV_STEPS: collected})
        algorithm.execution.plan(algorithm.seconds_per_step, run.most_steps, algorithm.counters[keys.STEPS])
        self.evaluations.env_config = run.options["eval_env_config"]
        self.record.prepare(run, callbacks=bool(self.callbacks))
        shown = progress if ranks().is_first else "none"
        reporter = ProgressReporter(shown, run.total_steps(self.state), algorithm.clock)
        algorithm.execution.announce(reporter.say)
        return reporter

    def _begin(self, run: RunState) -> TrainStats | None:
        """Begin the tracked run and its checkpoints; returns the last row of a run that has come to its end."""
        self.record.open()
        self.record.update_params()
        if run.last is not None:  # killed after its end was saved, before the tracked run knew
            return run.last
        self.stop_reason = None
        directory = self.checkpoints.begin()
        if directory is not None:
            self.tracker.set_tags({CHECKPOINTS_TAG: str(directory.absolute())})
        if run.steps == 0:
            # On the disk before the first row is tracked: whenever the run is killed, there is something to go on from.
            self.record.save(self.state_dict(), run)
            self.checkpoints.wait()
        return None

    def _evaluate_where_due(self, run: RunState, row: dict[str, float]) -> None:
        """Make the evaluation and the film that follow the step, and have the row take in what was measured."""
        if run.evaluation_is_due:
            row |= self.eval() | self.state
        if run.film_is_due:
            log_film(self.tracker, self.play(), self.state)

    def _judge(self, run: RunState, stats: TrainStats) -> None:
        """Ask the conditions, one of which may evaluate: the row takes that in, and the best goes by it too."""
        self.train_step.open_row = stats
        run.judge(stats, self.train_step.eval_row)
        self.train_step.open_row = None

    @contextlib.contextmanager
    def _tracked(self, run: RunState, reporter: ProgressReporter, signals: SignalGuard) -> Iterator[None]:
        """End the tracked run with the right status, whatever happens, and say how to go on."""
        status: Status = "FINISHED"
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            status = "KILLED"
            self.stop_reason = "interrupted" if signals.stop is None else f"interrupted by {signals.stop.name}"
            raise
        except BaseException as error:
            status, self.stop_reason = "FAILED", hide(described(error))
            self.record.log_failure(traceback.format_exc())
            raise
        finally:
            reporter.close()
            try:
                self.checkpoints.wait()
                if status != "FAILED" and self.options["log_models"]:
                    self._log_models()
                self.record.close(status, self.stop_reason, self.train_step.eval_row)
            finally:
                # Of a run that failed before its first step the error says enough.
                if status != "FAILED" or run.has_stepped:
                    self.ending = self.record.report(status, self.stop_reason, reporter.say)

    def _save_where_due(
        self, run: RunState, stats: TrainStats, signals: SignalGuard, reporter: ProgressReporter
    ) -> signal.Signals | None:
        """Save where that is due; returns the signal that asks for an end, on all ranks the same."""
        steps = self.algorithm.counters[keys.STEPS]
        is_best = self.checkpoints.improved(stats, stats.fresh - stats.earlier, steps)
        asked, run.asked_to_save = run.asked_to_save, False
        stop, saves = agree(stats, signals, is_best or asked or self.checkpoints.due(steps))
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
        """Log the last policy, and the best where checkpoints go by a metric; what cannot be is warned of."""
        path = self.checkpoints.best_path
        try:
            self.log_model(LAST)
            if path is not None:
                policy, about = policy_at(read(path), self.algorithm)
                log_policy(self.tracker, policy, name=BEST, **about)
        except (CheckpointError, OSError) as error:
            _log.warning("rl8x: not all policies are logged as models: %s", error)

    def check_run(self, **options: Any) -> None:
        """Refuse what `run()` would refuse before its first step.

        Args:
            options: Those of `run()` but `progress`.

        Raises:
            ValueError: If an option is unknown or not legal.
        """
        check_names_in(options, RUN_OPTIONS, "`run()`")
        self._checked_run(dict.fromkeys(RUN_OPTIONS, ...) | options)

    def _checked_run(self, options: Mapping[str, Any]) -> RunState:
        """Return the run that is asked for, once all of it is known to be legal."""
        saved = self.saved_run
        names = list(map(callback_name, self.callbacks))
        run = RunState(options, saved, trust=self.origin is not None and self.origin.trust, callbacks=names)
        env_config, eval_config = run.options["env_config"], run.options["eval_env_config"]
        steps = 0 if saved is None else int(saved["steps"])
        self.evaluations.check_run(run.options["steps_per_eval"], eval_config, steps=steps)
        plain_configs = self.evaluations.plain_configs(env_config, eval_config, self.known)
        if run.options["evals_per_film"] is not None:
            self.make_film_env(1).close()  # what cannot be filmed is told before the first step
        run.start(self, plain_configs, known=self.metric_names, measured=declared_by(self.callbacks))
        env, calls_back = self.algorithm.env, bool(self.callbacks)
        followed = followed_in(plain_configs["env_config"] or ({} if env is None else env.next_config))
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
        """Film the present policy, in an environment of its own; a notebook shows what is returned.

        Args:
            path: A file to write too, whose ending says the format; None makes a GIF.
            copies: Copies side by side; None are as many as a list in `env_config` has values, else one.
            env_config: Values for the environment's parameters; None are those under which the run evaluates.
            **options: `episodes`, `deterministic`, `seed`, `max_steps`, `fps`, `columns` and `captions`, as
                `rl8x.video.film` takes them.

        Raises:
            ValueError: If the environment has no pictures or cannot be made again, or an option is not legal.
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

    def make_film_env(self, copies: int) -> Env:
        """Make an environment of its own to film in.

        Args:
            copies: Its copies.

        Raises:
            ValueError: If the environment has no pictures or cannot be made again.
        """
        return make_film_env(self.algorithm, None if self.evaluator is None else self.evaluator.env, copies)

    def plot(self, *metrics: str) -> Figure:
        """Draw what the run has logged so far; a notebook shows the figure.

        Args:
            metrics: A panel for each; none are the returns of training and evaluations.

        Returns:
            The figure.

        Raises:
            ValueError: If the tracker keeps no metrics, or has none of these so far.
        """
        return plot_run(self.tracker, metrics, sorted(self.metric_names), self.algorithm.clock)

    def log_model(self, name: str = LAST, *, register: str | None = None, alias: str | None = None) -> None:
        """Keep the present policy in the tracker as a model, with the latest metrics; of several ranks the first does.

        Args:
            name: What the model is called.
            register: A name in MLflow's model registry of which it becomes a version.
            alias: What that version is called: with `register="cartpole"` and `alias="champion"` the model is
                `models:/cartpole@champion` from then on.

        Raises:
            TypeError: If the policy has no form in a file, or the tracker keeps no models.
        """
        if not ranks().is_first:
            return
        algorithm = self.algorithm
        check_models(algorithm.policy, self.tracker)
        self.record.open(trains=False)
        about = {"step": self.state[algorithm.clock], "metrics": model_metrics(self.known)}
        log_policy(self.tracker, algorithm.policy, name=name, register=register, alias=alias, **about)

    def save(self) -> Path | None:
        """Write a checkpoint now and wait until it is on the disk: for loops over `step()`; `run()` saves by itself.

        Within a `run()`, as in a callback, it is written after the step in progress, once the conditions have seen it.

        Returns:
            The checkpoint's folder; None where the trainer has no checkpoints or the disk refused, and in a `run()`.
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
        """End the tracked run of a loop over `step()`; `run()` does so itself."""
        self.record.close("FINISHED", self.stop_reason, self.train_step.eval_row)


class Trainer(GenericTrainerBase[GenericAlgorithmBase[Any]]):
    """The trainer that users make; arguments and attributes are those of `TrainerBase`.

    trainer = Trainer(PPOConfig(num_envs=64).build(CartPole))
    trainer.run(stop_conditions=[HitsUpperBound("eval/returns/mean", 475)])
    """

"""The trainer: a loop around an algorithm.

It counts, evaluates, asks the stop conditions, saves, and tracks every metric; it knows nothing of how an algorithm
learns.
"""

from __future__ import annotations

import contextlib
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, Generic, Self, TypeVar

import psutil

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import check_names_in
from rl8x.checkpoint import CheckpointError, CheckpointsLike
from rl8x.checkpoint.find import CHECKPOINTS_TAG, spool_of
from rl8x.conditions import Condition
from rl8x.envs import Env
from rl8x.output import described
from rl8x.rollouts.statistics import Stats
from rl8x.tracking import MLflowTracker, Tracker
from rl8x.tracking.protocol import Status
from rl8x.tracking.secrets import hide
from rl8x.tracking.whereabouts import shown_path
from rl8x.trainers import non_finite
from rl8x.trainers.callbacks import Callback, check_callbacks, declared_metrics, returned_metrics
from rl8x.trainers.env_configs import plain_configs
from rl8x.trainers.evaluation import EpisodeEvaluator, Evaluations, make_evaluator
from rl8x.trainers.evaluation_names import check_evaluation_name, in_group
from rl8x.trainers.non_finite import NonFiniteError, OnNonFinite
from rl8x.trainers.progress import Progress, ProgressReporter
from rl8x.trainers.record import Record
from rl8x.trainers.resume import Origin, Resumed, handle_for, newest, prepare, set_torch_generators
from rl8x.trainers.run_state import RUN_OPTIONS, RunState, StopConditions
from rl8x.trainers.signals import SignalGuard
from rl8x.trainers.statistics import EvalStats, Timer, TrainStats
from rl8x.trainers.tracked_run import TrackedRun, default_tracker

AlgorithmT = TypeVar("AlgorithmT", bound=GenericAlgorithmBase[Any])
TrainerState = dict[str, int]
# What a row has of collects: nothing where there is no environment.
_COLLECTED = {*keys.COLLECT_METRICS, "profiling/env_steps_per_s"}
EvalEnv = str | bool | Env | Callable[..., Env] | None


class GenericTrainerBase(Generic[AlgorithmT]):
    """Drives an algorithm: `step()`, `eval()`, and `run()` until a condition stops it.

    Args:
        algorithm: What is trained.
        tracker: Where params and metrics go; None is MLflow, or nothing where MLflow is not installed.
        eval_env: Where `eval()` plays. True, an instance or a factory: an environment of its own, in which whole
            episodes are played at any time. False or None: the training environment, under the rule of
            `horizons_per_env_reset`. `"auto"`: an own one for episodic tasks, made as the training's or a copy of it,
            the training environment for tasks that never end. Whole episodes are `eval/returns/*`; where an episodic
            task is played in the training environment, the sums over its horizons are `eval/horizon_returns/*`.
        num_eval_envs: Copies, and so episodes, of an own evaluation environment that the trainer makes; None is the
            training's number, at most 128, but that of an instance that can only be copied.
        checkpoints: When and where the run is saved: a `Checkpoints`, a path, or True for the defaults; False never
            saves. None saves by the defaults where the tracker keeps the run on a disk, in a folder beside it.
        on_non_finite: What happens when observations, actions, rewards, losses, gradients or weights are not finite.
            `"stop"` ends the run as FAILED with a diagnosis. `"skip"` takes back the step's update, and `"rollback"`
            goes back to the weights of the last checkpoint; both then go on, in new episodes where what was gathered
            was bad, and stop after ten such steps in a row.
        callbacks: Called with the trainer and each row of statistics, after it was tracked and before the conditions
            see it. One with an attribute `metric_names`, a list of names, may return values for them by name: they are
            tracked and join the row. What `trainer.eval()` measures in a callback joins the row too.

    Attributes:
        checkpoints: The manager of its checkpoints.
        evaluator: What `eval()` plays in; None where that is the training environment, or none.
        evaluations: Under what `eval()` plays, when, and how its metrics are called.
        tracked_run: What its tracker records.
        record: What is known of its run, for checkpoints and last lines.
        origin: How it came to go on from a checkpoint; None where it does not, or has done so in a `run()`.
        stop_reason: Why the last `run()` stopped.
        ending: Where that run is, what of it has not arrived there, and how to go on with it, in lines for a user.
    """

    def __init__(
        self,
        algorithm: AlgorithmT,
        *,
        tracker: Tracker | None = None,
        eval_env: EvalEnv = "auto",
        num_eval_envs: int | None = None,
        checkpoints: CheckpointsLike = None,
        on_non_finite: OnNonFinite = "stop",
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.algorithm = algorithm
        self.evaluator: EpisodeEvaluator | None = make_evaluator(algorithm, eval_env, num_eval_envs)
        self.evaluations = Evaluations(algorithm, self.evaluator, warns=eval_env == "auto")
        self.callbacks: tuple[Callback, ...] = ()
        check_callbacks(callbacks, self.metric_names)
        self.callbacks = tuple(callbacks)
        self.options: dict[str, Any] = {
            "eval_env": eval_env if eval_env is None or isinstance(eval_env, bool | str) else "given",
            "num_eval_envs": num_eval_envs,
            "on_non_finite": on_non_finite,
        }
        self.record = Record(algorithm, default_tracker() if tracker is None else tracker, checkpoints, self.options)
        self.checkpoints = self.record.checkpoints
        self.tracked_run = TrackedRun(self.record, None if self.evaluator is None else self.evaluator.env)
        best = None if self.checkpoints.options is None else self.checkpoints.options.best
        if best is not None and best not in self.metric_names:
            raise ValueError(f"Checkpoints: `best` must be a metric of this trainer; got {best!r}.")
        self.origin: Origin | None = None
        self.stop_reason: str | None = None
        self.ending: list[str] = []
        self._guard = non_finite.Guard(on_non_finite)
        self._process = psutil.Process()
        self._saved_run: Mapping[str, Any] | None = None
        self._eval_row: dict[str, float] = {}
        self._evaluated: dict[str, float] = {}

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
        callbacks: Sequence[Callback] = (),
        checkpoints: CheckpointsLike | EllipsisType = ...,
        trust: bool = False,
    ) -> Self:
        """Make a trainer that goes on where a run was saved; its next `run()` goes on with that run, to the same bits.

        Args:
            source: Path of a checkpoint, or of a run's folder of them; or the run's name or ID in MLflow.
            auto: Take the run's newest good checkpoint where the one that is meant is damaged.
            algorithm: Built as the saved one was; None builds it from what the checkpoint says, which needs an
                environment and a model that are attributes of modules.
            overrides: Hyperparameters to be different from now on; the tracked run tells them.
            tracker: Where params and metrics go; None is where they went, which MLflow and `NullTracker` can be asked
                for again: any other tracker must be given.
            eval_env: As the constructor takes it; `...` is as it was.
            callbacks: As the constructor takes them.
            checkpoints: As the constructor takes them; `...` is as they were, in the same folder.
            trust: Whether the checkpoint is as trustworthy as your own code. It may then name modules to be imported,
                whose code runs, and a store that you have not named; without it only what is imported already, or
                rl8x's, torch's or Gymnasium's own, is taken from it.

        Raises:
            CheckpointError: If there is no such checkpoint or it cannot be used; the message names the newest good one.
        """
        resumed, origin, options = prepare(
            source,
            auto=auto,
            algorithm=algorithm,
            overrides=overrides,
            tracker=tracker,
            eval_env=eval_env,
            checkpoints=checkpoints,
            trust=trust,
        )
        trainer = cls(callbacks=callbacks, **options)
        trainer.origin = origin
        trainer.go_on_from(resumed)
        return trainer

    def go_on_from(self, resumed: Resumed) -> None:
        """Take over the state of a checkpoint, its folder and its tracked run; the next `run()` goes on with its run.

        Raises:
            CheckpointError: If it does not fit this trainer.
        """
        checkpoint, algorithm = resumed.checkpoint, self.algorithm
        state, metadata = checkpoint.state, checkpoint.metadata
        try:
            self.load_state_dict(state["trainer"])
            set_torch_generators(state["torch_generators"], algorithm.device)
            self._saved_run = state["run"]
            self.checkpoints.go_on_from(checkpoint, resumed.known)
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            reason = " ".join(described(error).split())
            raise CheckpointError(
                f"the checkpoint {checkpoint.path} does not fit this trainer: {reason:.300}"
            ) from error
        self.record.run_file = metadata.get("run_file")
        algorithm.seed = metadata["build"]["config"].get("seed", algorithm.seed)
        if self._saved_run is not None:
            self.evaluations.env_config = self._saved_run["options"]["eval_env_config"]
        if isinstance(self.tracker, MLflowTracker):
            self.tracker.resumed_spool = spool_of(checkpoint.path.parent, metadata)
        self.tracked_run.resume(handle_for(metadata["run"], self.tracker), resumed.tags)

    @property
    def tracker(self) -> Tracker:
        """Where params and metrics go."""
        return self.record.tracker

    @tracker.setter
    def tracker(self, tracker: Tracker) -> None:
        self.record.tracker = tracker

    @property
    def state(self) -> TrainerState:
        """The running counters by metric name: collects, steps, updates, environment steps and episodes."""
        return self.algorithm.counters

    @property
    def last_evaluation(self) -> Mapping[str, float]:
        """The metrics of the last evaluation, under `eval/`; empty before the first."""
        return dict(self._eval_row)

    @property
    def metric_names(self) -> frozenset[str]:
        """Every metric that a row of this trainer may have."""
        env, names = self.algorithm.env, {*keys.TRAINER_METRICS}
        names = names - _COLLECTED if env is None else names | {*keys.info_metrics(env.metric_names)}
        evaluated = {keys.EVAL_PREFIX + name for name in self.evaluations.names.measured}
        return frozenset(names | {*self.algorithm.metrics} | evaluated | self._declared)

    @property
    def _declared(self) -> set[str]:
        return {name for callback in self.callbacks for name in declared_metrics(callback)}

    def evaluation_name(self, name: str) -> str | None:
        """Name the metric of an evaluation that measures what `name` does in a training row; None where none does."""
        return self.evaluations.names.of(name)

    # -- one step, one evaluation

    def step(self, *, env_config: Mapping[str, Any] | None = None) -> TrainStats:
        """Collect experience and update the policy once; track the row of metrics.

        Args:
            env_config: Values for the environment's parameters, applied where a reset is due; None goes on with those
                that training had before, whatever an evaluation had in between.

        Returns:
            The row, with the latest evaluation's metrics beside it.
        """
        row = self._step(env_config)
        return self._finish_row(row, frozenset(row))

    def eval(
        self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True, name: str | None = None
    ) -> EvalStats:
        """Evaluate the present policy and track the metrics under `eval/`.

        Args:
            env_config: Values for the environment's parameters in this evaluation; None are those under which the run
                evaluates, else the training's.
            deterministic: Whether the policy takes its most likely action rather than a sample.
            name: The metrics are `eval/<name>/...`. None: they are `eval/...`; where `env_config` is not the one under
                which the run evaluates, they are tracked under a name made of it, such as `eval/gravity 50/...`. What
                has a name never replaces the run's own evaluation.

        Raises:
            RuntimeError: If the training environment is used and is not at a reset.
            ValueError: If `env_config` could not be applied, or MLflow does not take the name.
        """
        if name is not None:
            check_evaluation_name(name)
        tracked_name = self.evaluations.config_name(env_config) if name is None else name
        with Timer(self.algorithm.device) as timer:
            stats = self.evaluations.measure(env_config, deterministic=deterministic)
        spent = {"profiling/eval_ms": timer.elapsed_ms}
        own, tracked = (in_group(stats, group) for group in (name, tracked_name))
        if tracked_name is None:
            self._eval_row = own
        self.tracked_run.log(tracked | spent, trains=False)
        self._evaluated |= tracked | spent
        return EvalStats(own | spent)

    def save(self) -> Path | None:
        """Write a checkpoint now and wait until it is on the disk: for loops over `step()`; `run()` saves by itself.

        Returns:
            The checkpoint's folder; None where the trainer has no checkpoints or the disk refused.
        """
        self.tracked_run.open(trains=False)
        self.checkpoints.begin()
        self.record.save(self.state_dict(), None)
        return self.checkpoints.end()

    def _step(self, env_config: Mapping[str, Any] | None) -> dict[str, float]:
        """Collect, learn, and track the row; then act on what was not finite."""
        algorithm, state, device = self.algorithm, self.state, self.algorithm.device
        transitions, begin = state[keys.ENV_STEPS], time.perf_counter()
        self._guard.before_step(algorithm)
        with Timer(device) as collecting:
            collected = algorithm.collect(env_config=env_config)
            self.tracked_run.note_config()
        with Timer(device) as learning:
            learned = algorithm.step()
        row = dict(Stats.merge(collected, learned))  # the one copy to the host
        not_finite = non_finite.take_counts(row)
        state[keys.ENV_EPISODES] += int(row.get(keys.EPISODES_ENDED, 0))
        row.update(state)
        row["profiling/collect_ms"], row["profiling/step_ms"] = collecting.elapsed_ms, learning.elapsed_ms
        if algorithm.env is not None:
            row["profiling/env_steps_per_s"] = (state[keys.ENV_STEPS] - transitions) / (time.perf_counter() - begin)
        row["profiling/tracking_ms"] = self.tracked_run.log_ms
        row["memory/process_mb"] = self._process.memory_info().rss / 1e6
        row.update(algorithm.memory_stats())
        self.tracked_run.log(row)
        decision = self._guard.judge(algorithm, not_finite)
        if decision is not None:
            self._act_on(decision)
        algorithm.watch(row)
        return row

    def _act_on(self, decision: non_finite.Decision) -> None:
        """Stop with the diagnosis, or go back to earlier weights and warn."""
        diagnosis, text = decision.diagnosis, non_finite.message(decision.diagnosis)
        if decision.action == "stop":
            self.tracker.set_tags({non_finite.TAG: text})
            written = non_finite.to_json(diagnosis)
            self.tracker.log_text(written, "diagnosis.json")
            self.tracker.log_text(text + "\n", "diagnosis.txt")
            path = self.checkpoints.write_text(f"diagnosis-step-{diagnosis['step']}.json", written)
            raise NonFiniteError(text if path is None else f"{text}; see {path}", diagnosis)
        checkpoint = self.checkpoints.last_good() if decision.action == "rollback" else None
        saved = None if checkpoint is None else checkpoint.state["trainer"]["algorithm"]
        self._guard.take_back(self.algorithm, decision, saved)
        to = "before the step" if checkpoint is None else f"in {checkpoint.path.name}"
        text = f"{text}; the weights are as they were {to}"
        self.tracker.set_tags({non_finite.TAG: text})
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _finish_row(self, row: dict[str, float], fresh: frozenset[str]) -> TrainStats:
        stats = TrainStats({**self._eval_row, **row}, fresh)
        for callback in self.callbacks:
            self._evaluated, evaluation = {}, self._eval_row
            returned = returned_metrics(callback, callback(self, stats), self._evaluated)
            new = {name: value for name, value in returned.items() if self._evaluated.get(name) != value}
            if new:
                self.tracked_run.log(new)
            stats.add((self._eval_row if self._eval_row is not evaluation else {}) | returned)
        return stats

    # -- running

    def run(
        self,
        *,
        env_config: Mapping[str, Any] | EllipsisType | None = ...,
        eval_env_config: Mapping[str, Any] | EllipsisType | None = ...,
        steps_per_eval: int | EllipsisType | None = ...,
        stop_conditions: StopConditions | Condition | EllipsisType | None = ...,
        max_steps: int | EllipsisType | None = ...,
        progress: Progress = "auto",
    ) -> TrainStats:
        """Step until a condition says stop, evaluating now and then.

        After `resume()` the first `run()` goes on with the interrupted one. What is not given, or given as `...`, is
        then as it was; otherwise it is None.

        SIGINT, SIGTERM and SIGHUP end the run after the step in progress: it is saved, its status becomes KILLED, and
        KeyboardInterrupt or SystemExit(128 + n) is raised; a second SIGINT ends at once. SIGUSR1 only saves.

        Args:
            env_config: Values for the environment's parameters, applied at each reset; None changes nothing.
            eval_env_config: The same for evaluations, with as many values as they have copies where it has one for
                each. None evaluates under the training's; of its values for each copy, evaluations with another number
                of copies take evenly spaced ones.
            steps_per_eval: An evaluation after every so many steps; None is never. Where the training environment is
                used, it must be a multiple of `horizons_per_env_reset`.
            stop_conditions: The run stops when any of these is met. Without one it goes on until interrupted.
            max_steps: The run stops after so many steps, those before a resume among them; None sets no limit.
            progress: `"auto"` (a bar on a terminal, lines elsewhere), `"bar"`, `"lines"` or `"none"`.

        Returns:
            The last row, with `stop_reason` set.

        Raises:
            NonFiniteError: If numbers are not finite and `on_non_finite` says stop.
            CheckpointError: If another process is at the run, or has gone on with it.
        """
        options = {
            "env_config": env_config,
            "eval_env_config": eval_env_config,
            "steps_per_eval": steps_per_eval,
            "stop_conditions": stop_conditions,
            "max_steps": max_steps,
        }
        run = self._checked_run(options)
        self.checkpoints.take()  # before the tracker hears of a run that another process may have
        try:
            if self.checkpoints.outrun:
                self._catch_up()
                run = self._checked_run(options)
            self._prepare(run)
            reporter = ProgressReporter(progress, self._total_steps(run), self.algorithm.clock)
            with SignalGuard(quiet=reporter.mode == "none") as signals:
                with self._tracked(run, reporter, signals):
                    stats = self._begin(run)
                    while stats is None or stats.stop_reason is None:
                        if signals.stop is not None:
                            self.record.save(self.state_dict(), run, "KILLED")
                            raise signals.exception()
                        row = self._step(run.options["env_config"])
                        run.steps += 1
                        if run.evaluation_is_due:
                            row |= self.eval() | self.state
                        stats = self._finish_row(row, frozenset(row))
                        run.judge(stats, self._eval_row)
                        reporter.update(stats, self._total_steps(run))
                        self._save_where_due(run, stats, signals, reporter)
                    self.stop_reason = stats.stop_reason
                if signals.stop is not None:
                    raise signals.exception()
            return stats
        finally:
            self.checkpoints.end()  # only now: its lock tells a run that was killed before it had recorded its end

    def _prepare(self, run: RunState) -> None:
        """Take over what a run is made of, before it begins."""
        self.origin = self._saved_run = None
        self.record.run = run
        run.begin(self.state)
        self.evaluations.env_config = run.options["eval_env_config"]
        self.tracked_run.prepare(run, self.record.file(callbacks=bool(self.callbacks)))

    def _begin(self, run: RunState) -> TrainStats | None:
        """Begin the tracked run and its checkpoints; returns the last row of a run that has come to its end."""
        self.tracked_run.open()
        self.tracked_run.update_params()
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
            self.tracked_run.log_failure(traceback.format_exc())
            raise
        finally:
            reporter.close()
            try:
                self.checkpoints.wait()
                self.tracked_run.close(status, self.stop_reason, self._eval_row)
            finally:
                self._report(run, reporter, status)

    def _report(self, run: RunState, reporter: ProgressReporter, status: Status) -> None:
        """Say how the run ended and how to go on; of one that failed before its first step the error says enough."""
        if status == "FAILED" and not run.has_stepped:
            return
        self.ending = self.record.ending(status)
        reason = " ".join(str(self.stop_reason).split())
        verb = "failed" if status == "FAILED" else "stopped"
        for line in (f"{verb} after {self.state[keys.STEPS]:,} steps: {reason:.300}", *self.ending):
            reporter.say(line)

    def _total_steps(self, run: RunState) -> int | None:
        algorithm = self.algorithm
        collected = 0 if algorithm.env is None else algorithm.config.num_envs * algorithm.config.horizon
        return run.total_steps(self.state, {algorithm.clock: 0, keys.ENV_STEPS: collected})

    def check_run(self, **options: Any) -> None:
        """Refuse what `run()` with these options would refuse before its first step, and touch nothing.

        Args:
            options: As `run()` takes them, except `progress`.

        Raises:
            ValueError: If an option does not fit, or what the run is to be kept in could not be written.
        """
        check_names_in(options, RUN_OPTIONS, "`run()`")
        self._checked_run(dict.fromkeys(RUN_OPTIONS, ...) | options)

    def _checked_run(self, options: Mapping[str, Any]) -> RunState:
        saved, evaluator = self._saved_run, self.evaluator
        run = RunState(options, saved, trust=self.origin is not None and self.origin.trust)
        env_config, eval_config = run.options["env_config"], run.options["eval_env_config"]
        self.evaluations.check_run(run.options["steps_per_eval"], eval_config, resumed=saved is not None)
        run.bind(self, known=self.metric_names, measured=self._declared)
        eval_env = None if evaluator is None else evaluator.env
        run.start(plain_configs(self.algorithm.env, eval_env, env_config, eval_config))
        if isinstance(self.tracker, MLflowTracker) and not self.tracked_run.is_open:
            self.tracker.check()
        if self.checkpoints.check():
            run.state_dict()  # raises where a condition cannot be saved
        return run

    def _catch_up(self) -> None:
        """Go on from the newest checkpoint, which another process has written since this trainer read the one before.

        Raises:
            CheckpointError: If that is not what was asked for, or the trainer has stepped already.
        """
        origin, directory = self.origin, self.checkpoints.directory
        if origin is None or directory is None or origin.named or self.state[keys.STEPS] != origin.steps:
            raise self.checkpoints.outrun_error()
        self.go_on_from(newest(directory, origin, self.algorithm))

    def __iter__(self) -> Iterator[TrainStats]:
        """Yield the statistics of one `step()` after another, for as long as the caller takes them."""
        while True:
            yield self.step()

    def evaluate_now(self) -> Mapping[str, float] | None:
        """Evaluate, track, and return the metrics, for a condition that wants to be confirmed; None out of turn."""
        return self.eval() if self.evaluations.is_their_turn else None

    # -- tracking

    def close(self) -> None:
        """End the tracked run of a loop over `step()`; `run()` does so itself."""
        self.tracked_run.close("FINISHED", self.stop_reason, self._eval_row)

    @property
    def params(self) -> dict[str, Any]:
        """Everything that a run is made of: hyperparameters, physics, run options, versions and the machine."""
        return self.tracked_run.params

    # -- saving

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

    def _save_where_due(
        self, run: RunState, stats: TrainStats, signals: SignalGuard, reporter: ProgressReporter
    ) -> None:
        steps = self.state[keys.STEPS]
        is_best = self.checkpoints.improved(stats, stats.fresh, steps)
        if stats.stop_reason is not None:
            self.stop_reason = stats.stop_reason
            self.record.save(self.state_dict(), run, "FINISHED", is_best=is_best)
        elif is_best or signals.save or self.checkpoints.due(steps):
            self.record.save(self.state_dict(), run, is_best=is_best)
            if signals.save:
                signals.save = False
                path = self.checkpoints.wait()
                reporter.say(
                    "nothing saved: this run has no checkpoints" if path is None else f"saved {shown_path(path)}"
                )


class Trainer(GenericTrainerBase[GenericAlgorithmBase[Any]]):
    """The trainer that users make: `Trainer(PPOConfig(...).build(CartPole)).run(stop_conditions=[...])`."""

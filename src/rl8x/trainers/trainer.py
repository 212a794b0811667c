"""The trainer: a loop around an algorithm, of which it does not know how it learns."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch

from rl8x import keys
from rl8x.algorithms.base import AnyEnvConfig, GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import check_names_in
from rl8x.checkpoint.find import CHECKPOINTS_TAG
from rl8x.conditions import Condition
from rl8x.distributed import ranks
from rl8x.envs.parameters import followed_in
from rl8x.output import described
from rl8x.rollouts.statistics import Stats
from rl8x.tracking import MLflowTracker
from rl8x.tracking.protocol import Status
from rl8x.tracking.runs import shown_path
from rl8x.tracking.secrets import hide
from rl8x.trainers import non_finite
from rl8x.trainers.base import AlgorithmT, TrainerBase
from rl8x.trainers.callbacks import callback_name, returned_metrics
from rl8x.trainers.films import log_film
from rl8x.trainers.non_finite import NonFiniteError
from rl8x.trainers.progress import Progress, ProgressReporter
from rl8x.trainers.ranks import agree, check_alike, execute_alike, from_first, pooled_row
from rl8x.trainers.restart import is_restart, unfinished
from rl8x.trainers.resume import after_restart, newest
from rl8x.trainers.run_state import RUN_OPTIONS, RunState, StopConditions
from rl8x.trainers.signals import SignalGuard
from rl8x.trainers.statistics import Timer, TrainStats


class GenericTrainerBase(TrainerBase[AlgorithmT]):
    """Drives an algorithm: `step()`, `eval()`, and `run()` until a condition stops it; options as `TrainerBase`."""

    def step(self, *, env_config: AnyEnvConfig | None = None) -> TrainStats:
        """Collect experience and update the policy once; track the row of metrics.

        Args:
            env_config: Values for the environment's parameters, applied where a reset is due; None goes on with those
                that training had before, whatever an evaluation had in between. Or a function of the trainer's `known`.

        Returns:
            The row, with the latest evaluation's metrics beside it; an `eval()` before the next step renews them there.

        Raises:
            ValueError: If the `env_config` is not legal, or would never apply.
            NonFiniteError: If numbers are not finite and `on_non_finite` says stop.
            RuntimeError: Within a `run()` of this trainer, or in a callback.
        """
        if self._runs or self._calls_back:
            raise RuntimeError("a step of this trainer is in progress: a callback cannot make another one.")
        stats = self._judged_next = self._finish_row(self._step(env_config))
        return stats

    def __iter__(self) -> Iterator[TrainStats]:
        """Yield the statistics of one `step()` after another, for as long as the caller takes them."""
        while True:
            try:
                stats = self.step()
            except KeyboardInterrupt:
                self.record.close("KILLED", "interrupted", self._eval_row)
                raise
            yield stats

    def _step(self, env_config: AnyEnvConfig | None) -> dict[str, float]:
        """Collect, learn, and track the row; then act on what was not finite."""
        algorithm, state, device = self.algorithm, self.algorithm.counters, self.algorithm.device
        transitions, begin, self._judged_next = state[keys.ENV_STEPS], time.perf_counter(), None
        if state[keys.STEPS] >= algorithm.execution.due:
            algorithm.execution.begin_step(state[keys.STEPS])
        self._guard.before_step(algorithm)
        with Timer(device) as collecting:
            algorithm.follow(self.known)
            collected = algorithm.collect(env_config=env_config)
            self.record.note_config(env_config)
        with Timer(device) as learning:
            learned = algorithm.step()

        def measure() -> dict[str, float]:
            measured = {"profiling/collect_ms": collecting.elapsed_ms, "profiling/step_ms": learning.elapsed_ms}
            if algorithm.env is not None:
                gathered = state[keys.ENV_STEPS] - transitions
                measured["profiling/env_steps_per_s"] = gathered / (time.perf_counter() - begin)
            measured["profiling/tracking_ms"] = self.record.log_ms
            measured["memory/process_mb"] = self._process.memory_info().rss / 1e6
            if device.type == "cuda":
                measured["memory/device_mb"] = torch.cuda.memory_allocated(device) / 1e6
            return measured

        stats = Stats.merge(collected, learned)
        row, measured, fallen = pooled_row(stats, measure, algorithm.execution.fell_back)  # the one copy to the host
        not_finite = non_finite.take_counts(row)
        state[keys.ENV_EPISODES] += int(row.get(keys.EPISODES_ENDED, 0))
        row.update(state)
        row.update(measured)
        self.record.log(row)
        decision = self._guard.judge(algorithm, not_finite)
        if decision is not None:
            self._act_on(decision)
        execute_alike(algorithm, fallen)
        algorithm.watch(row)
        return row

    def _act_on(self, decision: non_finite.Decision) -> None:
        """Stop with the diagnosis, or go back to earlier weights and warn."""
        diagnosis, text = decision.diagnosis, non_finite.message(decision.diagnosis)
        if decision.action == "stop":
            self.tracker.set_tags({non_finite.TAG: text})
            written = json.dumps(diagnosis, indent=1, default=str) + "\n"
            self.tracker.log_text(written, "diagnosis.json")
            self.tracker.log_text(text + "\n", "diagnosis.txt")
            path = self.checkpoints.write_text(f"diagnosis-step-{diagnosis['step']}.json", written)
            raise NonFiniteError(text if path is None else f"{text}; see {path}", diagnosis)
        checkpoint = self.checkpoints.last_good() if decision.action == "rollback" else None
        state, learned = None if checkpoint is None else checkpoint.state["trainer"]["algorithm"], None
        if state is not None:  # a replay, which is each rank's own, stays
            learned = {name: state[name] for name in self.algorithm.learned_state() if name in state}
        saved = from_first(learned)
        self._guard.take_back(self.algorithm, decision, saved)
        to = "before the step" if saved is None else "in the last checkpoint"
        to = to if checkpoint is None else f"in {checkpoint.path.name}"
        text = f"{text}; the weights are as they were {to}"
        self.tracker.set_tags({non_finite.TAG: text})
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _finish_row(self, row: dict[str, float]) -> TrainStats:
        stats = TrainStats({**self._eval_row, **row}, frozenset(row))
        for callback in self.callbacks:
            self._evaluated, evaluation = {}, self._eval_row
            self._calls_back = True
            try:
                returned = returned_metrics(callback, callback(self, stats), self._evaluated, stats)
            finally:
                self._calls_back = False
            returned = ranks().first("what a callback measured", returned)
            new = {name: value for name, value in returned.items() if self._evaluated.get(name) != value}
            if new:
                self.record.log(new)
            stats.add((self._eval_row if self._eval_row is not evaluation else {}) | returned)
        self._row = dict(stats)
        return stats

    # -- running

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
            max_steps: The run stops after so many steps, those before a resume among them; None sets no limit.
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
        if self._runs or self._calls_back:
            raise RuntimeError("this trainer is in a run() already: one at a time, and none in its callbacks.")
        options = {
            "env_config": env_config,
            "eval_env_config": eval_env_config,
            "steps_per_eval": steps_per_eval,
            "evals_per_film": evals_per_film,
            "stop_conditions": stop_conditions,
            "max_steps": max_steps,
        }
        if is_restart() and self.origin is None and self.algorithm.counters[keys.STEPS] == 0:
            self._restart()
        run = self._checked_run(options)
        check_alike("the start of the run", {**run.params, **run.plain})
        self.checkpoints.take()  # before the tracker hears of a run that another process may have
        try:
            self._runs, self._asked_to_save = True, False
            if ranks().first("whether the run is elsewhere", self.checkpoints.outrun):
                self._catch_up()
                run = self._checked_run(options)
            self._prepare(run)
            progress = progress if ranks().is_first else "none"
            reporter = ProgressReporter(progress, run.total_steps(self.state), self.algorithm.clock)
            self.algorithm.execution.announce(reporter.say)
            with SignalGuard(quiet=reporter.mode == "none") as signals:
                with self._tracked(run, reporter, signals):
                    stats, stop = self._begin(run), None
                    self.origin = self._saved_run = None  # only now: what could not begin can be tried again
                    while stats is None or stats.stop_reason is None:
                        if stop is not None or (signals.stop is not None and ranks().size == 1):
                            self.record.save(self.state_dict(), run, "KILLED")
                            raise signals.exception()
                        row = self._step(run.options["env_config"])
                        run.steps += 1
                        if run.evaluation_is_due:
                            row |= self.eval() | self.state
                        if run.film_is_due:
                            log_film(self.tracker, self.play(), self.state)
                        stats = self._finish_row(row)
                        evaluation = self._eval_row
                        run.judge(stats, evaluation)
                        if self._eval_row is not evaluation:  # a condition evaluated; the best goes by that too
                            stats.add(self._eval_row)
                        reporter.update(stats, run.total_steps(self.state))
                        stop = self._save_where_due(run, stats, signals, reporter)
                    self.stop_reason = stats.stop_reason
                if signals.stop is not None:
                    raise signals.exception()
            return stats
        finally:
            self._runs = False
            self.checkpoints.end()  # only now: a lock that was left marks a run that was killed before its end

    def _prepare(self, run: RunState) -> None:
        """Take over what a run is made of, before it begins."""
        algorithm = self.algorithm
        config = algorithm.config
        collected = 0 if algorithm.env is None else config.num_envs * config.horizon * ranks().size
        run.begin(algorithm.counters, {algorithm.clock: 0, keys.ENV_STEPS: collected})
        algorithm.execution.plan(algorithm.seconds_per_step, run.most_steps, algorithm.counters[keys.STEPS])
        self.evaluations.env_config = run.options["eval_env_config"]
        self.record.prepare(run, callbacks=bool(self.callbacks))

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
                self.record.close(status, self.stop_reason, self._eval_row)
            finally:
                # Of a run that failed before its first step the error says enough.
                if status != "FAILED" or run.has_stepped:
                    self.ending = self.record.report(status, self.stop_reason, reporter.say)

    def _save_where_due(
        self, run: RunState, stats: TrainStats, signals: SignalGuard, reporter: ProgressReporter
    ) -> signal.Signals | None:
        """Save where that is due; returns the signal that asks for an end, on all ranks the same."""
        steps = self.algorithm.counters[keys.STEPS]
        is_best = self.checkpoints.improved(stats, stats.fresh, steps)
        asked, self._asked_to_save = self._asked_to_save, False
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
        saved = self._saved_run
        names = list(map(callback_name, self.callbacks))
        run = RunState(options, saved, trust=self.origin is not None and self.origin.trust, callbacks=names)
        env_config, eval_config = run.options["env_config"], run.options["eval_env_config"]
        steps = 0 if saved is None else int(saved["steps"])
        self.evaluations.check_run(run.options["steps_per_eval"], eval_config, steps=steps)
        plain_configs = self.evaluations.plain_configs(env_config, eval_config, self.known)
        if run.options["evals_per_film"] is not None:
            self.make_film_env(1).close()  # what cannot be filmed is told before the first step
        run.start(self, plain_configs, known=self.metric_names, measured=self._declared)
        env, calls_back = self.algorithm.env, bool(self.callbacks)
        followed = followed_in(plain_configs["env_config"] or ({} if env is None else env.next_config))
        run.check_followed(followed, self.metric_names, self._eval_row, calls_back=calls_back)
        if isinstance(self.tracker, MLflowTracker) and not self.record.is_open:
            self.tracker.check()
        if self.checkpoints.check():
            run.state_dict()  # raises where a condition cannot be saved
            run.check_best(
                None if self.checkpoints.options is None else self.checkpoints.options.best, calls_back=calls_back
            )
        return run

    def _restart(self) -> None:
        """Go on where the same job was before torchrun started it again, if it had saved something."""
        build = dict(self.record.build)
        if self.algorithm.config.seed is None:  # the one that was drawn then is meant
            build["config"] = {**build["config"], "seed": None}
        own_folder = unfinished(build, self.checkpoints.root) if ranks().is_first else None
        folder = ranks().first("the run to go on with", None if own_folder is None else str(own_folder))
        if folder is not None:
            self.go_on_from(*after_restart(Path(folder), self.algorithm))

    def _catch_up(self) -> None:
        """Go on from the newest checkpoint, which another process has written since this trainer read the one before.

        That is refused if another was asked for, or the trainer has stepped already.
        """
        own_folder = self.checkpoints.directory
        folder = ranks().first("the run's folder", None if own_folder is None else str(own_folder))
        origin, directory = self.origin, None if folder is None else Path(folder)
        if origin is None or directory is None or origin.named or self.algorithm.counters[keys.STEPS] != origin.steps:
            raise self.checkpoints.outrun_error()
        self.go_on_from(*newest(directory, origin, self.algorithm))


class Trainer(GenericTrainerBase[GenericAlgorithmBase[Any]]):
    """The trainer that users make; arguments and attributes are those of `TrainerBase`.

    trainer = Trainer(PPOConfig(num_envs=64).build(CartPole))
    trainer.run(stop_conditions=[HitsUpperBound("eval/returns/mean", 475)])
    """

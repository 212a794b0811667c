"""One `run()`: its options and conditions, how far it has come, and what of that a checkpoint keeps."""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from rl8x import keys
from rl8x.checkpoint import CheckpointError
from rl8x.conditions import (
    Condition,
    Confirmed,
    HitsUpperBound,
    Or,
    as_conditions,
    check_names,
    from_spec,
    parts,
    to_spec,
)
from rl8x.conditions.base import FromCallable
from rl8x.importing import import_named
from rl8x.output import described
from rl8x.tracking.protocol import Status
from rl8x.tracking.secrets import hide
from rl8x.trainers.callbacks import declared_metrics
from rl8x.trainers.ending import ending
from rl8x.trainers.env_configs import plain_configs
from rl8x.trainers.progress import Progress, ProgressReporter
from rl8x.trainers.signals import SignalGuard
from rl8x.trainers.statistics import TrainStats

if TYPE_CHECKING:
    from rl8x.trainers.trainer import GenericTrainerBase

StopConditions = Sequence[Condition | Callable[[Mapping[str, float]], bool]]
OPTIONS = ("env_config", "eval_env_config", "steps_per_eval", "max_steps")
RUN_OPTIONS = (*OPTIONS, "stop_conditions")


class Run:
    """Steps a trainer until a condition says stop, a signal does, or something breaks.

    It is the other half of the trainer and calls its private methods.

    Args:
        trainer: What is run.
        options: `env_config`, `eval_env_config`, `steps_per_eval`, `max_steps` and `stop_conditions` as `run()` takes
            them; `...` is None, or what `saved` has.
        saved: `state_dict()` of a run to go on with.

    Attributes:
        options: As they were given, or as `saved` has them.
        plain: The same with both configurations in plain JSON form.

    Raises:
        ValueError: If the options do not fit the trainer or each other.
    """

    def __init__(
        self, trainer: GenericTrainerBase[Any], options: Mapping[str, Any], saved: Mapping[str, Any] | None = None
    ) -> None:
        self.trainer = trainer
        self.steps = 0
        self._steps_before = 0
        self._env_steps = 0
        before: Mapping[str, Any] = {} if saved is None else saved["options"]
        self.options = {name: before.get(name) if options[name] is ... else options[name] for name in OPTIONS}
        self.conditions = self._conditions(options["stop_conditions"], saved)
        self._met: list[Condition] = []
        self._last: TrainStats | None = None
        self._check(resumed=saved is not None)
        self.plain = self.options | self._plain_configs()
        for condition in self.conditions:
            condition.start()
        if saved is not None:
            self._go_on(saved)

    def _conditions(
        self, given: StopConditions | Condition | EllipsisType | None, saved: Mapping[str, Any] | None
    ) -> list[Condition]:
        if not isinstance(given, EllipsisType):
            return as_conditions(given)
        conditions, find = [], functools.partial(import_named, trust=self.trainer.saving.trust)
        for entry in () if saved is None else saved["conditions"]:
            if entry["spec"] is None:
                raise CheckpointError(
                    f"the stop condition {entry['repr']} has no form in a file: pass the run's `stop_conditions` again"
                )
            conditions.append(from_spec(entry["spec"], find=find))
        return as_conditions(conditions)

    def _go_on(self, saved: Mapping[str, Any]) -> None:
        """Take over how far a run had come; a condition that it did not have begins afresh."""
        self.steps = int(saved["steps"])
        entries = list(saved["conditions"])
        for condition in self.conditions:
            entry = next((entry for entry in entries if entry["repr"] == repr(condition)), None)
            if entry is not None:
                entries.remove(entry)
                condition.load_state_dict(entry["state"])
        if saved["stop_reason"] is not None and not self._asks_for_more(saved):
            self._last = TrainStats(saved["row"])
            self._last.stop_reason = saved["stop_reason"]

    def _asks_for_more(self, saved: Mapping[str, Any]) -> bool:
        """Whether a run that has come to its end is asked to go on: for more steps, or until something else is met."""
        limit, entries = self.options["max_steps"], saved["conditions"]
        if limit is not None and self.steps >= limit:
            return False
        if limit != saved["options"]["max_steps"] or list(map(repr, self.conditions)) != [e["repr"] for e in entries]:
            return True
        # Plain callables all look alike: ask those that ended the run whether they still would.
        met = [(each, entry) for each, entry in zip(self.conditions, entries, strict=True) if entry["met"]]
        return bool(met) and all(entry["spec"] is None and not each(saved["row"]) for each, entry in met)

    def _plain_configs(self) -> dict[str, Any]:
        evaluator = self.trainer.evaluator
        eval_env = None if evaluator is None else evaluator.env
        names = ("env_config", "eval_env_config")
        configs = plain_configs(self.trainer.algorithm.env, eval_env, *(self.options[name] for name in names))
        return dict(zip(names, configs, strict=True))

    @property
    def specs(self) -> list[Any]:
        """Its conditions as plain data; None for those that have no such form."""
        return [_spec(condition) for condition in self.conditions]

    @property
    def params(self) -> dict[str, Any]:
        """The options as the tracked run shows them; each value of a configuration has a param of its own."""
        shown = {f"run.{name}": self.options[name] for name in ("steps_per_eval", "max_steps")}
        return {**shown, "run.stop_conditions": [repr(condition) for condition in self.conditions]}

    def state_dict(self) -> dict[str, Any]:
        """Return what it needs to go on after the present step."""
        conditions = [
            {
                "repr": repr(condition),
                "spec": _spec(condition),
                "state": condition.state_dict(),
                "met": any(condition is each for each in self._met),
            }
            for condition in self.conditions
        ]
        last = self._last
        return {
            "options": self.plain,
            "steps": self.steps,
            "conditions": conditions,
            "row": None if last is None else dict(last),
            "stop_reason": None if last is None else last.stop_reason,
        }

    # -- running

    def execute(self, progress: Progress) -> TrainStats:
        """Run, and end the tracked run with the right status whatever happens."""
        trainer = self.trainer
        self._steps_before, self._env_steps = self.steps, trainer.state[keys.ENV_STEPS]
        reporter = ProgressReporter(progress, self._total_steps())
        status: Status = "FINISHED"
        with SignalGuard(quiet=reporter.mode == "none") as signals:
            try:
                stats = self._run(reporter, signals)
            except (KeyboardInterrupt, SystemExit):
                status = "KILLED"
                trainer.stop_reason = "interrupted" if signals.stop is None else f"interrupted by {signals.stop.name}"
                raise
            except BaseException as error:
                status, trainer.stop_reason = "FAILED", hide(described(error))
                trainer.tracked_run.log_failure(traceback.format_exc())
                raise
            finally:
                reporter.close()
                try:
                    trainer.saving.wait()
                    trainer.tracked_run.close(status)
                finally:
                    self._report(reporter, status)
            if signals.stop is not None:
                raise signals.exception()
        return stats

    def _report(self, reporter: ProgressReporter, status: Status) -> None:
        """Say how the run ended and how to go on; of one that failed before its first step the error says enough."""
        trainer, finished = self.trainer, status == "FINISHED"
        if status == "FAILED" and self.steps == self._steps_before:
            return
        limit = self.options["max_steps"] if self._steps_left is not None and self._steps_left <= 0 else None
        trainer.ending = ending(
            trainer,
            max_steps=limit if finished else None,
            met=finished and (bool(self._met) or limit is None),
            conditions=self.specs,
        )
        reason = " ".join(str(trainer.stop_reason).split())
        verb = "failed" if status == "FAILED" else "stopped"
        for line in (f"{verb} after {trainer.state[keys.STEPS]:,} steps: {reason:.300}", *trainer.ending):
            reporter.say(line)

    @property
    def _steps_left(self) -> int | None:
        limit: int | None = self.options["max_steps"]
        return None if limit is None else limit - self.steps

    def _total_steps(self) -> int | None:
        """Steps of this `run()` by which it ends: by `max_steps`, or a bound on `env/steps` at the present rate."""
        algorithm, steps = self.trainer.algorithm, self.steps - self._steps_before
        limit: int | None = self.options["max_steps"]
        totals = [] if limit is None else [limit - self._steps_before]
        gained = self.trainer.state[keys.ENV_STEPS] - self._env_steps
        per_step = gained / steps if gained > 0 else algorithm.config.num_envs * algorithm.config.horizon
        for bound in _bounds(self.conditions, keys.ENV_STEPS):
            left = math.ceil((bound - self.trainer.state[keys.ENV_STEPS]) / per_step)
            totals.append(steps + max(left, 0 if steps else 1))
        return min(totals, default=None)

    def _run(self, reporter: ProgressReporter, signals: SignalGuard) -> TrainStats:
        trainer, saving = self.trainer, self.trainer.saving
        trainer.tracked_run.open()
        trainer.tracked_run.update_params()
        if self._last is not None:  # killed after its end was saved, before the tracked run knew
            trainer.stop_reason = self._last.stop_reason
            return self._last
        trainer.stop_reason = None
        saving.begin(self)
        if self.steps == 0:
            # On the disk before the first row is tracked: whenever the run is killed, there is something to go on from.
            saving.save()
            saving.wait()
        while True:
            if signals.stop is not None:
                saving.save(status="KILLED")
                raise signals.exception()
            stats = self._step()
            self._last = stats if stats.stop_reason is not None else None
            reporter.update(stats, self._total_steps())
            is_best = saving.improved(stats)
            if stats.stop_reason is not None:
                trainer.stop_reason = stats.stop_reason
                saving.save(status="FINISHED", is_best=is_best)
                return stats
            if is_best or signals.save or saving.due():
                saving.save(is_best=is_best)
                if signals.save:
                    signals.save = False
                    reporter.say(saving.told())

    def _step(self) -> TrainStats:
        """Step once, evaluate where due, and ask the conditions."""
        trainer, every = self.trainer, self.options["steps_per_eval"]
        row = trainer._step(self.options["env_config"])
        self.steps += 1
        if every is not None and self.steps % every == 0:
            row = row | trainer.eval() | trainer.state
        stats = trainer._finish_row(row, frozenset(row))
        # Every condition sees every row: one that counts must not miss any because another was met.
        self._met = [condition for condition in self.conditions if condition(stats)]
        if every is None:
            self._check_callables()
        reasons = [condition.reason(stats) for condition in self._met]
        if self._steps_left is not None and self._steps_left <= 0:
            reasons.append(f"max_steps={self.options['max_steps']}")
        stats.stop_reason = "; ".join(reasons) or None
        return stats

    def _check_callables(self) -> None:
        """Refuse plain callables that wait for evaluations which nobody makes: what they read shows at a row only."""
        if _evaluates(self.conditions):
            return
        for part in (part for condition in self.conditions for part in parts(condition)):
            if isinstance(part, FromCallable) and part.missed is not None:
                declared = {name for each in self.trainer.callbacks for name in declared_metrics(each)}
                _check_evaluated(part, {part.missed} - declared - set(self.trainer.last_evaluation))

    # -- checks

    def _check(self, *, resumed: bool) -> None:
        for name in ("steps_per_eval", "max_steps"):
            value = self.options[name]
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"`{name}` must be a whole number, at least 1, or None; got {value!r}.")
        if self.trainer.evaluator is None:
            self._check_evaluation(self.options["steps_per_eval"], resumed)
        check_conditions(self.trainer, self.conditions, self.options["steps_per_eval"])

    def _check_evaluation(self, steps_per_eval: int | None, resumed: bool) -> None:
        every = self.trainer.algorithm.resets.every
        if every > 0 and steps_per_eval is not None and steps_per_eval % every:
            raise ValueError(
                f"`steps_per_eval` must be a multiple of `horizons_per_env_reset`; got {steps_per_eval} and {every}. "
                f"Try {-(-steps_per_eval // every) * every}, or give the trainer an `eval_env`."
            )
        if every > 0 and steps_per_eval is not None and not resumed:
            self.trainer.evaluations.check_turn(None)
        if every < 0 and self.options["eval_env_config"] is not None:
            raise ValueError(
                "`eval_env_config` would never apply: the training environment is reset once, at the first collect "
                "(`horizons_per_env_reset` < 0). Give the trainer an `eval_env`, or use horizons_per_env_reset=1."
            )


def check_conditions(
    trainer: GenericTrainerBase[Any], conditions: Sequence[Condition], steps_per_eval: int | None
) -> None:
    """Make conditions known to the trainer, and refuse those that could never be met.

    Raises:
        ValueError: At a metric that no row will have, one of evaluations where none will be made, or a `Confirmed` that
            the trainer's evaluations cannot decide.
    """
    check_names(conditions, trainer.metric_names)
    for condition in conditions:
        condition.bind(trainer)
    if steps_per_eval is None and not _evaluates(conditions):
        made = {name for callback in trainer.callbacks for name in declared_metrics(callback)}
        for condition in conditions:
            _check_evaluated(condition, condition.awaited_names - made)


def _evaluates(conditions: Sequence[Condition]) -> bool:
    """Whether a condition evaluates by itself, before there has been an evaluation."""
    confirmed = [part for each in conditions for part in parts(each) if isinstance(part, Confirmed)]
    return any(not _of_evaluations(part.awaited_names) for part in confirmed)


def _check_evaluated(condition: Condition, names: Iterable[str]) -> None:
    for name in _of_evaluations(names):
        raise ValueError(
            f"{condition!r} reads {name!r}, but this run makes no evaluations: give `steps_per_eval`, such as "
            "steps_per_eval=10."
        )


def _of_evaluations(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(keys.EVAL_PREFIX))


def _bounds(conditions: Iterable[Condition], name: str) -> list[float]:
    """List the upper bounds on a metric, each of which ends a run by itself."""
    bounds = []
    for condition in conditions:
        if isinstance(condition, Or):
            bounds += _bounds(condition.children, name)
        elif isinstance(condition, HitsUpperBound) and condition.name == name:
            bounds.append(condition.bound)
    return bounds


def _spec(condition: Condition) -> Any:
    try:
        return to_spec(condition)
    except ValueError:
        return None

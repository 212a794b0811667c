"""The state of one `run()`: its options, its conditions and its progress, and what checkpoints keep of them."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any, Final

from rl8x import keys
from rl8x.checkpoint import CheckpointError
from rl8x.checkpoint.metadata import SavedRun
from rl8x.conditions import (
    Condition,
    Confirmed,
    HitsLowerBound,
    HitsUpperBound,
    Not,
    Or,
    WallTime,
    as_conditions,
    check_names,
    parts,
    to_spec,
)
from rl8x.conditions.base import FromCallable, in_turn
from rl8x.config.describe import unwritable, unwritable_in
from rl8x.config.spec import RunOptions
from rl8x.envs.env_config import function_form, function_name, plain
from rl8x.frozen import thawed
from rl8x.importing import Trust
from rl8x.names import did_you_mean
from rl8x.trainers.statistics import TrainStats

StopConditions = Sequence[Condition | Callable[[Mapping[str, float]], bool]]
OPTIONS: Final = ("env_config", "eval_env_config", "steps_per_eval", "evals_per_film", "max_steps")
RUN_OPTIONS: Final = (*OPTIONS, "stop_conditions")


class RunState:
    """The options, conditions and progress of a run.

    Args:
        options: `OPTIONS` and `stop_conditions` as `run()` takes them; `...` is the value in `planned`.
        planned: The options of a run file or a checkpoint, or the defaults.
        saved: `state_dict()` of a run to continue; None begins a new one.
        trust: Whether making the planned conditions may import any module.
        callbacks: Names of the trainer's callbacks, which cannot be saved themselves.

    Attributes:
        callbacks: The names given.
        options: The options given, or else those that were planned.
        plain: The same with both configurations as plain JSON data, after `start`.
        conditions: The stop conditions.
        steps: Steps so far, including those before a resume.
        met: The conditions that the last row met.
        last: The last row, once the run has ended.
        asked_to_save: Whether a callback has asked for a checkpoint after the current step.

    Raises:
        ValueError: If an option is not legal.
        CheckpointError: If a condition or the `env_config` that was planned could not be saved.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        planned: RunOptions,
        saved: SavedRun | None,
        *,
        trust: Trust,
        callbacks: Sequence[str] = (),
    ) -> None:
        given = {name: getattr(planned, name) if options[name] is ... else options[name] for name in OPTIONS}
        self.options: dict[str, Any] = thawed(given)  # the run's own: the script may go on with its lists
        lost = function_name(self.options["env_config"])
        if lost is not None:
            raise CheckpointError(
                f"the run's `env_config` is the function {lost}, which cannot be saved: pass it again, as "
                "run(env_config=...)"
            )
        self.plain = dict(self.options)
        self.conditions = _conditions(options["stop_conditions"], planned, trust)
        self.callbacks = tuple(callbacks)
        self.steps = 0
        self.met: list[Condition] = []
        self.last: TrainStats | None = None
        self.asked_to_save = False
        self._given = [name for name in RUN_OPTIONS if options[name] is not ...]
        self._planned = planned
        self._saved = saved
        self._measured: frozenset[str] = frozenset()
        self._steps_before = 0
        self._counters_before: Mapping[str, int] = {}
        self._bounded: Mapping[str, int] = {}
        for name in ("steps_per_eval", "evals_per_film", "max_steps"):
            value = self.options[name]
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"`{name}` must be a whole number, at least 1, or None; got {value!r}.")
        if self.options["evals_per_film"] is not None and self.options["steps_per_eval"] is None:
            raise ValueError("`evals_per_film` counts the evaluations of the run: give `steps_per_eval` too.")

    # -- before it begins

    def start(
        self, trainer: object, configs: Mapping[str, Any], *, known: Collection[str], measured: Collection[str]
    ) -> None:
        """Take the checked configurations, and start the conditions or restore their saved states.

        The trainer evaluates for conditions that ask for it; rows may have the metrics that are `known`, and callbacks
        measure some.

        Raises:
            ValueError: If a condition could never be met: on a metric that no row will have, or of evaluations in a
                run without any, or a `Confirmed` that the trainer's evaluations cannot decide.
        """
        self._warn_of_lost_callbacks()
        check_names(self.conditions, known)
        for condition in self.conditions:
            condition.bind(trainer)
            condition.start()
        self.options |= configs
        values = {name: plain(each) for name, each in configs.items() if isinstance(each, Mapping)}
        functions = {name: function_form(each) for name, each in configs.items() if callable(each)}
        self.plain = self.options | values | functions
        self._measured = frozenset(measured)
        if not self.evaluates:
            for condition in self.conditions:
                _check_evaluated(condition, condition.awaited_names - self._measured)
        if self._saved is not None:
            self._go_on(self._saved)

    def _warn_of_lost_callbacks(self) -> None:
        """Warn if the run had callbacks, and has none after the resume."""
        had: Sequence[str] = () if self._saved is None else self._saved["callbacks"]
        if had and not self.callbacks:
            warnings.warn(
                f"the run had callbacks, {', '.join(had)}, which cannot be saved: it continues without them and their "
                "metrics. Trainer.resume(..., callbacks=[...]) gives them again.",
                RuntimeWarning,
                stacklevel=5,
            )

    def check_followed(
        self, followed: Mapping[str, str], known: Collection[str], evaluated: Collection[str], *, calls_back: bool
    ) -> None:
        """Refuse an `env_config` whose parameters follow a metric that no row will have, and so would never move.

        What an evaluation has measured already will be in rows; callbacks may make evaluations.
        """
        for parameter, metric in followed.items():
            if metric not in known:
                raise ValueError(
                    f"`env_config[{parameter!r}]` goes by the metric {metric!r}, which no row will have."
                    f"{did_you_mean(metric, known)}"
                )
            evaluates = self.evaluates or calls_back or metric in evaluated
            if metric.startswith(keys.EVAL_PREFIX) and not evaluates:
                raise ValueError(
                    f"`env_config[{parameter!r}]` goes by {metric!r}, but this run makes no evaluations: give "
                    "`steps_per_eval`, such as steps_per_eval=10."
                )

    def check_best(self, best: str | None, *, calls_back: bool) -> None:
        """Warn if the best policy is judged by evaluations, and neither the run nor a callback makes any."""
        if best is not None and best.startswith(keys.EVAL_PREFIX) and not self.evaluates and not calls_back:
            warnings.warn(
                f"no checkpoint will be the best of {best!r}: this run makes no evaluations. Give `steps_per_eval`, "
                "such as steps_per_eval=10.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _go_on(self, saved: SavedRun) -> None:
        """Restore the progress of a saved run; conditions that it did not have begin afresh."""
        self.steps = int(saved["steps"])
        entries = list(saved["conditions"])
        for condition in self.conditions:
            entry = next((entry for entry in entries if entry["repr"] == _named(condition)), None)
            if entry is not None:
                entries.remove(entry)
                condition.load_state_dict(entry["state"])
        if saved["stop_reason"] is not None and not self._asks_for_more(saved):
            self.last = TrainStats(saved["row"] or {})
            self.last.stop_reason = saved["stop_reason"]
        elif self.limit_reached is not None:
            raise ValueError(
                f"`max_steps` counts the steps before a resume, too, and the run has made {self.steps} already; got "
                f"{self.limit_reached}. Give more, or None."
            )

    def _asks_for_more(self, saved: SavedRun) -> bool:
        """Whether a run that had ended is to continue: for more steps, or until another condition is met."""
        limit, entries = self.options["max_steps"], saved["conditions"]
        if limit is not None and self.steps >= limit:
            return False
        if limit != saved["max_steps"] or list(map(_named, self.conditions)) != [each["repr"] for each in entries]:
            return True
        # Plain callables cannot be compared: ask those that ended the run whether they still would.
        met = [condition for condition, entry in zip(self.conditions, entries, strict=True) if entry["met"]]
        return bool(met) and all(_spec(each) is None and not each(saved["row"] or {}) for each in met)

    # -- params and checkpoints

    @property
    def spec(self) -> RunOptions:
        """The options as plain data: those that were planned as they were written, and what the call gave."""
        given = {name: self.plain[name] for name in self._given if name in OPTIONS}
        if "stop_conditions" in self._given:
            given["stop_conditions"] = [_spec(each) or unwritable(_named(each)) for each in self.conditions]
        return replace(self._planned, **given)

    @property
    def params(self) -> dict[str, Any]:
        """The options as params of the tracked run, except the configurations, whose values are params of their own."""
        shown = {f"run.{name}": self.options[name] for name in ("steps_per_eval", "evals_per_film", "max_steps")}
        return {**shown, "run.stop_conditions": [_named(condition) for condition in self.conditions]}

    def state_dict(self) -> dict[str, Any]:
        """Return what the run needs to continue after the current step.

        Raises:
            TypeError: If the state of a condition cannot be saved.
        """
        conditions = [
            {
                "repr": _named(condition),
                "state": condition.state_dict(),
                "met": any(condition is met for met in self.met),
            }
            for condition in self.conditions
        ]
        last = self.last
        return {
            "steps": self.steps,
            "max_steps": self.options["max_steps"],
            "conditions": conditions,
            "callbacks": list(self.callbacks),
            "row": None if last is None else dict(last),
            "stop_reason": None if last is None else last.stop_reason,
        }

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates by itself, every `steps_per_eval` or because a condition asks for it."""
        return self.options["steps_per_eval"] is not None or _evaluates(self.conditions)

    # -- while it runs

    def begin(self, counters: Mapping[str, int], bounded: Mapping[str, int]) -> None:
        """Note the counters at which this `run()` begins.

        `bounded` are those whose upper bounds limit the number of steps, with what one step is expected to add; 0 if
        unknown.
        """
        self._steps_before, self._counters_before, self._bounded = self.steps, dict(counters), bounded

    @property
    def has_stepped(self) -> bool:
        """Whether this `run()` has made a step."""
        return self.steps > self._steps_before

    @property
    def evaluation_is_due(self) -> bool:
        """Whether an evaluation comes after the step that was just made."""
        every: int | None = self.options["steps_per_eval"]
        return every is not None and self.steps % every == 0

    @property
    def film_is_due(self) -> bool:
        """Whether a film follows the evaluation after the step that was just made."""
        evals, every = self.options["evals_per_film"], self.options["steps_per_eval"]
        return evals is not None and every is not None and self.steps % (evals * every) == 0

    @property
    def limit_reached(self) -> int | None:
        """`max_steps` if the run has reached it, else None."""
        limit: int | None = self.options["max_steps"]
        return limit if limit is not None and self.steps >= limit else None

    def judge(self, stats: TrainStats, evaluated: Collection[str], why: str | None = None) -> None:
        """Set a row's `stop_reason` if a condition is met, `max_steps` reached, or there is a `why` to stop."""
        # Every condition sees every row: one that counts must not miss any because another was met.
        met = {id(condition) for condition in in_turn(self.conditions) if condition(stats)}
        self.met = [condition for condition in self.conditions if id(condition) in met]
        if self.options["steps_per_eval"] is None:
            self._check_callables(evaluated)
        reasons = [condition.reason(stats) for condition in self.met] + ([] if why is None else [why])
        if self.limit_reached is not None:
            reasons.append(f"max_steps={self.limit_reached}")
        self.end_by(stats, reasons)

    def end_by(self, stats: TrainStats, reasons: Sequence[str]) -> None:
        """End the run with this row for some reasons; none lets it go on."""
        stats.stop_reason = "; ".join(reasons) or None
        self.last = stats if stats.stop_reason is not None else None

    def overdue(self, stats: TrainStats) -> list[str]:
        """Return why the run ends by the clock alone, between two rows, with the condition noted as met."""
        self.met = [
            condition for condition in self.conditions if any(clock.judge(stats) for clock in _clocks(condition))
        ]
        return [condition.reason(stats) for condition in self.met]

    def _check_callables(self, evaluated: Collection[str]) -> None:
        """Refuse plain callables that read evaluations in a run without any: only a call shows what they read."""
        if _evaluates(self.conditions):
            return
        for part in (part for condition in self.conditions for part in parts(condition)):
            if isinstance(part, FromCallable) and part.missed is not None:
                _check_evaluated(part, {part.missed} - self._measured - set(evaluated))

    @property
    def most_steps(self) -> float:
        """The largest number of steps that the run can have, including those before a resume; infinite if unbounded."""
        limit: int | None = self.options["max_steps"]
        totals: list[float] = [math.inf if limit is None else limit]
        for name, per_step in self._bounded.items():
            totals += [bound / per_step for bound in _bounds(self.conditions, name) if per_step > 0]
        return min(totals)

    def total_steps(self, counters: Mapping[str, int]) -> int | None:
        """Return the length of this `run()` by `max_steps`, or by a counter's bound and rate; None if unbounded."""
        steps, limit = self.steps - self._steps_before, self.options["max_steps"]
        totals: list[int] = [] if limit is None else [limit - self._steps_before]
        for name, expected in self._bounded.items():
            gained = counters[name] - self._counters_before[name]
            per_step = gained / steps if gained > 0 else expected
            for bound in _bounds(self.conditions, name) if per_step > 0 else ():
                left = math.ceil((bound - counters[name]) / per_step)
                totals.append(steps + max(left, 0 if steps else 1))
        return min(totals, default=None)


def _conditions(
    stop_conditions: StopConditions | Condition | EllipsisType | None, planned: RunOptions, trust: Trust
) -> list[Condition]:
    if not isinstance(stop_conditions, EllipsisType):
        return as_conditions(stop_conditions)
    for lost in unwritable_in(planned.stop_conditions):
        raise CheckpointError(f"the stop condition {lost} could not be saved: pass the run's `stop_conditions` again")
    return planned.conditions(trust)


def _evaluates(conditions: Sequence[Condition]) -> bool:
    """Whether a condition makes evaluations without waiting for one."""
    confirmed = [part for condition in conditions for part in _confirmed_in(condition)]
    return any(not _of_evaluations(part.awaited_names) for part in confirmed)


def _confirmed_in(condition: Condition) -> list[Confirmed]:
    return [part for part in parts(condition) if isinstance(part, Confirmed)]


def _check_evaluated(condition: Condition, names: Iterable[str]) -> None:
    for name in _of_evaluations(names):
        raise ValueError(
            f"{condition!r} reads {name!r}, but this run makes no evaluations: give `steps_per_eval`, such as "
            "steps_per_eval=10."
        )


def _of_evaluations(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(keys.EVAL_PREFIX))


def _bounds(conditions: Iterable[Condition], name: str) -> list[float]:
    """List the upper bounds on a metric that each end the run by themselves."""
    bounds = []
    for condition in conditions:
        if isinstance(condition, Or):
            bounds += _bounds(condition.children, name)
        elif isinstance(condition, HitsUpperBound) and condition.name == name:
            bounds.append(condition.bound)
        elif isinstance(condition, Not) and isinstance(condition.condition, HitsLowerBound):  # `name > bound`
            bounds += [condition.condition.bound] if condition.condition.name == name else []
    return bounds


def _clocks(condition: Condition) -> list[WallTime]:
    """List the clocks that each end the run by themselves."""
    if isinstance(condition, Or):
        return [clock for child in condition.children for clock in _clocks(child)]
    return [condition] if isinstance(condition, WallTime) else []


def _named(condition: Condition) -> str:
    """Return the repr of a condition without addresses in memory, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(condition))


def _spec(condition: Condition) -> Any:
    try:
        return to_spec(condition)
    except ValueError:
        return None

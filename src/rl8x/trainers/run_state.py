"""The state of one `run()`: its options, conditions and progress, and their part of a checkpoint."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rl8x import keys
from rl8x.checkpoint import CheckpointError
from rl8x.checkpoint.files import SavedRun
from rl8x.conditions import Condition, Confirmed, HitsLowerBound, HitsUpperBound, Not, Or, WallTime, to_spec
from rl8x.conditions.base import FromCallable, as_conditions, check_names, in_turn, named, nearest_metrics, parts
from rl8x.config.files import unwritable, unwritable_in
from rl8x.config.spec import RunOptions
from rl8x.envs.parameters import function_form, function_name, plain
from rl8x.importing import Trust
from rl8x.plain import thawed
from rl8x.trainers.ranks import SignalGuard
from rl8x.trainers.rows import ProgressReporter, TrainStats

StopConditions = Sequence[Condition | Callable[[Mapping[str, float]], bool]]
_CONFIGS: Final = ("env_config", "eval_env_config")
_NUMBERS: Final = ("steps_per_eval", "evals_per_film", "max_steps")
RUN_OPTIONS: Final = (*_CONFIGS, *_NUMBERS, "stop_conditions")
_GIVE: Final = "this run makes no evaluations: give `steps_per_eval`, such as steps_per_eval=10."


class RunState:
    """The options, conditions and progress of a run; `given` options replace `planned` ones, `saved` is resumed."""

    def __init__(
        self,
        given: Mapping[str, Any],
        planned: RunOptions,
        saved: SavedRun | None,
        *,
        trust: Trust,
        callbacks: Sequence[str] = (),
    ) -> None:
        # Copies, as the script may change its lists; `start` replaces them by parsed ones.
        self.env_config, self.eval_env_config = (thawed(given.get(name, getattr(planned, name))) for name in _CONFIGS)
        lost = function_name(self.env_config)
        if lost is not None:
            raise CheckpointError(
                f"the run's `env_config` is the function {lost}, which cannot be saved: pass it again, as "
                "run(env_config=...)"
            )
        if "stop_conditions" in given:
            self.conditions = as_conditions(given["stop_conditions"])
        else:
            for lost in unwritable_in(planned.stop_conditions):
                raise CheckpointError(f"the stop condition {lost} was not saved: pass `stop_conditions` again")
            self.conditions = planned.conditions(trust)
        self.options = replace(planned, **{name: given[name] for name in _NUMBERS if name in given})
        self.names = list(map(named, self.conditions))  # taken before the first row, which may change an argument
        self.callbacks = tuple(callbacks)  # their names
        self.steps = 0  # includes those before a resume
        self.met: list[Condition] = []  # conditions that the last row met
        self.last: TrainStats | None = None  # the last row, once the run has ended
        self.asked_to_save = False  # by a callback
        self.is_interrupted = False  # by a signal to any rank
        self.reporter: ProgressReporter  # set with `signals` when the run begins
        self.signals: SignalGuard
        self._given = tuple(given)
        self._saved = saved

    # -- before it begins

    def start(
        self,
        trainer: Any,
        configs: Mapping[str, Any],
        *,
        known: Collection[str],
        measured: Collection[str],
        bounded: Mapping[str, int],  # counters that can bound the steps, and their increase per step; 0: unknown
    ) -> None:
        """Store the checked configurations, start the conditions for a trainer, and restore their saved states."""
        saved = self._saved
        if saved is not None and saved["callbacks"] and not self.callbacks:
            warnings.warn(
                f"the run had callbacks, {', '.join(saved['callbacks'])}, which cannot be saved: it continues without "
                "them and their metrics. Trainer.resume(..., callbacks=[...]) gives them again.",
                RuntimeWarning,
                stacklevel=4,
            )
        check_names(self.conditions, known)
        for condition in self.conditions:
            condition.bind(trainer)
            condition.start()
        self.env_config, self.eval_env_config = (configs[name] for name in _CONFIGS)
        written: dict[str, Any] = {name: _plain(configs[name]) for name in _CONFIGS if name in self._given}
        if "stop_conditions" in self._given:
            written["stop_conditions"] = [_spec(each) or unwritable(named(each)) for each in self.conditions]
        self.options = replace(self.options, **written)
        self._measured = frozenset(measured)
        if not self.evaluates:
            for condition in self.conditions:
                self._check_evaluated(condition, condition.awaited_names - self._measured)
        if saved is not None:
            self._go_on(saved)
        self._steps_before, self._counters_before, self._bounded = self.steps, dict(trainer.state), bounded

    def check_followed(self, followed: Mapping[str, str], known: Collection[str], evaluated: Collection[str]) -> None:
        """Raise `ValueError` if a parameter follows a metric that no row will have, as it would never change."""
        for parameter, metric in followed.items():
            if metric not in known:
                raise ValueError(
                    f"`env_config[{parameter!r}]` goes by the metric {metric!r}, which no row will have."
                    f"{nearest_metrics(metric, known)}"
                )
            if metric not in evaluated and self._lacks(metric):
                raise ValueError(f"`env_config[{parameter!r}]` goes by {metric!r}, but {_GIVE}")

    def warn_of_no_best(self, best: str | None) -> None:
        """Warn if an evaluation metric decides the best policy, but neither the run nor a callback evaluates."""
        if best is not None and self._lacks(best):
            warnings.warn(f"no checkpoint will be the best of {best!r}: {_GIVE}", RuntimeWarning, stacklevel=4)

    def _lacks(self, metric: str) -> bool:
        return metric.startswith(keys.EVAL_PREFIX) and not self.evaluates and not self.callbacks

    def _check_evaluated(self, condition: Condition, names: Iterable[str]) -> None:
        for name in sorted(names):
            if name.startswith(keys.EVAL_PREFIX):
                declare = f" A callback that measures it must declare that: CALLBACK.metric_names = [{name!r}]."
                raise ValueError(f"{condition!r} reads {name!r}, but {_GIVE}{declare if self.callbacks else ''}")

    def _go_on(self, saved: SavedRun) -> None:
        """Restore the progress of a saved run; conditions that it did not have start anew."""
        self.steps = saved["steps"]
        entries = list(saved["conditions"])
        for condition, name in zip(self.conditions, self.names, strict=True):
            entry = next((entry for entry in entries if entry["repr"] == name), None)
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
        """Whether an ended run should continue, for more steps or until another condition is met."""
        limit, entries = self.options.max_steps, saved["conditions"]
        if limit is not None and self.steps >= limit:
            return False
        if limit != saved["max_steps"] or self.names != [each["repr"] for each in entries]:
            return True
        # Plain callables cannot be compared, so those that ended the run are called again with its last row.
        met = [condition for condition, entry in zip(self.conditions, entries, strict=True) if entry["met"]]
        return bool(met) and all(_spec(each) is None and not each(saved["row"] or {}) for each in met)

    def state_dict(self) -> SavedRun:
        """Return the state that the run needs to continue after the current step."""
        last = self.last
        return {
            "steps": self.steps,
            "max_steps": self.options.max_steps,
            "conditions": [
                {"repr": name, "state": condition.state_dict(), "met": any(condition is met for met in self.met)}
                for condition, name in zip(self.conditions, self.names, strict=True)
            ],
            "callbacks": list(self.callbacks),
            "row": None if last is None else dict(last),
            "stop_reason": None if last is None else last.stop_reason,
        }

    @property
    def evaluates(self) -> bool:
        """Whether the run makes evaluations itself, every `steps_per_eval` or for a `Confirmed` condition."""
        confirmed = [part for each in self.conditions for part in parts(each) if isinstance(part, Confirmed)]
        waits = [any(name.startswith(keys.EVAL_PREFIX) for name in part.awaited_names) for part in confirmed]
        return not all(waits) or self.options.steps_per_eval is not None

    # -- while it runs

    @property
    def has_stepped(self) -> bool:
        """Whether this `run()` has made a step."""
        return self.steps > self._steps_before

    @property
    def evaluation_is_due(self) -> bool:
        """Whether an evaluation comes after the step that was just made."""
        every = self.options.steps_per_eval
        return every is not None and self.steps % every == 0

    @property
    def film_is_due(self) -> bool:
        """Whether a film follows the evaluation after the step that was just made."""
        evals, every = self.options.evals_per_film, self.options.steps_per_eval
        return evals is not None and every is not None and self.steps % (evals * every) == 0

    @property
    def limit_reached(self) -> int | None:
        """`max_steps` if the run has reached it, else None."""
        limit = self.options.max_steps
        return limit if limit is not None and self.steps >= limit else None

    def judge(self, stats: TrainStats, evaluated: Collection[str], why: str | None = None) -> None:
        """Set a row's `stop_reason` if a condition is met, `max_steps` is reached, or `why` is given."""
        # Every condition sees every row: a condition that counts rows must not miss one because another was met.
        met = {id(condition) for condition in in_turn(self.conditions) if condition(stats)}
        self.met = [condition for condition in self.conditions if id(condition) in met]
        if not self.evaluates:  # only a call shows which metrics a plain callable reads
            for part in (part for condition in self.conditions for part in parts(condition)):
                if isinstance(part, FromCallable) and part.missed is not None:
                    self._check_evaluated(part, {part.missed} - self._measured - set(evaluated))
        reasons = [condition.reason(stats) for condition in self.met] + ([] if why is None else [why])
        if self.limit_reached is not None:
            reasons.append(f"max_steps={self.limit_reached}")
        self.end_by(stats, reasons)

    def end_by(self, stats: TrainStats, reasons: Sequence[str]) -> None:
        """End the run with this row for the given reasons; without reasons the run goes on."""
        stats.stop_reason = "; ".join(reasons) or None
        self.last = stats if stats.stop_reason is not None else None

    def overdue(self, stats: TrainStats) -> list[str]:
        """Return the reasons to end the run between two rows, by `WallTime` alone; set `met` to these conditions."""
        self.met = [
            condition
            for condition in self.conditions
            if any(isinstance(clock, WallTime) and clock.judge(stats) for clock in _alternatives([condition]))
        ]
        return [condition.reason(stats) for condition in self.met]

    @property
    def most_steps(self) -> float:
        """The upper bound on the run's steps, including those before a resume; infinite if unbounded."""
        limit = self.options.max_steps
        totals: list[float] = [math.inf if limit is None else limit]
        for name, per_step in self._bounded.items():
            totals += [bound / per_step for bound in _bounds(self.conditions, name) if per_step > 0]
        return min(totals)

    def total_steps(self, counters: Mapping[str, int]) -> int | None:
        """Estimate the steps of this `run()` from `max_steps` or a counter's bound and rate; None if unbounded."""
        steps, limit = self.steps - self._steps_before, self.options.max_steps
        totals: list[int] = [] if limit is None else [limit - self._steps_before]
        for name, expected in self._bounded.items():
            gained = counters[name] - self._counters_before[name]
            per_step = gained / steps if gained > 0 else expected
            for bound in _bounds(self.conditions, name) if per_step > 0 else ():
                left = math.ceil((bound - counters[name]) / per_step)
                totals.append(steps + max(left, 0 if steps else 1))
        return min(totals, default=None)


def _alternatives(conditions: Iterable[Condition]) -> Iterator[Condition]:
    """Yield the conditions that each end the run by themselves."""
    for condition in conditions:
        yield from _alternatives(condition.children) if isinstance(condition, Or) else (condition,)


def _bounds(conditions: Iterable[Condition], name: str) -> list[float]:
    """List the upper bounds on a metric that each end the run by themselves."""
    bounds = []
    for each in _alternatives(conditions):
        above = each.condition if isinstance(each, Not) else None  # `name > bound`
        bound = each if isinstance(each, HitsUpperBound) else above if isinstance(above, HitsLowerBound) else None
        bounds += [bound.bound] if bound is not None and bound.name == name else []
    return bounds


def _plain(config: Any) -> Any:
    """Return a configuration, which is a mapping, a function or None, as plain data."""
    if callable(config):
        return function_form(config)
    return None if config is None else plain(config)


def _spec(condition: Condition) -> Any:
    try:
        return to_spec(condition)
    except ValueError:
        return None

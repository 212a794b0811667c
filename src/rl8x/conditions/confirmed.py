"""A condition that is believed only after an evaluation."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, Protocol, cast, runtime_checkable

from rl8x import keys
from rl8x.conditions.base import Condition, ConditionLike, Stats, Verdict, as_condition
from rl8x.conditions.metrics import checked_count
from rl8x.distributed import ranks

_GIVE_BY: Final = "`by` is a condition on eval/* metrics, such as by=HitsUpperBound('eval/returns/mean', 100)."


@runtime_checkable
class Evaluator(Protocol):
    """The questions that `Confirmed` asks a trainer."""

    def evaluate_now(self) -> Mapping[str, float] | None:
        """Evaluate the present policy, log it, and return the fresh `eval/*` metrics; None if it cannot be done now."""

    def evaluation_name(self, name: str) -> str | None:
        """Map a metric of a training row to that of an evaluation; see `EvaluationName`."""


class Confirmed(Condition):
    """Met when a condition is, and then each of some fresh evaluations of the present policy confirms it.

    Train statistics are noisy and lag behind the policy. Whenever `condition` is met, the trainer evaluates; only if
    every one of `evaluations` evaluations confirms it is this condition met. Where the trainer cannot evaluate now,
    the next row in which `condition` is met asks again. What was measured joins the row, for the other conditions too.

    Args:
        condition: The condition on the rows, usually on train metrics.
        evaluations: How many evaluations must confirm it, at least 1.
        by: The condition on the evaluation's `eval/*` metrics, and the rest of the row. None: `condition` itself on the
            metrics by which the trainer's evaluations measure the same. `HitsUpperBound("episodes/returns/mean", 9)` is
            confirmed by `HitsUpperBound("eval/returns/mean", 9)` where whole episodes are played; a horizon's
            `returns/*` have nothing of the kind there, and are refused. Conditions that count rows have no such form,
            plain callables neither: give `by`.

    Raises:
        TypeError: If a condition is none.
        ValueError: If `evaluations` is less than 1, or an evaluation cannot decide the condition and `by` is None, or
            `by` reads metrics of training alone.
    """

    condition_arguments = ("condition", "by")
    evaluates = True

    def __init__(self, condition: ConditionLike, evaluations: int = 1, by: ConditionLike | None = None) -> None:
        self.condition = as_condition(condition)
        self.evaluations = checked_count(evaluations, "Confirmed", "evaluations")
        self.by = None if by is None else as_condition(by)
        if self.by is None:
            form = self.condition.on_evaluation(_prefixed)
            if form is None or not any(name.startswith(keys.EVAL_PREFIX) for name in form.metric_names):
                raise ValueError(f"Confirmed: an evaluation cannot decide {self.condition!r}; give `by`. {_GIVE_BY}")
        elif self.by.metric_names and not any(name.startswith(keys.EVAL_PREFIX) for name in self.by.metric_names):
            raise ValueError(f"Confirmed: no evaluation measures what by={self.by!r} reads. {_GIVE_BY}")
        self.test = self.by
        self._trainer: Evaluator | None = None
        self._measured: Mapping[str, float] = {}

    @property
    def awaited_names(self) -> set[str]:
        """Those of the condition; what `by` reads is measured when it is asked."""
        return self.condition.awaited_names

    @property
    def children(self) -> tuple[Condition, ...]:
        """The condition, and `by` where it was given."""
        return (self.condition,) if self.by is None else (self.condition, self.by)

    def bind(self, trainer: object) -> None:
        """Take the trainer that evaluates.

        Raises:
            TypeError: If it has no `evaluate_now`.
            ValueError: If its evaluations measure something else than the condition reads.
        """
        super().bind(trainer)
        if not isinstance(trainer, Evaluator):
            raise TypeError(f"Confirmed needs a trainer with evaluate_now(); got {type(trainer).__name__}.")
        self._trainer = trainer
        if self.by is not None:
            return
        self.test = self.condition.on_evaluation(trainer.evaluation_name)
        if self.test is None:
            odd = sorted(name for name in self.condition.metric_names if trainer.evaluation_name(name) is None)
            other = [name for name in keys.TRAINED_RETURNS if trainer.evaluation_name(name)]
            raise ValueError(
                f"{self!r}: no evaluation of this trainer measures what {' and '.join(odd)} is in a row of training. "
                f"Watch {' or '.join(other)}, or give `by`. {_GIVE_BY}"
            )

    def judge(self, stats: Stats) -> Verdict:
        """Judge the condition; where it is met, evaluate.

        Args:
            stats: Metrics by name.

        Returns:
            Whether the condition is met and confirmed; None where the row lacks what it needs, or nothing was measured
            that could decide it.

        Raises:
            RuntimeError: If it was bound to no trainer.
        """
        verdict = self.condition.judge(stats)
        # A callable may be met on one rank alone, and all have to evaluate.
        if not ranks().any("what is to be confirmed", verdict is True):
            return verdict
        if self._trainer is None or self.test is None:
            raise RuntimeError("Confirmed evaluates through a trainer: pass it to run(), or call bind(trainer) first.")
        for _ in range(self.evaluations):
            measured = self._trainer.evaluate_now()
            if measured is None:
                return None
            self._measured = measured
            confirmed = self.test.judge(_joined(measured, stats))
            if not ranks().all("what was measured", confirmed is True):
                return False if ranks().any("what was refuted", confirmed is False) else None
        return True

    def own_state(self) -> dict[str, Any]:
        """Nothing: what it measured is of one row."""
        return {}

    def reason(self, stats: Stats) -> str:
        """Say why the condition is met, and what the last evaluation measured."""
        names = sorted(self.condition.metric_names | (set() if self.test is None else self.test.metric_names))
        row = _joined(self._measured, stats)
        return f"{self!r}: {', '.join(f'{name} = {row[name]:g}' for name in names if name in row)}"


def _prefixed(name: str) -> str:
    """Return the name that an evaluation may have for a metric, as long as there is no trainer to ask."""
    return keys.EVAL_PREFIX + name if name in keys.COLLECT_METRICS or name.startswith(keys.INFO_PREFIX) else name


def _joined(measured: Mapping[str, float], stats: Stats) -> Stats:
    """The row with the evaluation in front; without the row's `fresh`, since all that was measured is."""
    # A ChainMap only writes to its first mapping, and nobody writes here.
    return ChainMap(cast("MutableMapping[str, float]", measured), cast("MutableMapping[str, float]", stats))

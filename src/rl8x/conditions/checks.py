"""Checks of the stop conditions that users give."""

from __future__ import annotations

from collections.abc import Iterable

from rl8x.conditions.base import Condition, ConditionLike, as_condition, parts, remembers, unknown_metric


def as_conditions(conditions: ConditionLike | Iterable[ConditionLike] | None) -> list[Condition]:
    """Return the stop conditions of a user as a list of conditions.

    Args:
        conditions: None, one, or several; see `as_condition`.

    Raises:
        TypeError: If one is neither a condition nor a callable.
        ValueError: If one that remembers something occurs twice: it would see every row twice.
    """
    if conditions is None:
        return []
    if isinstance(conditions, Condition) or callable(conditions):
        conditions = [conditions]
    if isinstance(conditions, str) or not isinstance(conditions, Iterable):
        raise TypeError(f"`stop_conditions` must be a list of conditions; got {conditions!r}.")
    listed = [as_condition(condition) for condition in conditions]
    seen: set[int] = set()
    for condition in (part for root in listed for part in parts(root)):
        if id(condition) in seen and remembers(condition):
            raise ValueError(f"{condition!r} occurs twice and would count every row twice. Make one for each place.")
        seen.add(id(condition))
    return listed


def check_names(conditions: Iterable[Condition], known: Iterable[str]) -> None:
    """Check that rows can have the metrics that conditions read.

    Args:
        conditions: The conditions, with all that they are composed of.
        known: Names of the metrics that a row can have.

    Raises:
        ValueError: At the first condition on another metric, with the nearest of `known`.
    """
    names = list(known)
    for condition in conditions:
        for name in sorted(condition.metric_names):
            if name not in names:
                raise ValueError(unknown_metric(name, repr(condition), names))

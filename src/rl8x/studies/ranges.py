"""Ranges that a search draws hyperparameters from, such as `{"log_uniform": [1e-4, 1e-2]}`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from rl8x.names import did_you_mean

RANGES: Final = ("uniform", "log_uniform", "int", "log_int", "choice")


def check_range(name: str, values: Mapping[str, Any]) -> None:
    """Refuse a range that is none, with a `ValueError`."""
    kind = next(iter(values), None)
    if len(values) != 1 or kind not in RANGES:
        hint = did_you_mean(kind, RANGES)
        raise ValueError(f"vary[{name!r}] must be a list, or one of {', '.join(RANGES)}; got {dict(values)!r}.{hint}")
    given = values[kind]
    if not isinstance(given, list) or not given:
        raise ValueError(f"vary[{name!r}]: {kind!r} takes a list; got {given!r}.")
    if kind == "choice":
        return
    whole = kind in ("int", "log_int")
    legal = len(given) == 2 and all(
        type(end) is int if whole else isinstance(end, int | float) and not isinstance(end, bool) and math.isfinite(end)
        for end in given
    )
    if not legal or not given[0] < given[1] or (kind.startswith("log") and given[0] <= 0):
        need = "two whole numbers" if whole else "two finite numbers"
        raise ValueError(
            f"vary[{name!r}]: {kind!r} takes {need}, the lower one first"
            + (", above 0" if kind.startswith("log") else "")
            + f"; got {given!r}."
        )


def ends_of(values: Mapping[str, Any]) -> list[Any]:
    """Return the two ends of a range, or all that a choice has."""
    (given,) = values.values()
    return list(given)


def suggest(trial: Any, name: str, values: Any) -> Any:
    """Have one of Optuna's trials draw a value, of a range or a list."""
    if isinstance(values, list):
        kind, given = "choice", values
    else:
        ((kind, given),) = values.items()
    if kind == "choice":
        # Texts, since a storage takes no lists and mappings.
        return json.loads(trial.suggest_categorical(name, [json.dumps(value) for value in given]))
    if kind in ("int", "log_int"):
        return trial.suggest_int(name, *given, log=kind == "log_int")
    return trial.suggest_float(name, *given, log=kind == "log_uniform")

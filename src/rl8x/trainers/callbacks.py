"""Metrics that callbacks measure: declared by name, so that conditions can ask for them, and tracked."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rl8x import keys
from rl8x.tracking.protocol import legal_name, metric_value
from rl8x.trainers.statistics import TrainStats

# Called with the trainer and a row.
Callback = Callable[[Any, TrainStats], Mapping[str, float] | None]


def declared_metrics(callback: object) -> tuple[str, ...]:
    """Return the metrics that a callback declares in its attribute `metric_names`, if it has one."""
    names: Any = getattr(callback, "metric_names", ())
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(
            f"`metric_names` of the callback {callback_name(callback)} must be a list of names; got {names!r}."
        )
    return tuple(names)


def declared_by(callbacks: Iterable[Callback]) -> set[str]:
    """Return the metrics that any of the callbacks declares."""
    return {name for callback in callbacks for name in declared_metrics(callback)}


def check_callbacks(callbacks: Sequence[Callback], known: Collection[str]) -> None:
    """Refuse callbacks that cannot be called, and declared names that MLflow refuses or that are taken.

    Of the trainer's metrics (`known`) callbacks may declare `eval/*`, which a `trainer.eval()` in them measures.
    """
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"`callbacks` must be a list of callbacks; got {callbacks!r}.")
    taken = dict.fromkeys((name for name in known if not name.startswith(keys.EVAL_PREFIX)), "the trainer")
    for callback in callbacks:
        if not callable(callback):
            raise TypeError(f"A callback is called with the trainer and a row of statistics; got {callback!r}.")
        for name in declared_metrics(callback):
            if not isinstance(name, str) or not name.strip("/") or legal_name(name) != name:
                raise ValueError(
                    f"The callback {callback_name(callback)} declares {name!r}, which is not a legal name of a metric."
                )
            if name in taken:
                raise ValueError(
                    f"The callback {callback_name(callback)} declares {name!r}, which is a metric of {taken[name]}. "
                    "Give it another name."
                )
            taken[name] = f"the callback {callback_name(callback)}"


def returned_metrics(
    callback: Callback, returned: object, evaluated: Collection[str], row: Collection[str] = ()
) -> dict[str, float]:
    """Check what a callback returned, and return it as numbers; a callback without declared metrics returns none.

    Metrics of evaluations that it made (`evaluated`) need not be declared. If a callback that declares nothing returns
    a name that is neither one of these nor in the row, it was meant as a metric, and a warning says how to declare it.
    """
    declared, called = declared_metrics(callback), callback_name(callback)
    if not declared:
        warning = None if returned is None else _meant(called, returned, {*evaluated, *row})
        if warning is not None:
            warnings.warn(f"the callback {called} returned {warning}", RuntimeWarning, stacklevel=5)
        return {}
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"The callback {called} must return its metrics by name, or None; got {returned!r}. To end the run call "
            "trainer.stop('why')."
        )
    for name in returned:
        if name not in declared and name not in evaluated:
            near = difflib.get_close_matches(str(name), declared, n=3, cutoff=0.0)
            raise ValueError(
                f"The callback {called} returned {name!r}, which its `metric_names` do not have. Nearest: "
                f"{', '.join(near)}."
            )
    return {name: metric_value(name, value) for name, value in returned.items()}


def _meant(called: str, returned: object, known: Collection[str]) -> str | None:
    """Say what a callback that declares no metrics may have meant by what it returned, if anything."""
    if isinstance(returned, bool | np.bool_) and not returned:
        return "False, which does not end the run: call trainer.stop('why') for that, and return nothing."
    names = [name for name in returned if name not in known] if isinstance(returned, Mapping) else []
    new = [name for name in names if not str(name).startswith((keys.EVAL_PREFIX, "profiling/"))]
    if not new:
        return None
    return f"{new[0]!r}, which is not tracked: it declares no metrics. Write {called}.metric_names = {new!r}."


def callback_name(callback: object) -> str:
    """Return the name of a callback in messages: its own, or that of its class."""
    name: str = getattr(callback, "__qualname__", None) or type(callback).__name__
    return name.rpartition("<locals>.")[-1]

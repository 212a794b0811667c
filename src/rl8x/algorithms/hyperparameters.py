"""Declares hyperparameters as fields of frozen dataclasses: default, legal range and help text in one place."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from rl8x.distributed import ranks
from rl8x.names import called_here
from rl8x.plain import frozen

T = TypeVar("T")


class Default(int):
    """A default that gives way to what fits better; `dataclasses.replace` and copies keep it as such."""


def option(
    default: T,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    choices: Iterable[Any] = (),
) -> T:
    """Declare a hyperparameter."""
    metadata = {"help": help, "low": low, "high": high, "above": above, "choices": tuple(choices)}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def kind_of(field: dataclasses.Field[Any]) -> str:
    """Return a field's type as written, such as `int | None`, whether its module postpones annotations or not."""
    return field.type.__name__ if isinstance(field.type, type) else str(field.type)


def check_options(config: Any) -> None:
    """Check every field of a config against what its `option` declares, and make its value the config's own."""
    for field in dataclasses.fields(config):
        value = frozen(getattr(config, field.name))
        declared = field.metadata
        if isinstance(value, np.generic):  # such as np.int64(64)
            value = value.item()
        object.__setattr__(config, field.name, value)
        if not declared or (value is None and _may_be_none(field)):
            continue
        if value is None:
            raise TypeError(f"`{field.name}` must be {kind_of(field)}; got None. Leave it out for its default.")
        if declared["choices"]:
            if value not in declared["choices"]:
                raise ValueError(_not_a_choice(field.name, value, declared["choices"]))
            continue
        _check_kind(field, value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_range(field.name, value, declared)


def _may_be_none(field: dataclasses.Field[Any]) -> bool:
    kind = kind_of(field)
    return field.default is None or kind == "Any" or "None" in kind or "Optional" in kind


def _check_kind(field: dataclasses.Field[Any], value: Any) -> None:
    kinds = kind_of(field)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kinds.startswith("int") and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"`{field.name}` must be a whole number; got {value!r}.")
    if kinds in ("float", "float | None") and not number:
        raise TypeError(f"`{field.name}` must be a number; got {value!r}.")
    if kinds.startswith("bool") and not isinstance(value, bool):
        raise TypeError(f"`{field.name}` must be true or false; got {value!r}.")
    if kinds.startswith("dict") and not isinstance(value, dict):
        example = re.search(r"such as \{(?:[^{}]|\{[^{}]*\})*\}", field.metadata["help"])
        legal = f"a mapping of names to values{f', {example[0]}' if example else ''}"
        raise TypeError(f"`{field.name}` must be {legal}; got {value!r}.")


def _check_range(name: str, value: float, declared: Any) -> None:
    low, high, above = declared["low"], declared["high"], declared["above"]
    if low <= value <= high and value > above and math.isfinite(value):
        return
    bounds = []
    if above > -math.inf:
        bounds.append(f"greater than {above:g}")
    if low > -math.inf:
        bounds.append(f"at least {low:g}")
    if high < math.inf:
        bounds.append(f"at most {high:g}")
    if not math.isfinite(value):
        bounds = ["finite"]
    raise ValueError(f"`{name}` must be {' and '.join(bounds)}; got {value!r}.")


def _not_a_choice(name: str, value: Any, choices: Iterable[Any]) -> str:
    return f"`{name}` must be one of {', '.join(map(repr, choices))}; got {value!r}."


def check_names(names: Iterable[str], config_class: type) -> None:
    """Raise a `ValueError` at the first name that is not a hyperparameter of a config class, with suggestions."""
    check_names_in(names, [field.name for field in dataclasses.fields(config_class)], config_class.__name__)


def check_names_in(names: Iterable[str], legal: Iterable[str], owner: str) -> None:
    """Raise a `ValueError` at the first name that is not among the legal ones, with suggestions."""
    legal = list(legal)
    for name in names:
        if name not in legal:
            near = difflib.get_close_matches(str(name), legal, n=3, cutoff=0.5)
            listed = f" Nearest: {', '.join(near)}." if near else f" There are {', '.join(legal)}."
            raise ValueError(f"{owner} has no option {name!r}.{called_here(name, legal) or listed}")


def given_for_nothing(config: Any, names: Iterable[str], why: str) -> dict[str, str]:
    """Return which of some hyperparameters were given, not at their defaults, as `name=value`, each with a reason."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    values = {name: getattr(config, name) for name in names}
    return {f"{name}={value!r}": why for name, value in values.items() if value != defaults[name]}


def replaced_by_schedules(config: Any) -> dict[str, str]:
    """Return the constants that schedules replace and do not begin with, as `given_for_nothing` does."""
    names: set[str] = {field.name for field in dataclasses.fields(config)}
    unused: dict[str, str] = {}
    for field in dataclasses.fields(config):
        name, schedule = field.name.removesuffix("_schedule"), getattr(config, field.name)
        if name == field.name or name not in names or "list[list[float]]" not in kind_of(field) or schedule is None:
            continue
        if getattr(config, name) != config.schedule(name)(0):
            why = (
                f"`{name}_schedule` replaces it. Leave one of them out, or set {name}_schedule=None if a preset sets it"
            )
            unused |= given_for_nothing(config, [name], why)
    return unused


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the named device, `"auto"` being CUDA if available; each of several ranks has its own."""
    if str(device) == "auto" or (str(device) == "cuda" and ranks().size > 1):
        return ranks().device
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"`device` must be 'auto' or a device of this machine; got {str(device)!r} ({reason})."
        ) from None
    return resolved


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of a number that is nearest to the wanted value."""
    divisors = {size for low in range(1, int(number**0.5) + 1) if number % low == 0 for size in (low, number // low)}
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))


def flatten_params(name: str, value: Any) -> dict[str, Any]:
    """Flatten nested mappings to dotted names; replace classes and modules by their class names."""
    if isinstance(value, Mapping):
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat.update(flatten_params(f"{name}.{key}", item))
        return flat
    if isinstance(value, type):
        return {name: qualified_name(value)}
    if isinstance(value, nn.Module):
        return {name: qualified_name(type(value))}
    return {name: value}


def qualified_name(cls: type) -> str:
    """Return the dotted path of a class, or its bare name if it is rl8x's own."""
    return cls.__name__ if cls.__module__.startswith("rl8x.") else f"{cls.__module__}.{cls.__qualname__}"

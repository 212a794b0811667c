"""The values of a study's config in the form that it keeps: plain data, listed seeds and points."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl8x.config.files import shortened
from rl8x.importing import CLASS


def comparable_text(value: Any) -> str:
    """Return a text that is equal for equal values, such as 1 and 1.0."""
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, sort_keys=True)


def listed_seeds(seeds: Any) -> list[int]:
    """Return the seeds of each training as a list: 0, 1, ... where their number is given.

    Raises:
        ValueError: If it is neither a number of seeds nor a list of different whole numbers.
    """
    if type(seeds) is int and 1 <= seeds <= 10_000:
        return list(range(seeds))
    if (
        not isinstance(seeds, list)
        or not seeds
        or any(type(seed) is not int or seed < 0 for seed in seeds)
        or len(set(seeds)) < len(seeds)
    ):
        raise ValueError(f"`seeds` must be their number, or a list of different whole numbers; got {shortened(seeds)}.")
    return list(seeds)


def listed_points(points: Any) -> Any:
    """Return the steps of the trainer at which to evaluate, sorted where they are a list; a number or None stays.

    Raises:
        ValueError: If it is none of these.
    """
    listed = points if isinstance(points, list) else [1 if points is None else points]
    if any(type(point) is not int or point < 1 for point in listed):
        raise ValueError(f"`evaluate_at` must be a list of steps, or a number for every so many; got {points!r}.")
    return sorted(set(points)) if isinstance(points, list) else points


def plain_value(value: Any, where: str) -> Any:
    """Return a value of a script as plain data: distributions, arrays and classes in their forms in files.

    Raises:
        TypeError: If it has no such form.
    """
    if hasattr(value, "to_dict") and not isinstance(value, type):
        return plain_value(value.to_dict(), where)
    if isinstance(value, type):
        path = f"{value.__module__}.{value.__qualname__}"
        return path if where.endswith((".env", ".algorithm", ".eval_env")) else {CLASS: path}
    if isinstance(value, Mapping):
        return {str(name): plain_value(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, range | Sequence) and not isinstance(value, str):
        return [plain_value(item, where) for item in value]
    if value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"`{where}` must be what a file can say; got {shortened(value)}.")
    return value


def short_text(value: Any, *, rounds: bool) -> str:
    """Return a value as a short text; floats may be rounded to four digits where `rounds`."""
    if isinstance(value, float):
        short = f"{value:.4g}"
        return short if rounds or float(short) == value else repr(value)
    return value if isinstance(value, str) else json.dumps(value)

"""The forms that an `env_config` has, and how one is told from another.

- **Given** (`EnvConfig`): names of parameters to a number, a number for each copy (a sequence, a tensor or an array), a
  distribution of `randomization`, or a distribution's plain form. It is what users and environments' methods take.
- **A function** (`EnvConfigFunction`), which is called before each collect and returns values in the given form.
  Algorithms and trainers take it too (`AnyEnvConfig`); environments get what it returns.
- **Plain** (`PlainConfig`): numbers, lists of them, and distributions as `{kind: arguments}`, as JSON and YAML have
  them. `Env.config` is of this form, as is all of run files and checkpoints. A function is its name there
  (`function_form`).
- **Resolved** (`parameters.ResolvedConfig`): tensors and distributions on a device, within the bounds that an
  environment declares. `parameters.resolve_config` alone makes it, of given and plain values alike; it keeps the plain
  form too.

Values are looked into here and by `resolve_config` alone; a distribution's plain form is read by `parsed_value`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from torch import Tensor

from rl8x import randomization
from rl8x.randomization import Choice, Grid, ParameterDistribution
from rl8x.randomization.scheduled import Scheduled

ParameterValue: TypeAlias = float | Sequence[float] | Tensor | np.ndarray | ParameterDistribution | Mapping[str, object]
EnvConfig: TypeAlias = Mapping[str, ParameterValue]
EnvConfigFunction: TypeAlias = Callable[[Mapping[str, float]], Mapping[str, Any]]
AnyEnvConfig: TypeAlias = Mapping[str, Any] | EnvConfigFunction
PlainConfig: TypeAlias = Mapping[str, object]

# The name under which the plain form of a function has the function's; no parameter is called so.
_FUNCTION: Final = "function()"
# Characters up to which a run's params show a value as it is
_SHOWN_LENGTH: Final = 100


def parsed_value(value: object) -> object:
    """Return a parameter's value with a distribution's plain form as the distribution.

    Args:
        value: In the given or the plain form.

    Returns:
        A `ParameterDistribution`, or the value as it is: a number, or a number for each copy.

    Raises:
        ValueError: If a mapping is not a distribution's plain form.
    """
    return randomization.from_dict(value) if isinstance(value, Mapping) else value


def function_form(function: EnvConfigFunction) -> dict[str, object]:
    """Return the plain form of an `env_config` that is a function: its name, by which it cannot be made again."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return {_FUNCTION: f"{getattr(function, '__module__', '')}.{name}"}


def function_name(config: object) -> str | None:
    """Return the name of the function that an `env_config` in plain form stands for; None where it has values."""
    return str(config[_FUNCTION]) if isinstance(config, Mapping) and _FUNCTION in config else None


def inherited_config(config: PlainConfig, num_envs: int) -> dict[str, Any]:
    """Fit a training's configuration in plain form to an evaluation's number of copies.

    Of values for each copy, and of a `Grid` of more values than there are copies, the copies take evenly spaced ones.
    """
    fitted: dict[str, Any] = {}
    for name, value in config.items():
        grid: Any = value.get(Grid.kind) if isinstance(value, Mapping) else None
        values: Any = grid if grid is not None and len(grid) > num_envs else value
        if isinstance(values, list) and len(values) != num_envs:
            values = [values[(2 * i + 1) * len(values) // (2 * num_envs)] for i in range(num_envs)]
        fitted[name] = values
    return fitted


def part_of_config(config: EnvConfig, num_envs: int, part: range) -> dict[str, Any]:
    """Return what a part of the copies has, of values for each copy and of a `Grid` of more values than it has copies.

    Args:
        config: A configuration of all copies.
        num_envs: How many they are.
        part: Those that are meant.

    Returns:
        Values for each copy of the part, by name; without parameters that all copies have alike.
    """
    parts = {}
    for name, value in config.items():
        grid = parsed_value(value) if isinstance(value, Mapping) and Grid.kind in value else value
        values: Any = grid.values if isinstance(grid, Grid) else value
        values = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
        fits = len(part) < len(values) <= num_envs if isinstance(grid, Grid) else np.shape(values) == (num_envs,)
        if fits:
            parts[name] = [values[i % len(values)] for i in part]
    return parts


def moving_in(config: PlainConfig) -> dict[str, object]:
    """Return the part of an `env_config` in plain form that moves while a policy trains."""
    parsed = {name: parsed_value(value) for name, value in config.items()}
    return {name: config[name] for name, drawn in parsed.items() if getattr(drawn, "moves", False)}


def followed_in(config: PlainConfig) -> dict[str, str]:
    """Return the metric of the trainer's row that each scheduled parameter of a configuration in plain form goes by."""
    parsed = {name: parsed_value(value) for name, value in config.items()}
    return {name: drawn.by for name, drawn in parsed.items() if isinstance(drawn, Scheduled)}


def shown_value(value: object) -> object:
    """Return a value in plain form as a run's params show it.

    A number stays one; the others become a text such as `Uniform(0.25, 1.0)` or `200 values from 0.25 to 1.0`.
    """
    shown = parsed_value(value)
    if len(repr(shown)) <= _SHOWN_LENGTH or not isinstance(shown, Choice | Grid | list):
        return repr(shown) if isinstance(value, Mapping | list) else value
    values = shown if isinstance(shown, list) else shown.values
    text = f"{len(values)} values from {min(values)} to {max(values)}"
    if isinstance(shown, list):
        return text
    return f"{type(shown).__name__} of {text}" + (", weighted" if getattr(shown, "weights", None) is not None else "")

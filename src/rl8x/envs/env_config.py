"""What an `env_config` may be: values by the names of parameters, or a function that returns such values.

- **Given**: names of parameters to a number, a number for each copy, or a distribution of `randomization`. Users may
  give sequences, tensors and a distribution's plain form too (`EnvConfig`); `parsed` replaces these, and whoever comes
  after it looks at numbers, tuples and distributions alone.
- **A function** (`EnvConfigFunction`), which is called before each collect and returns such values. Algorithms and
  trainers take it too (`AnyEnvConfig`).
- **Resolved** (`parameters.ResolvedConfig`): tensors and distributions on a device, within the declared bounds.

Files have the plain form (`plain`): numbers, lists, and distributions as `{kind: arguments}`; of a function its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from torch import Tensor

from rl8x import randomization
from rl8x.randomization import Choice, Grid, ParameterDistribution, Scheduled

ParameterValue: TypeAlias = float | Sequence[float] | Tensor | np.ndarray | ParameterDistribution | Mapping[str, object]
EnvConfig: TypeAlias = Mapping[str, ParameterValue]
EnvConfigFunction: TypeAlias = Callable[[Mapping[str, float]], Mapping[str, Any]]
AnyEnvConfig: TypeAlias = Mapping[str, Any] | EnvConfigFunction
Given: TypeAlias = Mapping[str, Any]
"""What `parsed` returns."""

# The name under which the plain form of a function has the function's; no parameter is called so.
_FUNCTION: Final = "function()"
# Characters up to which a run's params show a value as it is
_SHOWN_LENGTH: Final = 100


def parsed(config: EnvConfig, owner: str = "env_config") -> dict[str, Any]:
    """Return values by name: numbers, tuples of numbers, and distributions, also of those in plain form."""
    values = {}
    for name, value in config.items():
        try:
            values[name] = parsed_value(value)
        except ValueError as error:
            raise ValueError(f"{owner}[{name!r}] {error}") from None
    return values


def parsed_value(value: Any) -> Any:
    """Parse one value; see `parsed`."""
    if isinstance(value, Mapping):
        return randomization.from_dict(value)
    value = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    return tuple(value) if isinstance(value, list) else value


def plain(config: Given) -> dict[str, Any]:
    """Return the form of a configuration that files have."""
    forms = {
        name: value.to_dict() if isinstance(value, ParameterDistribution) else value for name, value in config.items()
    }
    return {name: list(value) if isinstance(value, tuple) else value for name, value in forms.items()}


def function_form(function: EnvConfigFunction) -> dict[str, object]:
    """Return the plain form of an `env_config` that is a function: its name, by which it cannot be made again."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return {_FUNCTION: f"{getattr(function, '__module__', '')}.{name}"}


def function_name(config: object) -> str | None:
    """Return the name of the function that an `env_config` in plain form stands for; None where it has values."""
    return str(config[_FUNCTION]) if isinstance(config, Mapping) and _FUNCTION in config else None


def inherited_config(config: EnvConfig, num_envs: int) -> dict[str, Any]:
    """Fit a training's configuration to an evaluation's number of copies.

    Of values for each copy, and of a `Grid` of more values than there are copies, the copies take evenly spaced ones.
    """
    fitted = parsed(config)
    for name, value in fitted.items():
        values = value.values if isinstance(value, Grid) and len(value.values) > num_envs else value
        if isinstance(values, tuple) and len(values) != num_envs:
            fitted[name] = tuple(values[(2 * i + 1) * len(values) // (2 * num_envs)] for i in range(num_envs))
    return fitted


def part_of_config(config: EnvConfig, num_envs: int, part: range) -> dict[str, tuple[float, ...]]:
    """Return the values of a part of all `num_envs` copies, by name, without those that all copies have alike.

    These are of values for each copy, and of a `Grid` of more values than the part has copies.
    """
    parts = {}
    for name, value in parsed(config).items():
        values = value.values if isinstance(value, Grid) else value
        count = len(values) if isinstance(values, tuple) else 0
        if len(part) < count <= num_envs if isinstance(value, Grid) else count == num_envs:
            parts[name] = tuple(values[i % count] for i in part)
    return parts


def moving_in(config: EnvConfig) -> dict[str, ParameterDistribution]:
    """Return the distributions of an `env_config` that move while a policy trains."""
    return {name: value for name, value in parsed(config).items() if getattr(value, "moves", False)}


def followed_in(config: EnvConfig) -> dict[str, str]:
    """Map each `Scheduled` parameter to the metric it follows."""
    return {name: value.by for name, value in parsed(config).items() if isinstance(value, Scheduled)}


def shown_value(value: object) -> object:
    """Return a value as a run's params show it.

    A number stays one; the others become a text such as `Uniform(0.25, 1.0)` or `200 values from 0.25 to 1.0`.
    """
    shown = parsed_value(value)
    if not isinstance(shown, tuple | ParameterDistribution):
        return shown
    text = repr(list(shown) if isinstance(shown, tuple) else shown)
    if len(text) <= _SHOWN_LENGTH or not isinstance(shown, Choice | Grid | tuple):
        return text
    values = shown if isinstance(shown, tuple) else shown.values
    text = f"{len(values)} values from {min(values)} to {max(values)}"
    if isinstance(shown, tuple):
        return text
    return f"{type(shown).__name__} of {text}" + (", weighted" if getattr(shown, "weights", None) is not None else "")

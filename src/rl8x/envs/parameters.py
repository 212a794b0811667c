"""The parameters of an environment, the `env_config` that sets them, and how its values become tensors.

Users map parameter names to numbers, sequences, distributions or their plain forms (`EnvConfig`), or give a function
that returns such a mapping and is called before each collect (`AnyEnvConfig`). `parsed` turns the values into numbers,
tuples and distributions (`Given`), and `resolve_config` turns those into tensors, within the declared bounds. Files
have the plain form (`plain`): numbers, lists, distributions as `{kind: arguments}`, and the name of a function.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rl8x import randomization
from rl8x.names import did_you_mean
from rl8x.output import in_line
from rl8x.randomization import Choice, Grid, ParameterDistribution, Scheduled
from rl8x.randomization.curriculum import RETURNS, Curriculum, make_curricula
from rl8x.randomization.scheduled import NumbersCurriculum, PerCopy
from rl8x.trees import as_tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One number that `env_config` may set.

    Attributes:
        default: Its value if `env_config` does not set it.
        low: The smallest legal value; may be -inf.
        high: The largest legal value; may be inf.
        unit: Its unit, for example `m/s^2`; empty if it has none.
        description: Its meaning in a few words.

    Raises:
        TypeError: If the default or a bound is not a number.
        ValueError: If the default does not lie in the bounds.
    """

    default: float
    low: float
    high: float
    unit: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        for name in ("default", "low", "high"):
            if not isinstance(getattr(self, name), numbers.Real):
                raise TypeError(f"a parameter's `{name}` must be a number; got {getattr(self, name)!r}.")
        if not self.low <= self.default <= self.high:
            raise ValueError(
                f"a parameter's default must lie in its bounds; got {self.default} for [{self.low}, {self.high}]."
            )

    @property
    def bounds(self) -> str:
        """The bounds and the unit for an error message, for example `[0.1, 10] kg`."""
        return f"[{self.low:g}, {self.high:g}]" + (f" {self.unit}" if self.unit else "")


@dataclasses.dataclass(frozen=True)
class ResolvedConfig:
    """An `env_config` that has been checked, as tensors and distributions.

    Attributes:
        given: The values that the user gave: numbers, tuples and distributions.
        fixed: Values that a reset does not change, float32 `[num_envs]`; a value of all copies is stored once.
        drawn: Distributions to draw from at each reset, in the order of their noise columns.
        curricula: Curricula of the parameters that move; their noise columns follow those of `drawn`.
        steered: Whether a function sets it before each collect, so that each parameter is a curriculum.
    """

    given: dict[str, Any]
    fixed: dict[str, Tensor]
    drawn: dict[str, ParameterDistribution]
    curricula: tuple[Curriculum, ...] = ()
    steered: bool = False

    @functools.cached_property
    def noise_width(self) -> int:
        """Uniform numbers that the draw of one copy needs."""
        return len(self.drawn) + sum(each.width for each in self.curricula)

    @property
    def key(self) -> Hashable:
        """A key of the constants in a program that draws: distributions that do not move, and the keys of curricula."""
        return tuple(self.drawn.items()), tuple(each.key for each in self.curricula)

    @functools.cached_property
    def drawn_names(self) -> set[str]:
        """The parameters that a reset changes."""
        return {*self.drawn, *(name for each in self.curricula for name in each.names)}

    @functools.cached_property
    def shown_names(self) -> set[str]:
        """The parameters to report: those that are drawn, or that a function gave."""
        return {*self.given} if self.steered else self.drawn_names

    @functools.cached_property
    def moves_by_returns(self) -> bool:
        """Whether some parameters move with the returns of episodes."""
        return any(each.metric is not None for each in self.curricula)

    def support(self, parameters: Mapping[str, Parameter]) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest value of each parameter, as given; for a moving one, at any time."""
        ends = {}
        for name, parameter in parameters.items():
            value = self.drawn.get(name, self.given.get(name, parameter.default))
            values = value.support if isinstance(value, ParameterDistribution) else np.atleast_1d(value).tolist()
            ends[name] = float(min(values)), float(max(values))
        return ends

    def draw(self, noise: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draw parameters, float32 `[num_envs]` each, and sources, by noise `[num_envs, noise_width]` in [0, 1)."""
        values = {name: drawn.draw(noise[:, i]) for i, (name, drawn) in enumerate(self.drawn.items())}
        sources: dict[str, Tensor] = {}
        first = len(self.drawn)
        for each in self.curricula:
            own_values, own_sources = each.draw(noise[:, first : first + each.width])
            values |= own_values
            sources |= {} if own_sources is None else {each.label: own_sources}
            first += each.width
        return values, sources


def resolve_config(
    config: Given,
    parameters: Mapping[str, Parameter],
    *,
    owner: str,
    num_envs: int,
    device: torch.device,
    copies: str = "num_envs",
    metrics: Sequence[str] = (),
    steered: bool = False,
) -> ResolvedConfig:
    """Check an `env_config` against the parameters of an environment and turn it into tensors."""
    for name in config:
        if name not in parameters:
            legal = ", ".join(f"{key} in {parameter.bounds}" for key, parameter in parameters.items())
            hint = f" has no parameter {name!r}.{did_you_mean(name, parameters)} Legal are {legal}."
            raise ValueError(
                owner + (hint if parameters else f" has {name!r}, but this environment has no parameters.")
            )
    given: dict[str, Any] = {}
    fixed: dict[str, Tensor] = {}
    drawn: dict[str, ParameterDistribution] = {}
    for name, parameter in parameters.items():
        value = config.get(name, parameter.default)
        try:
            if isinstance(value, ParameterDistribution):
                distribution = _within_bounds(value, parameter, num_envs, copies)
                distribution.prepare(device)
                if distribution.fixed:
                    fixed[name] = distribution.draw(torch.zeros(num_envs, device=device))
                else:
                    drawn[name] = distribution
            else:
                numbers = _numbers(value, parameter, num_envs, copies)
                value = tuple(numbers.tolist()) if numbers.ndim else numbers.item()
                fixed[name] = numbers.to(torch.float32)
        except ValueError as error:
            raise ValueError(f"{owner}[{name!r}] {error}") from None
        if name in config:
            given[name] = value
    moving = {name: each for name, each in drawn.items() if each.moves}
    if steered:
        curricula = _steered(fixed, drawn, owner)
    else:
        try:
            curricula = make_curricula(moving) if moving else ()
        except ValueError as error:
            raise ValueError(f"{owner}: {error}") from None
        _check_metrics(curricula, owner, metrics)
    # A number is placed by a fill: a copy from the host would wait for the device each time a function sets it.
    placed = {
        name: values.to(device) if values.ndim else torch.full((1,), values.item(), device=device).expand(num_envs)
        for name, values in fixed.items()
    }
    still = {} if steered else {name: each for name, each in drawn.items() if name not in moving}
    return ResolvedConfig(given, placed, still, curricula, steered)


def _check_metrics(curricula: Sequence[Curriculum], owner: str, metrics: Sequence[str]) -> None:
    """Raise `ValueError` if a curriculum follows a metric that the environment's episodes do not have."""
    for each in curricula:
        if each.metric is not None and each.metric not in (RETURNS, *metrics):
            raise ValueError(
                f"{owner}[{each.names[0]!r}] goes by the metric {each.metric!r}, which episodes of this environment "
                f"do not have.{did_you_mean(each.metric, metrics)} They have {', '.join((RETURNS, *metrics))}."
            )


def _steered(
    fixed: Mapping[str, Tensor], drawn: Mapping[str, ParameterDistribution], owner: str
) -> tuple[Curriculum, ...]:
    """Make each parameter a curriculum, whose numbers programs read at each call."""
    for name, each in drawn.items():
        if each.moves:
            raise ValueError(
                f"{owner}[{name!r}] is {each!r}, which moves by itself: an `env_config` that is a function gives "
                "distributions that stand still, and moves them itself."
            )
    numbers = {name: PerCopy(tuple(values.reshape(-1).tolist())) for name, values in fixed.items()}
    return tuple(NumbersCurriculum({name: each}) for name, each in {**drawn, **numbers}.items())


def _within_bounds(
    value: ParameterDistribution, parameter: Parameter, num_envs: int, copies: str
) -> ParameterDistribution:
    """Clip a distribution to the bounds; raise `ValueError` if it exceeds them, or is a `Grid` of too many values."""
    if isinstance(value, Grid) and len(value.values) > num_envs:
        raise ValueError(
            f"is a Grid of {len(value.values)} values, but there are {num_envs} copies (`{copies}`), and each value "
            f"needs one. Use {copies}={len(value.values)} or more, or draw from the values with Choice."
        )
    clipped = value.clipped(parameter.low, parameter.high)
    low, high = clipped.support
    if low < parameter.low or high > parameter.high:
        raise ValueError(f"must stay in {parameter.bounds}; {value!r} reaches from {low:g} to {high:g}.")
    return clipped


def _numbers(value: object, parameter: Parameter, num_envs: int, copies: str) -> Tensor:
    """Return a legal number or `num_envs` of them as a float64 tensor on the CPU."""
    need = f"must be a number, {num_envs} numbers (one a copy) or a distribution"
    if isinstance(value, str | bool) or value is None:
        raise ValueError(f"{need}; got {value!r}.")
    try:
        # In float64 from the start: the plain form of 0.6 shall be 0.6, not its nearest float32.
        numbers = as_tensor(value).to(torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{need}; got {value!r}.") from None
    if numbers.ndim == 1 and len(numbers) != num_envs:
        raise ValueError(wrong_number(numbers, num_envs, copies))
    if numbers.ndim > 1:
        raise ValueError(f"{need}; got shape {list(numbers.shape)}.")
    # float32 rounding of a legal bound, given as a tensor, must not make it illegal.
    slack = 1e-6 * max((abs(bound) for bound in (parameter.low, parameter.high) if math.isfinite(bound)), default=0.0)
    illegal = ~((numbers >= parameter.low - slack) & (numbers <= parameter.high + slack) & numbers.isfinite())
    if bool(illegal.any()):
        raise ValueError(f"must be in {parameter.bounds}; got {numbers[illegal][0]:g}.")
    return numbers


def wrong_number(values: Sized, num_envs: int, copies: str) -> str:
    """Return the message that the number of values is not that of copies, which the argument `copies` sets."""
    return (
        f"has {len(values)} values for {num_envs} copies (`{copies}`). Give one value for each copy, a number or a "
        "distribution."
    )


ParameterValue: TypeAlias = float | Sequence[float] | Tensor | np.ndarray | ParameterDistribution | Mapping[str, object]
EnvConfig: TypeAlias = Mapping[str, ParameterValue]
EnvConfigFunction: TypeAlias = Callable[[Mapping[str, float]], Mapping[str, Any]]
AnyEnvConfig: TypeAlias = Mapping[str, Any] | EnvConfigFunction
Given: TypeAlias = Mapping[str, Any]
"""Values as `parsed` returns them."""

# The key of a function's name in its plain form; no parameter has this name.
_FUNCTION: Final = "function()"
# The longest text of a value that a run's params show in full, in characters
_SHOWN_LENGTH: Final = 100


def parsed(config: EnvConfig, owner: str = "env_config") -> dict[str, Any]:
    """Parse values, which may be in plain form, into numbers, tuples of numbers and distributions, by name."""
    if not isinstance(config, Mapping):
        raise TypeError(f"{owner} must be a mapping from parameter names to values; got {in_line(repr(config)):.200}.")
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
    """Return the plain form of a configuration, as files have it."""

    def form(value: Any) -> Any:
        if isinstance(value, ParameterDistribution):
            return value.to_dict()
        return list(value) if isinstance(value, tuple) else value

    return {name: form(value) for name, value in config.items()}


def function_form(function: EnvConfigFunction) -> dict[str, object]:
    """Return the plain form of an `env_config` function: its name, from which it cannot be restored."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return {_FUNCTION: f"{getattr(function, '__module__', '')}.{name}"}


def function_name(config: object) -> str | None:
    """Return the function's name if an `env_config` in plain form stands for a function, else None."""
    return str(config[_FUNCTION]) if isinstance(config, Mapping) and _FUNCTION in config else None


def inherited_config(config: EnvConfig, num_envs: int) -> dict[str, Any]:
    """Fit a training's configuration to an evaluation's number of copies.

    From values for each copy, and from a `Grid` with more values than copies, the copies take evenly spaced ones.
    """
    fitted = parsed(config)
    for name, value in fitted.items():
        values = value.values if isinstance(value, Grid) and len(value.values) > num_envs else value
        if isinstance(values, tuple) and len(values) != num_envs:
            fitted[name] = tuple(values[(2 * i + 1) * len(values) // (2 * num_envs)] for i in range(num_envs))
    return fitted


def part_of_config(config: EnvConfig, num_envs: int, part: range) -> dict[str, tuple[float, ...]]:
    """Return, by name, the values of the copies in `part`, of all `num_envs`, if they differ between copies.

    These come from values for each copy, and from a `Grid` with more values than the part has copies.
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
    """Return a value as a run's params show it: a number, or a text such as `Uniform(0.25, 1.0)`.

    Of many values the text is `200 values from 0.25 to 1.0`.
    """
    shown = parsed_value(value)
    if not isinstance(shown, tuple | ParameterDistribution):
        return shown
    text = repr(list(shown) if isinstance(shown, tuple) else shown)
    if len(text) <= _SHOWN_LENGTH or not isinstance(shown, Choice | Grid | tuple):
        return text
    values = shown if isinstance(shown, tuple) else shown.values
    text = f"{len(values)} values from {min(values)} to {max(values)}"
    kind = "" if isinstance(shown, tuple) else f"{type(shown).__name__} of "
    return kind + text + (", weighted" if getattr(shown, "weights", None) is not None else "")

"""The parameters of an environment, the `env_config` that sets them, and how its values become tensors.

Users map parameter names to numbers, sequences, distributions or their plain forms (`EnvConfig`), or give a function
that returns such a mapping and is called before each collect (`AnyEnvConfig`). `parsed` turns every value into a
distribution (`Parsed`), and `resolve_config` turns those into tensors, within the declared bounds. Files have the
plain form (`plain`): numbers, lists, distributions as `{kind: arguments}`, and the name of a function.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rl8x.names import did_you_mean
from rl8x.output import shown
from rl8x.randomization import Choice, Grid, ParameterDistribution, Scheduled
from rl8x.randomization.curriculum import RETURNS, Curriculum, make_curricula
from rl8x.randomization.distributions import Assigned, Constant, PerCopy, parsed_value
from rl8x.randomization.scheduled import NumbersCurriculum
from rl8x.trees import tree_map


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


Parsed: TypeAlias = Mapping[str, ParameterDistribution]
"""An `env_config` as `parsed` returns it; numbers and lists are distributions too, `Constant` and `PerCopy`."""


@dataclasses.dataclass(frozen=True)
class ResolvedConfig:
    """An `env_config` that has been checked, as tensors and distributions."""

    config: dict[str, ParameterDistribution]  # what the user gave
    fixed: dict[str, Tensor]  # not changed by resets, float32 `[num_envs]`; a value of all rows is stored once
    drawn: dict[str, ParameterDistribution]  # drawn from at each reset, in the order of their noise columns
    curricula: tuple[Curriculum, ...] = ()  # of the parameters that move; their noise follows that of `drawn`
    steered: bool = False  # whether a function sets it before each collect, so that each parameter is a curriculum
    num_agents: int = 1

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
        return {*self.config} if self.steered else self.drawn_names

    @functools.cached_property
    def moves_by_returns(self) -> bool:
        """Whether some parameters move with the returns of episodes."""
        return any(each.metric is not None for each in self.curricula)

    def support(self, parameters: Mapping[str, Parameter]) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest value of each parameter, as given; for a moving one, at any time."""
        named = self.config | self.drawn
        return {name: named.get(name, Constant((parameter.default,))).support for name, parameter in parameters.items()}

    def draw(self, noise: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draw parameters, float32 `[num_envs]` each, and sources, by noise `[num_envs, noise_width]` in [0, 1)."""
        if self.num_agents > 1:  # all agents of a copy share what the noise of the first draws
            noise = noise[: len(noise) // self.num_agents]
        values = {name: drawn.draw(noise[:, i]) for i, (name, drawn) in enumerate(self.drawn.items())}
        sources: dict[str, Tensor] = {}
        first = len(self.drawn)
        for each in self.curricula:
            together, source = each.draw(noise[:, first : first + each.width])
            values |= together
            sources |= {} if source is None else {each.label: source}
            first += each.width
        if self.num_agents > 1:
            values, sources = (tree_map(lambda row: row.repeat(self.num_agents), drawn) for drawn in (values, sources))
        return values, sources


def resolve_config(
    config: Parsed,
    parameters: Mapping[str, Parameter],
    *,
    owner: str,
    num_envs: int,
    device: torch.device,
    num_agents: int = 1,
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
    fixed: dict[str, ParameterDistribution] = {}
    drawn: dict[str, ParameterDistribution] = {}
    for name, parameter in sorted(parameters.items()):  # noise and curricula do not go by the order of declaration
        try:
            value = _within_bounds(config.get(name, Constant((parameter.default,))), parameter, num_envs, copies)
        except ValueError as error:
            raise ValueError(f"{owner}[{name!r}] {error}") from None
        (fixed if value.fixed else drawn)[name] = value
    given = {name: config[name] for name in parameters if name in config}
    noise = torch.zeros(num_envs, device=device)
    tensors = {name: value.draw(noise) for name, value in fixed.items()}
    if num_agents > 1:
        tensors = {name: value.repeat(num_agents) for name, value in tensors.items()}
    if steered:
        return ResolvedConfig(given, tensors, {}, _steered({**drawn, **fixed}, owner), True, num_agents)
    for value in drawn.values():
        value.draw(noise)  # so that its constants are on the device before a program that draws is captured
    moving = {name: value for name, value in drawn.items() if value.moves}
    try:
        curricula = make_curricula(moving) if moving else ()
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from None
    for each in curricula:
        if each.metric is not None and each.metric not in (RETURNS, *metrics):
            raise ValueError(
                f"{owner}[{each.names[0]!r}] goes by the metric {each.metric!r}, which episodes of this environment "
                f"do not have.{did_you_mean(each.metric, metrics)} They have {', '.join((RETURNS, *metrics))}."
            )
    still = {name: value for name, value in drawn.items() if name not in moving}
    return ResolvedConfig(given, tensors, still, curricula, num_agents=num_agents)


def _steered(values: Mapping[str, ParameterDistribution], owner: str) -> tuple[Curriculum, ...]:
    """Make each parameter a curriculum, whose numbers programs read at each call."""
    for name, value in values.items():
        if value.moves:
            raise ValueError(
                f"{owner}[{name!r}] is {value!r}, which moves by itself: an `env_config` that is a function gives "
                "distributions that stand still, and moves them itself."
            )
    return tuple(NumbersCurriculum({name: value}) for name, value in values.items())


def _within_bounds(
    value: ParameterDistribution, parameter: Parameter, num_envs: int, copies: str
) -> ParameterDistribution:
    """Clip a value to the parameter's bounds; raise `ValueError` if it exceeds them, or does not fit the copies."""
    if isinstance(value, PerCopy) and len(value.values) != num_envs:
        raise ValueError(wrong_number(value, num_envs, copies))
    if isinstance(value, Grid) and len(value.values) > num_envs:
        raise ValueError(
            f"is a Grid of {len(value.values)} values, but there are {num_envs} copies (`{copies}`), and each value "
            f"needs one. Use {copies}={len(value.values)} or more, or draw from the values with Choice."
        )
    if isinstance(value, Assigned):
        # float32 rounding of a legal bound, given as a tensor, must not make it illegal.
        finite = [abs(bound) for bound in (parameter.low, parameter.high) if math.isfinite(bound)]
        slack = 1e-6 * max(finite, default=0.0)
        for number in value.values:
            if not parameter.low - slack <= number <= parameter.high + slack:
                raise ValueError(f"must be in {parameter.bounds}; got {number:g}.")
        return value
    clipped = value.clipped(parameter.low, parameter.high)
    low, high = clipped.support
    if low < parameter.low or high > parameter.high:
        raise ValueError(f"must stay in {parameter.bounds}; {value!r} reaches from {low:g} to {high:g}.")
    return clipped


def wrong_number(value: PerCopy, num_envs: int, copies: str) -> str:
    """Return the message that the number of values is not that of copies, which the argument `copies` sets."""
    return (
        f"has {len(value.values)} values for {num_envs} copies (`{copies}`). Give one value for each copy, a number or "
        "a distribution."
    )


ParameterValue: TypeAlias = float | Sequence[float] | Tensor | np.ndarray | ParameterDistribution | Mapping[str, object]
EnvConfig: TypeAlias = Mapping[str, ParameterValue]
EnvConfigFunction: TypeAlias = Callable[[Mapping[str, float]], Mapping[str, Any]]
AnyEnvConfig: TypeAlias = Mapping[str, Any] | EnvConfigFunction

# The key of a function's name in its plain form; no parameter has this name.
_FUNCTION: Final = "function()"
# The longest text of a value that a run's params show in full, in characters
_SHOWN_LENGTH: Final = 100


def parsed(config: EnvConfig, owner: str = "env_config") -> dict[str, ParameterDistribution]:
    """Parse the values of an `env_config`, which may be in plain form."""
    if not isinstance(config, Mapping):
        raise TypeError(f"{owner} must be a mapping from parameter names to values; got {shown(config)}.")
    values = {}
    for name, value in config.items():
        try:
            values[name] = parsed_value(value)
        except ValueError as error:
            raise ValueError(f"{owner}[{name!r}] {error}") from None
    return values


def plain(config: Parsed) -> dict[str, Any]:
    """Return the plain form of a configuration, as files have it."""
    return {name: value.to_dict() for name, value in config.items()}


def called_with(function: EnvConfigFunction, metrics: Mapping[str, float]) -> Mapping[str, Any]:
    """Return the values of an `env_config` function; raise `TypeError` for a class, such as that of an environment."""
    if isinstance(function, type):
        raise TypeError(f"env_config must be a mapping of parameters to values, or a function; got {shown(function)}.")
    return function(metrics)


def function_form(function: EnvConfigFunction) -> dict[str, object]:
    """Return the plain form of an `env_config` function: its name, from which it cannot be restored."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return {_FUNCTION: f"{getattr(function, '__module__', '')}.{name}"}


def function_name(config: object) -> str | None:
    """Return the function's name if an `env_config` in plain form stands for a function, else None."""
    return str(config[_FUNCTION]) if isinstance(config, Mapping) and _FUNCTION in config else None


def inherited_config(config: EnvConfig, num_envs: int) -> dict[str, ParameterDistribution]:
    """Fit a training's configuration to an evaluation's copies, which take evenly spaced ones of listed values."""
    fitted = parsed(config)
    for name, value in fitted.items():
        if not isinstance(value, PerCopy | Grid):
            continue
        count = len(value.values)
        if count > num_envs or (isinstance(value, PerCopy) and count < num_envs):
            fitted[name] = PerCopy(tuple(value.values[(2 * i + 1) * count // (2 * num_envs)] for i in range(num_envs)))
    return fitted


def part_of_config(config: EnvConfig, num_envs: int, part: range) -> dict[str, PerCopy]:
    """Return, by name, the values of the copies in `part`, of all `num_envs`, if they differ between copies."""
    parts = {}
    for name, value in parsed(config).items():
        if not isinstance(value, PerCopy | Grid):
            continue
        count = len(value.values)
        if count == num_envs if isinstance(value, PerCopy) else len(part) < count <= num_envs:
            parts[name] = PerCopy(tuple(value.values[i % count] for i in part))
    return parts


def moving_in(config: EnvConfig) -> dict[str, ParameterDistribution]:
    """Return the distributions of an `env_config` that move while a policy trains."""
    return {name: value for name, value in parsed(config).items() if value.moves}


def followed_in(config: EnvConfig) -> dict[str, str]:
    """Map each `Scheduled` parameter to the metric it follows."""
    return {name: value.by for name, value in parsed(config).items() if isinstance(value, Scheduled)}


def shown_value(value: object) -> object:
    """Return a value as params show it: a number, or a text, `Uniform(0.25, 1.0)` or `200 values from 0.25 to 1.0`."""
    shown = parsed_value(value)
    if isinstance(shown, Constant):
        return shown.values[0]
    if len(repr(shown)) <= _SHOWN_LENGTH or not isinstance(shown, Choice | Grid | PerCopy):
        return repr(shown)
    kind = "" if isinstance(shown, PerCopy) else f"{type(shown).__name__} of "
    weighted = ", weighted" if isinstance(shown, Choice) and shown.weights is not None else ""
    return f"{kind}{len(shown.values)} values from {min(shown.values)} to {max(shown.values)}{weighted}"

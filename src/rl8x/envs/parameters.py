"""The parameters of an environment, which `env_config` may set, and how its values become tensors."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Hashable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from rl8x.envs.env_config import Given
from rl8x.names import did_you_mean
from rl8x.randomization import Grid, ParameterDistribution
from rl8x.randomization.curriculum import RETURNS, Curriculum, make_curricula
from rl8x.randomization.scheduled import NumbersCurriculum, PerCopy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One number that `env_config` may set.

    Attributes:
        default: Its value where `env_config` says nothing.
        low: The smallest legal value; may be -inf.
        high: The largest legal value; may be inf.
        unit: Its unit, for example `m/s^2`; empty where it has none.
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
        given: What it was made of: numbers, tuples and distributions.
        fixed: Values that a reset does not change, float32 `[num_envs]`; one memory where one serves all copies.
        drawn: Distributions to draw from at each reset, in the order of their noise columns.
        curricula: Those that move, with noise columns after these.
        steered: Whether a function sets it again and again, so that each parameter is a curriculum.
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

    @property
    def drawn_names(self) -> set[str]:
        """The parameters that a reset changes."""
        return {*self.drawn, *(name for each in self.curricula for name in each.names)}

    @property
    def shown_names(self) -> set[str]:
        """The parameters to report: those that are drawn, or that a function gave."""
        return {*self.given} if self.steered else self.drawn_names

    @property
    def moves_by_returns(self) -> bool:
        """Whether some parameters move with the returns of episodes."""
        return any(each.metric is not None for each in self.curricula)

    def draw(self, noise: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draw parameters, float32 `[num_envs]` each, from noise `[num_envs, noise_width]` in [0, 1)."""
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
            raise ValueError(_unknown_name(name, parameters, owner))
    resolved = ResolvedConfig({}, {}, {})
    for name, parameter in parameters.items():
        value = config.get(name, parameter.default)
        try:
            if isinstance(value, ParameterDistribution):
                drawn = _within_bounds(value, parameter, num_envs, copies)
                drawn.prepare(device)
                if drawn.fixed:
                    resolved.fixed[name] = drawn.draw(torch.zeros(num_envs, device=device))
                else:
                    resolved.drawn[name] = drawn
            else:
                numbers = _numbers(value, num_envs, copies)
                _check_bounds(numbers, parameter)
                value = tuple(numbers.tolist()) if numbers.ndim else numbers.item()
                resolved.fixed[name] = numbers.to(torch.float32)
        except ValueError as error:
            raise ValueError(f"{owner}[{name!r}] {error}") from None
        if name in config:
            resolved.given[name] = value
    made = _steered(resolved, owner) if steered else _with_curricula(resolved, owner, metrics)
    fixed = {name: _placed(values, num_envs, device) for name, values in resolved.fixed.items()}
    return dataclasses.replace(made, fixed=fixed)


def _placed(numbers: Tensor, num_envs: int, device: torch.device) -> Tensor:
    """Return a parameter's number, or its values, as `[num_envs]` on the device; the number by a fill.

    To copy it from the host would wait for the device, for each parameter whenever a function sets them.
    """
    if numbers.ndim:
        return numbers.to(device)
    return torch.full((1,), numbers.item(), device=device).expand(num_envs)


def _with_curricula(resolved: ResolvedConfig, owner: str, metrics: Sequence[str]) -> ResolvedConfig:
    """Join what moves to curricula, and refuse a metric that episodes do not have."""
    moving = {name: drawn for name, drawn in resolved.drawn.items() if drawn.moves}
    try:
        curricula = make_curricula(moving)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from None
    for each in curricula:
        if each.metric is not None and each.metric not in (RETURNS, *metrics):
            raise ValueError(
                f"{owner}[{each.names[0]!r}] goes by the metric {each.metric!r}, which episodes of this environment "
                f"do not have.{did_you_mean(each.metric, metrics)} They have {', '.join((RETURNS, *metrics))}."
            )
    drawn = {name: drawn for name, drawn in resolved.drawn.items() if not drawn.moves}
    return dataclasses.replace(resolved, drawn=drawn, curricula=curricula)


def _steered(resolved: ResolvedConfig, owner: str) -> ResolvedConfig:
    """Make a curriculum of each parameter, whose numbers a program reads."""
    moving = [name for name, drawn in resolved.drawn.items() if drawn.moves]
    if moving:
        raise ValueError(
            f"{owner}[{moving[0]!r}] is {resolved.drawn[moving[0]]!r}, which moves by itself: an `env_config` that is "
            "a function gives distributions that stand still, and moves them itself."
        )
    drawn = dict(resolved.drawn)
    for name, values in resolved.fixed.items():
        drawn[name] = PerCopy(tuple(values.reshape(-1).tolist()))
    curricula = tuple(NumbersCurriculum({name: each}) for name, each in drawn.items())
    return dataclasses.replace(resolved, drawn={}, curricula=curricula, steered=True)


def _unknown_name(name: object, parameters: Mapping[str, Parameter], owner: str) -> str:
    if not parameters:
        return f"{owner} has {name!r}, but this environment has no parameters."
    legal = ", ".join(f"{key} in {parameter.bounds}" for key, parameter in parameters.items())
    return f"{owner} has no parameter {name!r}.{did_you_mean(name, parameters)} Legal are {legal}."


def _within_bounds(
    value: ParameterDistribution, parameter: Parameter, num_envs: int, copies: str
) -> ParameterDistribution:
    """Return a distribution as it is within the bounds; raise if it is not, or is a `Grid` of too many values."""
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


def _numbers(value: object, num_envs: int, copies: str) -> Tensor:
    """Return a number or `num_envs` numbers as a float64 tensor on the CPU."""
    need = f"must be a number, {num_envs} numbers (one a copy) or a distribution"
    if isinstance(value, str | bool) or value is None:
        raise ValueError(f"{need}; got {value!r}.")
    try:
        # In float64 from the start: the plain form of 0.6 shall be 0.6, not its nearest float32.
        numbers = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{need}; got {value!r}.") from None
    if numbers.ndim == 1 and len(numbers) != num_envs:
        raise ValueError(wrong_number(numbers, num_envs, copies))
    if numbers.ndim > 1:
        raise ValueError(f"{need}; got shape {list(numbers.shape)}.")
    return numbers


def wrong_number(values: Sized, num_envs: int, copies: str) -> str:
    """Say that there are not as many values as copies, whose number the argument `copies` sets."""
    return (
        f"has {len(values)} values for {num_envs} copies (`{copies}`). Give one value for each copy, a number or a "
        "distribution."
    )


def _check_bounds(numbers: Tensor, parameter: Parameter) -> None:
    """Raise where a value is not finite or not within the bounds."""
    # float32 rounding of a legal bound, given as a tensor, must not make it illegal.
    slack = 1e-6 * max((abs(bound) for bound in (parameter.low, parameter.high) if math.isfinite(bound)), default=0.0)
    legal = (numbers >= parameter.low - slack) & (numbers <= parameter.high + slack) & numbers.isfinite()
    if not bool(legal.all()):
        worst = float(numbers.reshape(-1)[int(legal.reshape(-1).logical_not().nonzero()[0])])
        raise ValueError(f"must be in {parameter.bounds}; got {worst:g}.")

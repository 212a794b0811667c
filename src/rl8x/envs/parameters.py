"""What `env_config` may set: the parameters of an environment, and how a configuration becomes tensors."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rl8x import randomization
from rl8x.names import did_you_mean
from rl8x.randomization import Choice, Grid, ParameterDistribution
from rl8x.randomization.moving import RETURNS, ParameterGroup, make_groups
from rl8x.randomization.scheduled import PerCopy, Scheduled, Steered

ParameterValue: TypeAlias = float | Sequence[float] | Tensor | np.ndarray | ParameterDistribution | Mapping[str, object]
EnvConfig: TypeAlias = Mapping[str, ParameterValue]

# Characters up to which a run's params show a value as it is
_SHOWN_LENGTH: Final = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One number that `env_config` may set.

    Attributes:
        default: Its value where `env_config` says nothing.
        low: The smallest legal value; may be -inf.
        high: The largest legal value; may be inf.
        unit: Its unit, for example `m/s^2`; empty where it has none.
        description: What it is, in a few words.

    Raises:
        TypeError: If the default or a bound is no number.
        ValueError: If the default does not lie in the bounds.
    """

    default: float
    low: float
    high: float
    unit: str
    description: str

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
        given: The configuration in plain JSON form.
        fixed: Values that a reset does not change, float32 `[num_envs]`; one memory where one serves all copies.
        drawn: Distributions to draw from at each reset, in the order of their noise columns.
        groups: Those that move, with noise columns after these.
        steered: Whether a function sets it again and again, so that each parameter is a group.
    """

    given: dict[str, object]
    fixed: dict[str, Tensor]
    drawn: dict[str, ParameterDistribution]
    groups: tuple[ParameterGroup, ...] = ()
    steered: bool = False

    @property
    def noise_width(self) -> int:
        """Uniform numbers that the draw of one copy needs."""
        return len(self.drawn) + sum(group.width for group in self.groups)

    @property
    def key(self) -> Hashable:
        """A key of what a program that draws has built in: distributions that stand still, and groups by their keys."""
        return tuple(self.drawn.items()), tuple(group.key for group in self.groups)

    @property
    def drawn_names(self) -> set[str]:
        """The parameters that a reset changes."""
        return {*self.drawn, *(name for group in self.groups for name in group.names)}

    @property
    def shown_names(self) -> set[str]:
        """The parameters to report; where a function sets the configuration, those that it gave."""
        return {*self.given} if self.steered else self.drawn_names

    def draw(self, noise: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Draw parameters, float32 `[num_envs]` each, from noise `[num_envs, noise_width]` in [0, 1).

        Returns:
            Their values by name, and of groups that episodes decide the sources, int64 `[num_envs]`, by label.
        """
        values = {name: drawn.draw(noise[:, i]) for i, (name, drawn) in enumerate(self.drawn.items())}
        sources: dict[str, Tensor] = {}
        first = len(self.drawn)
        for group in self.groups:
            group_values, group_sources = group.draw(noise[:, first : first + group.width])
            values |= group_values
            sources |= {} if group_sources is None else {group.label: group_sources}
            first += group.width
        return values, sources


def resolve_config(
    config: EnvConfig,
    parameters: Mapping[str, Parameter],
    *,
    owner: str,
    num_envs: int,
    device: torch.device,
    copies: str = "num_envs",
    metrics: Sequence[str] = (),
    steered: bool = False,
) -> ResolvedConfig:
    """Check an `env_config` against the parameters of an environment and turn it into tensors.

    Args:
        config: Name to a number, `num_envs` numbers, a distribution, or a distribution's JSON form.
        parameters: The legal names with their bounds.
        owner: What error messages call the configuration, such as `CartPole: env_config`.
        num_envs: Number of copies.
        device: Where the tensors go.
        copies: What the user calls the number of copies.
        metrics: The environment's own metrics of episodes.
        steered: Whether its numbers are going to change, so that no program may have them built in.

    Raises:
        ValueError: If a name is unknown or a value is out of bounds or of the wrong shape.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"{owner} must be a mapping from parameter names to values; got {config!r}.")
    for name in config:
        if name not in parameters:
            raise ValueError(_unknown_name(name, parameters, owner))
    resolved = ResolvedConfig({}, {}, {})
    for name, parameter in parameters.items():
        value = config.get(name, parameter.default)
        try:
            given = _resolve_value(value, name, parameter, resolved, num_envs, device, copies)
        except ValueError as error:
            raise ValueError(f"{owner}[{name!r}] {error}") from None
        if name in config:
            resolved.given[name] = given
    return _steered(resolved, owner) if steered else _grouped(resolved, owner, metrics)


def _grouped(resolved: ResolvedConfig, owner: str, metrics: Sequence[str]) -> ResolvedConfig:
    """Join what moves to groups, and refuse a metric that episodes do not have."""
    moving = {name: drawn for name, drawn in resolved.drawn.items() if drawn.moves}
    if not moving:
        return resolved
    try:
        groups = make_groups(moving)
    except ValueError as error:
        raise ValueError(f"{owner}: {error}") from None
    for group in groups:
        if group.metric is not None and group.metric not in (RETURNS, *metrics):
            raise ValueError(
                f"{owner}[{group.names[0]!r}] goes by the metric {group.metric!r}, which episodes of this environment "
                f"do not have.{did_you_mean(group.metric, metrics)} They have {', '.join((RETURNS, *metrics))}."
            )
    drawn = {name: drawn for name, drawn in resolved.drawn.items() if not drawn.moves}
    return dataclasses.replace(resolved, drawn=drawn, groups=groups)


def _steered(resolved: ResolvedConfig, owner: str) -> ResolvedConfig:
    """Make a group of each parameter, whose numbers a program reads."""
    moving = [name for name, drawn in resolved.drawn.items() if drawn.moves]
    if moving:
        raise ValueError(
            f"{owner}[{moving[0]!r}] is {resolved.drawn[moving[0]]!r}, which moves by itself: an `env_config` that is "
            "a function gives distributions that stand still, and moves them itself."
        )
    groups: list[ParameterGroup] = [Steered(name, drawn) for name, drawn in resolved.drawn.items()]
    for name, values in resolved.fixed.items():
        distinct = values[:1] if values.stride() == (0,) else values
        groups.append(Steered(name, PerCopy(tuple(distinct.tolist()))))
    return dataclasses.replace(resolved, drawn={}, groups=tuple(groups), steered=True)


def inherited_config(config: Mapping[str, Any], num_envs: int) -> dict[str, Any]:
    """Fit a training's configuration to an evaluation's number of copies.

    Of values for each copy, and of a `Grid` of more values than there are copies, the copies take evenly spaced ones.
    Both are in plain JSON form, as `Env.config` is.
    """
    fitted = {}
    for name, value in config.items():
        grid = value.get("grid") if isinstance(value, Mapping) else None
        values = grid if grid is not None and len(grid) > num_envs else value
        if isinstance(values, list) and len(values) != num_envs:
            values = [values[(2 * i + 1) * len(values) // (2 * num_envs)] for i in range(num_envs)]
        fitted[name] = values
    return fitted


def moving_in(config: Mapping[str, Any]) -> dict[str, object]:
    """Return the part of an `env_config` in plain JSON form that moves while a policy trains."""
    kinds = {name for name, kind in randomization.KINDS.items() if kind.moves}
    return {name: value for name, value in config.items() if isinstance(value, Mapping) and kinds & {*value}}


def followed_in(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the metrics of the trainer's row that parameters of an `env_config` in plain form go by, by name."""
    forms = {name: value for name, value in config.items() if isinstance(value, Mapping)}
    schedules = {name: randomization.from_dict(form) for name, form in forms.items() if Scheduled.kind in form}
    return {name: schedule.by for name, schedule in schedules.items() if isinstance(schedule, Scheduled)}


def shown_value(value: object) -> object:
    """Return a value in plain JSON form as a run's params show it.

    A number stays one; the others become a text such as `Uniform(0.25, 1.0)` or `200 values from 0.25 to 1.0`.
    """
    shown: object = randomization.from_dict(value) if isinstance(value, Mapping) else value
    if len(repr(shown)) <= _SHOWN_LENGTH or not isinstance(shown, Choice | Grid | list):
        return repr(shown) if isinstance(value, Mapping | list) else value
    values = shown if isinstance(shown, list) else shown.values
    text = f"{len(values)} values from {min(values)} to {max(values)}"
    if isinstance(shown, list):
        return text
    return f"{type(shown).__name__} of {text}" + (", weighted" if getattr(shown, "weights", None) is not None else "")


def _unknown_name(name: object, parameters: Mapping[str, Parameter], owner: str) -> str:
    if not parameters:
        return f"{owner} has {name!r}, but this environment has no parameters."
    legal = ", ".join(f"{key} in {parameter.bounds}" for key, parameter in parameters.items())
    return f"{owner} has no parameter {name!r}.{did_you_mean(name, parameters)} Legal are {legal}."


def _resolve_value(
    value: object,
    name: str,
    parameter: Parameter,
    resolved: ResolvedConfig,
    num_envs: int,
    device: torch.device,
    copies: str,
) -> object:
    """Add one value to `resolved` and return its plain JSON form."""
    if isinstance(value, Mapping):
        value = randomization.from_dict(value)
    if not isinstance(value, ParameterDistribution):
        numbers = _numbers(value, num_envs, copies)
        _check_bounds(numbers, parameter)
        # From one dimension, so that a single copy's has stride 1.
        resolved.fixed[name] = numbers.to(device, torch.float32).reshape(-1).expand(num_envs)
        return numbers.tolist()
    if isinstance(value, Grid) and len(value.values) > num_envs:
        raise ValueError(
            f"is a Grid of {len(value.values)} values, but there are {num_envs} copies (`{copies}`), and each value "
            f"needs one. Use {copies}={len(value.values)} or more, or draw from the values with Choice."
        )
    clipped = value.clipped(parameter.low, parameter.high)
    low, high = clipped.support
    if low < parameter.low or high > parameter.high:
        raise ValueError(f"must stay in {parameter.bounds}; {value!r} reaches from {low:g} to {high:g}.")
    clipped.prepare(device)
    if clipped.fixed:
        resolved.fixed[name] = clipped.draw(torch.zeros(num_envs, device=device))
    else:
        resolved.drawn[name] = clipped
    return value.to_dict()


def _numbers(value: object, num_envs: int, copies: str) -> Tensor:
    """Return a number or `num_envs` numbers as a float64 tensor on the CPU."""
    need = f"must be a number, {num_envs} numbers (one a copy) or a distribution"
    if isinstance(value, str | bool) or value is None:
        raise ValueError(f"{need}; got {value!r}.")
    try:
        # In float64 from the start: the plain form of 0.6 shall be 0.6, not its nearest float32.
        tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
        numbers = tensor.detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{need}; got {value!r}.") from None
    if numbers.ndim == 1 and len(numbers) != num_envs:
        raise ValueError(
            f"has {len(numbers)} values for {num_envs} copies (`{copies}`). Give one value for each copy, a number or "
            "a distribution."
        )
    if numbers.ndim > 1:
        raise ValueError(f"{need}; got shape {list(numbers.shape)}.")
    return numbers.clone()


def _check_bounds(numbers: Tensor, parameter: Parameter) -> None:
    """Raise where a value is not finite or not within the bounds."""
    # float32 rounding of a legal bound, given as a tensor, must not make it illegal.
    slack = 1e-6 * max((abs(bound) for bound in (parameter.low, parameter.high) if math.isfinite(bound)), default=0.0)
    legal = (numbers >= parameter.low - slack) & (numbers <= parameter.high + slack) & numbers.isfinite()
    if not bool(legal.all()):
        worst = float(numbers.reshape(-1)[int(legal.reshape(-1).logical_not().nonzero()[0])])
        raise ValueError(f"must be in {parameter.bounds}; got {worst:g}.")

"""Distributions that draw an environment's physical parameters, one value a copy at each reset.

Each is an immutable value with an inverse cumulative distribution function: `draw` turns uniform numbers into parameter
values and nothing else, so that a program that contains a draw can be compiled, captured and replayed.

    env.reset(config={"length": Uniform(0.25, 1.0), "gravity": Choice([9.8, 3.7])})

In run files the same is written in plain JSON: `{"length": {"uniform": [0.25, 1.0]}}`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from rl8x.names import did_you_mean
from rl8x.plain import checked_number
from rl8x.trees import as_tensor


def finite_number(value: object, owner: str, name: str) -> float:
    """Return `value` as a finite float, or raise naming the argument of `owner`."""
    return float(checked_number(value, name, owner))


def finite_numbers(values: object, owner: str, name: str) -> tuple[float, ...]:
    """Return `values` as a tuple of finite floats, or raise naming the argument of `owner`."""
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"{owner}: `{name}` must be a list of at least one number; got {values!r}.")
    return tuple(finite_number(value, owner, f"{name}[{i}]") for i, value in enumerate(values))


def pair(values: object, owner: str, name: str, *, differ: bool = False) -> tuple[float, ...]:
    """Return `values` as two finite floats, the lower first, or raise naming the argument of `owner`."""
    numbers = finite_numbers(values, owner, name)
    if len(numbers) != 2 or numbers[0] > numbers[1] or (differ and numbers[0] == numbers[1]):
        raise ValueError(f"{owner}: `{name}` must be two numbers, the lower first; got {list(numbers)}.")
    return numbers


two_numbers = functools.partial(pair, differ=True)


def whole_number(least: int) -> Callable[[object, str, str], int]:
    """Return a check, like the functions above, for whole numbers of at least `least`."""
    return lambda value, owner, name: int(checked_number(value, name, owner, least=least, whole=True))


@dataclasses.dataclass(frozen=True)
class ParameterDistribution(ABC):
    """A distribution over the values of one parameter, in the parameter's unit."""

    kind: ClassVar[str]
    """Its name in a run file."""
    fixed: ClassVar[bool] = False
    """Whether every draw gives the same values, so that no noise is needed."""
    moves: ClassVar[bool] = False
    """Whether the distribution changes while a policy trains; see `rl8x.randomization.curriculum`."""

    def _check(self, check: Callable[[object, str, str], Any], *names: str) -> None:
        """Replace fields by the result of a check, such as `finite_number`; keep a None that is the field's default."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in names and not (value is None and field.default is None):
                object.__setattr__(self, field.name, check(value, type(self).__name__, field.name))

    @property
    @abstractmethod
    def support(self) -> tuple[float, float]:
        """The smallest and the largest value that can be drawn; if the distribution moves, at any time."""

    @property
    def numbers(self) -> tuple[float, ...]:
        """The distribution's parameters, in a fixed order, between which schedules interpolate linearly.

        Raises:
            TypeError: If it has none.
            ValueError: If one of them is left to the parameter's bounds.
        """
        raise TypeError(f"{type(self).__name__} has no numbers that could move.")

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> Self:
        """Make a distribution of these parameters.

        Args:
            numbers: The parameters in the order of `numbers`.
        """
        return cls(*numbers)

    @property
    def drawn_by(self) -> tuple[float, ...]:
        """The parameters in the form that `draw_by` takes."""
        return self.numbers

    @classmethod
    def draw_by(cls, noise: Tensor, numbers: Any) -> Tensor:
        """Draw as `draw` does, float32 `[num_envs]`, by numbers that a program reads at each call.

        Args:
            noise: Uniform numbers in [0, 1), `[num_envs]`.
            numbers: The values of `drawn_by`, float32 `[*]`, on the device of the noise; floats are constants.

        Raises:
            TypeError: If the class has no such numbers.
        """
        raise TypeError(f"{cls.__name__} has no numbers that could move.")

    def draw(self, noise: Tensor) -> Tensor:
        """Turn uniform numbers into one value a copy, float32 `[num_envs]`, within `support`.

        Args:
            noise: Uniform numbers in [0, 1), `[num_envs]`.
        """
        return self.draw_by(noise, self.numbers)

    def clipped(self, low: float, high: float) -> ParameterDistribution:
        """Return the distribution limited to a parameter's legal bounds; most do not change.

        Args:
            low: The smallest legal value.
            high: The largest.

        Raises:
            ValueError: If it cannot be limited to them.
        """
        return self

    def to_dict(self) -> dict[str, object]:
        """Return the plain JSON form, for example `{"uniform": [0.1, 0.5]}`, without Nones at its end."""
        arguments = [getattr(self, field.name) for field in dataclasses.fields(self)]
        while arguments[-1] is None:
            arguments.pop()
        return {self.kind: arguments}

    def __repr__(self) -> str:
        """Return the call that makes it, `Uniform(0.1, 0.5)`: required arguments by position, others by name."""
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            text = repr(list(value) if isinstance(value, tuple) else value)
            if field.default is dataclasses.MISSING:
                parts.append(text)
            elif value is not None:
                parts.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(parts)})"


# torch.rand gives multiples of 2**-24 in [0, 1); half a step keeps an inverse CDF finite at 0.
_HALF_STEP = 2.0**-25


@dataclasses.dataclass(frozen=True, repr=False)
class _Interval(ParameterDistribution):
    """A distribution over [low, high]."""

    low: float
    high: float

    def __post_init__(self) -> None:
        self._check(finite_number, "low", "high")

    @property
    def support(self) -> tuple[float, float]:
        """The two ends of the interval."""
        return self.low, self.high

    numbers = support


@dataclasses.dataclass(frozen=True, repr=False)
class Uniform(_Interval):
    """Draw uniformly from [low, high].

    Args:
        low: The smallest value.
        high: The largest, at least `low`.
    """

    kind: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ValueError(f"Uniform: `low` must not exceed `high`; got {self.low} and {self.high}.")

    @classmethod
    def draw_by(cls, noise: Tensor, numbers: Any) -> Tensor:
        """Return `low + (high - low) * noise`, `[num_envs]`, kept inside the interval against rounding."""
        low, high = numbers
        values: Tensor = (noise * (high - low) + low).clamp(low, high)
        return values


@dataclasses.dataclass(frozen=True, repr=False)
class LogUniform(_Interval):
    """Draw from [low, high] so that the logarithm is uniform: each decade is as likely as any other.

    Args:
        low: The smallest value, > 0.
        high: The largest, at least `low`.
    """

    kind: ClassVar[str] = "log_uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.low <= self.high:
            raise ValueError(f"LogUniform: needs 0 < `low` <= `high`; got {self.low} and {self.high}.")

    @classmethod
    def draw_by(cls, noise: Tensor, numbers: Any) -> Tensor:
        """Return `low * (high / low) ** noise`, `[num_envs]`, kept inside the interval against rounding."""
        low, high = numbers
        spread = (high / low).log() if isinstance(numbers, Tensor) else math.log(high / low)
        values: Tensor = (torch.exp(noise * spread) * low).clamp(low, high)
        return values


@dataclasses.dataclass(frozen=True, repr=False)
class Normal(ParameterDistribution):
    """Draw from a normal distribution, clipped to `low` and `high` (by default the parameter's legal bounds).

    Args:
        mean: Its mean before clipping, within the parameter's bounds.
        std: Its standard deviation before clipping, at least 0.
        low: The smallest value; None: the parameter's bound.
        high: The largest, at least `low`; None: the parameter's bound.
    """

    kind: ClassVar[str] = "normal"
    mean: float
    std: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        self._check(finite_number, "mean", "std", "low", "high")
        if self.std < 0:
            raise ValueError(f"Normal: `std` must not be negative; got {self.std}.")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"Normal: `low` must not exceed `high`; got {self.low} and {self.high}.")

    @property
    def support(self) -> tuple[float, float]:
        """The furthest values that 24 random bits can give, 5.4 std from the mean, within the clipping bounds."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        reach = 5.5 * self.std
        return min(max(self.mean - reach, low), high), min(max(self.mean + reach, low), high)

    def clipped(self, low: float, high: float) -> Normal:
        """Return it with the parameter's bounds for missing ones; raise `ValueError` if the mean exceeds them."""
        if not low <= self.mean <= high:
            raise ValueError(f"{self!r}: its mean lies outside of the parameter's bounds [{low:g}, {high:g}].")
        legal = {name: bound for name, bound in (("low", low), ("high", high)) if math.isfinite(bound)}
        return dataclasses.replace(self, **{name: b for name, b in legal.items() if getattr(self, name) is None})

    def draw(self, noise: Tensor) -> Tensor:
        """Draw within `low` and `high`, either of which may be None, `[num_envs]`."""
        return self.draw_by(noise, (self.mean, self.std, self.low, self.high))

    @property
    def numbers(self) -> tuple[float, ...]:
        """Mean, std, `low` and `high`, both of which must be given."""
        if self.low is None or self.high is None:
            raise ValueError(f"{self!r}: give `low` and `high`.")
        return self.mean, self.std, self.low, self.high

    @classmethod
    def draw_by(cls, noise: Tensor, numbers: Any) -> Tensor:
        """Return `mean + std * inverse_normal_cdf(noise)`, clipped, `[num_envs]`."""
        mean, std, low, high = numbers
        values: Tensor = torch.special.ndtri(noise.clamp(_HALF_STEP, 1.0 - _HALF_STEP)) * std + mean
        return values if low is None and high is None else values.clamp(low, high)


@dataclasses.dataclass(frozen=True, repr=False)
class _Listed(ParameterDistribution):
    """A distribution over listed values."""

    values: Sequence[float]

    @property
    def support(self) -> tuple[float, float]:
        """The smallest and the largest of the values."""
        return min(self.values), max(self.values)

    def to_dict(self) -> dict[str, object]:
        """Return the kind with the values, such as `{"grid": [values]}`."""
        return {self.kind: list(self.values)}


@dataclasses.dataclass(frozen=True, repr=False)
class Choice(_Listed):
    """Draw one of the listed values, all equally likely or by weights.

    Args:
        values: The values, at least one.
        weights: The relative probability of each value, at least 0, with a positive sum; None: all equally likely.
    """

    kind: ClassVar[str] = "choice"
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        self._check(finite_numbers, "values", "weights")
        weights = self.weights
        if weights is not None and (len(weights) != len(self.values) or min(weights) < 0 or sum(weights) <= 0):
            need = f"{len(self.values)} numbers >= 0 that do not sum to 0"
            raise ValueError(f"Choice: `weights` must be {need}; got {list(weights)}.")

    @functools.cached_property
    def _on_devices(self) -> dict[torch.device, Tensor]:
        """The numbers of `drawn_by` on each device that they were copied to, by the first draw there."""
        return {}

    def draw(self, noise: Tensor) -> Tensor:
        """Return the value whose share of [0, 1) contains the noise, `[num_envs]`."""
        if noise.device not in self._on_devices:
            self._on_devices[noise.device] = torch.tensor(self.drawn_by, dtype=torch.float32, device=noise.device)
        return self.draw_by(noise, self._on_devices[noise.device])

    @property
    def possible(self) -> list[float]:
        """The values that can be drawn: those without a weight of 0."""
        return [value for i, value in enumerate(self.values) if self.weights is None or self.weights[i] > 0]

    @property
    def support(self) -> tuple[float, float]:
        """The smallest and the largest of the values that can be drawn."""
        return min(self.possible), max(self.possible)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values, and the share of each."""
        weights = self.weights or (1.0,) * len(self.values)
        return (*self.values, *(weight / sum(weights) for weight in weights))

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> Self:
        """Make the distribution with these values and shares."""
        values, weights = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
        return cls(values, None if len(set(weights)) == 1 else weights)

    @property
    def drawn_by(self) -> tuple[float, ...]:
        """The values, and the upper edges of their shares of [0, 1) but the last; a share of 0 has equal edges."""
        edges = torch.tensor(self.numbers[len(self.values) :], dtype=torch.float64).cumsum(0)
        return (*self.values, *(edges / edges[-1])[:-1].tolist())

    @classmethod
    def draw_by(cls, noise: Tensor, numbers: Any) -> Tensor:
        """Draw as `draw` does, `[num_envs]`, from n values and n - 1 edges, `[2 n - 1]`."""
        count = (len(numbers) + 1) // 2
        values: Tensor = numbers[torch.bucketize(noise.contiguous(), numbers[count:], right=True)]
        return values

    def to_dict(self) -> dict[str, object]:
        """Return `{"choice": [values]}`, or the arguments by name if there are weights."""
        if self.weights is None:
            return super().to_dict()
        return {self.kind: {"values": list(self.values), "weights": list(self.weights)}}


@dataclasses.dataclass(frozen=True, repr=False)
class Assigned(_Listed):
    """Values that copies get round-robin, the same at every reset."""

    fixed: ClassVar[bool] = True

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values."""
        return tuple(self.values)

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> Self:
        """Make the distribution with these values."""
        return cls(tuple(numbers))

    @classmethod
    def draw_by(cls, noise: Tensor, numbers: Any) -> Tensor:
        """Return `numbers[i % len(numbers)]` for copy i, whatever the noise, float32 `[num_envs]`."""
        values: Tensor = torch.as_tensor(numbers, dtype=torch.float32, device=noise.device)
        return values.repeat(-(-len(noise) // len(values)))[: len(noise)]


@dataclasses.dataclass(frozen=True, repr=False)
class Grid(Assigned):
    """Assign values to copies round-robin, the same at every reset.

    Two grids run side by side, not crossed: copy i has the i-th value of each.

    Args:
        values: The values, at least one, and no more than there are copies.
    """

    kind: ClassVar[str] = "grid"

    def __post_init__(self) -> None:
        self._check(finite_numbers, "values")


@dataclasses.dataclass(frozen=True, repr=False)
class PerCopy(Assigned):
    """A list as users write it: one value for each copy."""

    kind: ClassVar[str] = "per_copy"

    def to_dict(self) -> Any:
        """Return the list."""
        return list(self.values)

    def __repr__(self) -> str:
        """Return the list as text."""
        return repr(self.to_dict())


@dataclasses.dataclass(frozen=True, repr=False)
class Constant(Assigned):
    """A number as users write it, the only one of `values`: all copies have it."""

    kind: ClassVar[str] = "constant"

    def draw(self, noise: Tensor) -> Tensor:
        """Return the number, `[num_envs]`, stored once, by a fill: a copy from the host would wait for the device."""
        return torch.full((1,), self.values[0], device=noise.device).expand(len(noise))

    def to_dict(self) -> Any:
        """Return the number."""
        return self.values[0]

    def __repr__(self) -> str:
        """Return the number as text."""
        return repr(self.values[0])


KINDS: dict[str, type[ParameterDistribution]] = {}
for _each in (Uniform, LogUniform, Normal, Choice, Grid):
    KINDS[_each.kind] = _each


def from_dict(form: Mapping[str, object]) -> ParameterDistribution:
    """Make a distribution from its plain JSON form: one entry, from the kind to its arguments in order or by name.

    Args:
        form: Such as `{"uniform": [0.1, 0.5]}`, `{"uniform": {"low": 0.1, "high": 0.5}}`, `{"choice": [1, 2, 3]}`.

    Raises:
        ValueError: If there is not one entry, the kind is unknown, or the arguments are not its own.
    """
    if not isinstance(form, Mapping) or len(form) != 1:
        raise ValueError(f"a distribution is written as one entry, like {{'uniform': [0.1, 0.5]}}; got {form!r}.")
    (kind, arguments), *_ = form.items()
    if kind not in KINDS:
        raise ValueError(f"unknown distribution {kind!r}; known are {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}")
    cls = KINDS[kind]
    try:
        if isinstance(arguments, Mapping):
            return cls(**arguments)
        if not isinstance(arguments, Sequence) or isinstance(arguments, str):
            raise TypeError(f"got {arguments!r}")
        return cls(arguments) if issubclass(cls, _Listed) else cls(*arguments)
    except TypeError as error:
        names = [field.name for field in dataclasses.fields(cls)]
        raise ValueError(f"{kind!r} takes {', '.join(names)}, as a list or by name; {error}.") from None


def parsed_value(value: Any) -> ParameterDistribution:
    """Parse a value of an `env_config`: a number, a list with one for each copy, a distribution or its plain form."""
    if isinstance(value, ParameterDistribution):
        return value
    if isinstance(value, Mapping):
        return from_dict(value)
    need = "must be a number, a list with one for each copy, or a distribution"
    try:
        if isinstance(value, bool):
            raise TypeError
        # In float64 from the start: the plain form of 0.6 shall be 0.6, not its nearest float32.
        numbers = as_tensor(value).to(torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{need}; got {value!r:.200}.") from None
    if numbers.ndim > 1:
        raise ValueError(f"{need}; got shape {list(numbers.shape)}.")
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"must be finite; got {numbers[~numbers.isfinite()][0]:g}.")
    return PerCopy(tuple(numbers.tolist())) if numbers.ndim else Constant((numbers.item(),))

"""Distributions that draw an environment's physical parameters, one value a copy at each reset.

Every distribution is an immutable value with an inverse cumulative distribution function: `draw` turns uniform numbers
into parameter values and nothing else, so that the environment's one generator decides everything and a program that
contains a draw can be compiled, captured and replayed.

    env.reset(config={"length": Uniform(0.25, 1.0), "gravity": Choice([9.8, 3.7])})

In run files the same is written in plain JSON: `{"length": {"uniform": [0.25, 1.0]}}`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from rl8x.names import did_you_mean
from rl8x.randomization.base import ParameterDistribution, finite_number, finite_numbers

# torch.rand gives multiples of 2**-24 in [0, 1); half a step keeps an inverse CDF finite at 0.
_HALF_STEP = 2.0**-25


@dataclasses.dataclass(frozen=True, repr=False)
class _Interval(ParameterDistribution):
    """A distribution over [low, high]."""

    low: float
    high: float

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, finite_number(getattr(self, name), type(self).__name__, name))

    @property
    def support(self) -> tuple[float, float]:
        """The two ends of the interval."""
        return self.low, self.high

    @property
    def numbers(self) -> tuple[float, ...]:
        """The two ends of the interval."""
        return self.low, self.high

    def draw(self, noise: Tensor) -> Tensor:
        """Draw from the interval, `[num_envs]`."""
        return self.draw_by(noise, self.numbers)


@dataclasses.dataclass(frozen=True, repr=False)
class Uniform(_Interval):
    """Draw uniformly from [low, high].

    Args:
        low: The smallest value.
        high: The largest, at least `low`.

    Raises:
        ValueError: If one is not a finite number, or `low` exceeds `high`.
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

    Raises:
        ValueError: If one is not a finite number, or not 0 < `low` <= `high`.
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

    Raises:
        ValueError: If a number is not finite, `std` is negative, or `low` exceeds `high`.
    """

    kind: ClassVar[str] = "normal"
    mean: float
    std: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "std", "low", "high"):
            if name in ("mean", "std") or getattr(self, name) is not None:
                object.__setattr__(self, name, finite_number(getattr(self, name), "Normal", name))
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
        """Return the same, clipped to the parameter's bounds if it has none; refuse a mean outside of them."""
        if not low <= self.mean <= high:
            raise ValueError(f"{self!r}: its mean lies outside of the parameter's bounds [{low:g}, {high:g}].")
        legal = {name: bound for name, bound in (("low", low), ("high", high)) if math.isfinite(bound)}
        return dataclasses.replace(self, **{name: b for name, b in legal.items() if getattr(self, name) is None})

    def draw(self, noise: Tensor) -> Tensor:
        """Draw with the present bounds, of which any may be missing, `[num_envs]`."""
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
    """A distribution over some values."""

    values: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", finite_numbers(self.values, type(self).__name__, "values"))

    @property
    def support(self) -> tuple[float, float]:
        """The smallest and the largest of the values."""
        return min(self.values), max(self.values)

    def to_dict(self) -> dict[str, object]:
        """Return the kind with the values, such as `{"grid": [values]}`."""
        return {self.kind: list(self.values)}


@dataclasses.dataclass(frozen=True, repr=False)
class Choice(_Listed):
    """Draw one of some values, each as likely as the others or by weights.

    Args:
        values: The values, at least one.
        weights: How likely each is, as many numbers of at least 0 whose sum is more than 0; None: all the same.

    Raises:
        ValueError: If a number is not finite, or the weights are none.
    """

    kind: ClassVar[str] = "choice"
    weights: Sequence[float] | None = None
    _tables: dict[torch.device, tuple[Tensor, Tensor]] = dataclasses.field(
        default_factory=dict, init=False, compare=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None:
            weights = finite_numbers(self.weights, "Choice", "weights")
            if len(weights) != len(self.values) or min(weights) < 0 or sum(weights) <= 0:
                need = f"{len(self.values)} numbers >= 0 that do not sum to 0"
                raise ValueError(f"Choice: `weights` must be {need}; got {list(weights)}.")
            object.__setattr__(self, "weights", weights)

    def prepare(self, device: torch.device) -> None:
        """Put the values and the upper edges of their shares of [0, 1) on `device`, once."""
        if device not in self._tables:
            # A value of weight 0 has no share: leaving it out makes drawing it impossible, whatever is rounded.
            weights = self.weights or (1.0,) * len(self.values)
            kept = [(value, weight) for value, weight in zip(self.values, weights, strict=True) if weight > 0]
            shares = torch.tensor([weight for _, weight in kept], dtype=torch.float64)
            edges = (shares.cumsum(0) / shares.sum())[:-1].float()
            values = torch.tensor([value for value, _ in kept], dtype=torch.float32)
            self._tables[device] = (values.to(device), edges.to(device))

    def draw(self, noise: Tensor) -> Tensor:
        """Return the value in whose share of [0, 1) the noise lies, `[num_envs]`."""
        self.prepare(noise.device)
        values, edges = self._tables[noise.device]
        return values[torch.bucketize(noise.contiguous(), edges, right=True)]

    @property
    def support(self) -> tuple[float, float]:
        """The smallest and the largest of the values that have a weight."""
        drawn = [value for i, value in enumerate(self.values) if self.weights is None or self.weights[i] > 0]
        return min(drawn), max(drawn)

    @property
    def numbers(self) -> tuple[float, ...]:
        """The values, and the share of each."""
        weights = self.weights or (1.0,) * len(self.values)
        return (*self.values, *(weight / sum(weights) for weight in weights))

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> Self:
        """Make the one that has these values and shares."""
        values, weights = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
        return cls(values, None if len(set(weights)) == 1 else weights)

    @property
    def drawn_by(self) -> tuple[float, ...]:
        """The values, and the upper edges of their shares of [0, 1) but the last."""
        shares = torch.tensor(self.numbers[len(self.values) :], dtype=torch.float64)
        edges = shares.cumsum(0)
        return (*self.values, *(edges / edges[-1])[:-1].tolist())

    @classmethod
    def draw_by(cls, noise: Tensor, numbers: Any) -> Tensor:
        """Draw as `draw` does, `[num_envs]`, from n values and n - 1 edges, `[2 n - 1]`; some may meet."""
        count = (len(numbers) + 1) // 2
        values: Tensor = numbers[torch.bucketize(noise.contiguous(), numbers[count:], right=True)]
        return values

    def to_dict(self) -> dict[str, object]:
        """Return `{"choice": [values]}`, or with names where there are weights."""
        if self.weights is None:
            return super().to_dict()
        return {self.kind: {"values": list(self.values), "weights": list(self.weights)}}


@dataclasses.dataclass(frozen=True, repr=False)
class Grid(_Listed):
    """Assign values to copies round-robin, the same at every reset.

    Two grids run side by side, not crossed: copy i has the i-th value of each.

    Args:
        values: The values, at least one, and no more than there are copies.

    Raises:
        ValueError: If one is not a finite number.
    """

    kind: ClassVar[str] = "grid"
    fixed: ClassVar[bool] = True

    def draw(self, noise: Tensor) -> Tensor:
        """Return `values[i % len(values)]` for copy i, whatever the noise, float32 `[num_envs]`.

        Raises:
            ValueError: If there are fewer copies than values.
        """
        num_envs = noise.shape[0]
        if num_envs < len(self.values):
            raise ValueError(f"Grid: {len(self.values)} values need at least as many copies; got num_envs={num_envs}.")
        repeats = -(-num_envs // len(self.values))
        return torch.tensor(self.values, dtype=torch.float32, device=noise.device).repeat(repeats)[:num_envs]


KINDS: dict[str, type[ParameterDistribution]] = {
    Uniform.kind: Uniform,
    LogUniform.kind: LogUniform,
    Normal.kind: Normal,
    Choice.kind: Choice,
    Grid.kind: Grid,
}


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
        names = [field.name for field in dataclasses.fields(cls) if field.init]
        raise ValueError(f"{kind!r} takes {', '.join(names)}, as a list or by name; {error}.") from None

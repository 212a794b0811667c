"""The base class of distributions of physical parameters: values with an inverse cumulative distribution function."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from rl8x.plain import checked_number


def finite_number(value: object, owner: str, name: str) -> float:
    """Return `value` as a finite float, or raise naming the argument of `owner`."""
    return float(checked_number(value, name, owner))


def pair(values: object, owner: str, name: str, *, apart: bool = False) -> tuple[float, ...]:
    """Return `values` as two finite floats, the lower first and, if `apart`, not the same; or raise."""
    numbers = finite_numbers(values, owner, name)
    if len(numbers) != 2 or numbers[0] > numbers[1] or (apart and numbers[0] == numbers[1]):
        raise ValueError(f"{owner}: `{name}` must be two numbers, the lower first; got {list(numbers)}.")
    return numbers


def finite_numbers(values: object, owner: str, name: str) -> tuple[float, ...]:
    """Return `values` as a tuple of finite floats, or raise naming the argument of `owner`."""
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"{owner}: `{name}` must be a list of at least one number; got {values!r}.")
    return tuple(finite_number(value, owner, f"{name}[{i}]") for i, value in enumerate(values))


def plain(value: object) -> object:
    """Return a value of a distribution's field as JSON has it."""
    if isinstance(value, ParameterDistribution):
        return value.to_dict()
    return [plain(part) for part in value] if isinstance(value, tuple) else value


@dataclasses.dataclass(frozen=True)
class ParameterDistribution(ABC):
    """A distribution over the values of one parameter, in the parameter's unit."""

    kind: ClassVar[str]
    """Its name in a run file."""
    fixed: ClassVar[bool] = False
    """Whether every draw gives the same values, so that no noise is needed."""
    moves: ClassVar[bool] = False
    """Whether what is drawn changes while a policy trains; see `rl8x.randomization.curriculum`."""

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
        """Draw as `draw` does, by numbers that a program reads at each call.

        Args:
            noise: Uniform numbers in [0, 1), `[num_envs]`.
            numbers: What `drawn_by` gives, float32 `[*]`, on the device of the noise; floats are constants.

        Returns:
            One value a copy, float32 `[num_envs]`.

        Raises:
            TypeError: If the class has no such numbers.
        """
        raise TypeError(f"{cls.__name__} has no numbers that could move.")

    @abstractmethod
    def draw(self, noise: Tensor) -> Tensor:
        """Turn uniform numbers into one value a copy.

        Args:
            noise: Uniform numbers in [0, 1), `[num_envs]`.

        Returns:
            Float32, `[num_envs]`, within `support`.
        """

    def clipped(self, low: float, high: float) -> ParameterDistribution:
        """Return the distribution as it is within a parameter's legal bounds; most stay as they are.

        Args:
            low: The smallest legal value.
            high: The largest.

        Raises:
            ValueError: If it cannot be within them.
        """
        return self

    def prepare(self, device: torch.device) -> None:  # noqa: B027 - most have nothing to prepare
        """Put constants on a device before a program that draws is compiled or captured.

        Args:
            device: Where the noise of `draw` will be.
        """

    def to_dict(self) -> dict[str, object]:
        """Return the plain JSON form, for example `{"uniform": [0.1, 0.5]}`, without Nones at its end."""
        arguments = [getattr(self, field.name) for field in dataclasses.fields(self)]
        while arguments[-1] is None:
            arguments.pop()
        return {self.kind: arguments}

    def __repr__(self) -> str:
        """Write it as it is made, `Uniform(0.1, 0.5)`: what must be given by place, the rest by name."""
        parts = []
        for field in (field for field in dataclasses.fields(self) if field.init):
            value = getattr(self, field.name)
            text = repr(list(value) if isinstance(value, tuple) else value)
            if field.default is dataclasses.MISSING:
                parts.append(text)
            elif value is not None:
                parts.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(parts)})"

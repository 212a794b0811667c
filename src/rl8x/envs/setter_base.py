"""A setter of a simulator's parameter: its default and bounds, how it is read, written and shown."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeAlias

import numpy as np
from torch import Tensor

from rl8x.envs.parameters import Parameter

Value: TypeAlias = "float | Tensor"
"""A number; or for a simulator of many copies one for each, float32 `[num_envs]`."""


@dataclasses.dataclass(frozen=True)
class Setter(ABC):
    """Reads one parameter from a simulator, and sets it there.

    Attributes:
        default: Its value where `env_config` says nothing; None leaves what the simulator has.
        low: The smallest legal value; by default 0, or -inf where the default is not positive.
        high: The largest legal value; by default inf, or 0 where the default is negative.
        unit: Its unit, for example `kg`.
        description: Its meaning in a few words; by default the setter itself, as it is made.
    """

    kind: ClassVar[str]
    """Its name in a run file."""
    default: float | None = dataclasses.field(default=None, kw_only=True)
    low: float | None = dataclasses.field(default=None, kw_only=True)
    high: float | None = dataclasses.field(default=None, kw_only=True)
    unit: str = dataclasses.field(default="", kw_only=True)
    description: str = dataclasses.field(default="", kw_only=True)

    @property
    def by_copy(self) -> bool:
        """Whether a simulator of many copies can have another value for each."""
        return False

    @property
    def unset(self) -> float | None:
        """The value that is set if `env_config` has none; None sets nothing."""
        return self.default

    @abstractmethod
    def read(self, simulator: Any) -> Any:
        """Return a copy of what is there, to be restored and to take the default from.

        Args:
            simulator: The unwrapped simulator.

        Returns:
            A number or an array; of several parts a list of them.

        Raises:
            ValueError: If there is no such thing, or it is not a number.
        """

    def write(self, simulator: Any, original: Any, value: Value | None) -> None:
        """Set a value.

        Setters of simulators that are never changed, but replaced, have none.

        Args:
            simulator: The unwrapped simulator.
            original: The value before any `write`, as `read` returns it.
            value: The value, float32 `[num_envs]` for a simulator of many copies; None puts `original` back.

        Raises:
            NotImplementedError: If the simulator is one that is replaced.
            ValueError: If it cannot be set so.
        """
        raise NotImplementedError(f"{type(self).__name__} is for simulators that are replaced, and writes nothing.")

    def holds(self, simulator: Any, original: Any, value: Value | None) -> bool:
        """Whether what `write` set is still there after a reset.

        Args:
            simulator: The unwrapped simulator.
            original: The value before any `write`, as `read` returns it.
            value: The value that was written, float32 `[num_envs]` for a simulator of many copies; None for `original`.
        """
        return True

    def own_default(self, original: Any) -> float:
        """Return the one number that `read` found.

        Args:
            original: A number or an array of them, as `read` returns it.

        Raises:
            ValueError: If it found several that differ.
        """
        numbers = np.unique(np.asarray(original, dtype=np.float64))
        if len(numbers) != 1:
            raise ValueError(
                f"sets {np.size(original)} numbers that differ, from {numbers.min():g} to {numbers.max():g}: name one "
                "of them, multiply all of them with Scale, or give `default`."
            )
        return float(numbers[0])

    def parameter(self, original: Any) -> Parameter:
        """Return the default and the bounds that `env_config` is checked by.

        Args:
            original: A number or an array of them, as `read` returns it.

        Raises:
            ValueError: If `read` found several numbers and there is no `default`, or the default does not lie in the
                bounds.
        """
        default = self.own_default(original) if self.default is None else float(self.default)
        low = (0.0 if default > 0 else -math.inf) if self.low is None else float(self.low)
        high = (0.0 if default < 0 else math.inf) if self.high is None else float(self.high)
        return Parameter(default=default, low=low, high=high, unit=self.unit, description=self.description or str(self))

    def to_dict(self) -> dict[str, object]:
        """Return the plain form, from which `setter_of` makes an equal one."""
        first, *_ = _own_fields(self)
        changed = [field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default]
        form = {field.name: _plain(getattr(self, field.name)) for field in changed if field.name != first.name}
        return {self.kind: _plain(getattr(self, first.name)), **form}

    def __str__(self) -> str:
        """Write it as it is made, without default, bounds, unit and description."""
        own = [field for field in _own_fields(self) if getattr(self, field.name) != field.default]
        return f"{type(self).__name__}({', '.join(_shown(getattr(self, field.name)) for field in own)})"


def _own_fields(setter: Setter) -> list[dataclasses.Field[Any]]:
    """Return the fields that a setter has beside those of all."""
    shared = {field.name for field in dataclasses.fields(Setter)}
    return [field for field in dataclasses.fields(setter) if field.name not in shared]


def _plain(value: Any) -> Any:
    if isinstance(value, Setter):
        return value.to_dict()
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isinstance(value, Setter) else getattr(value, "__name__", repr(value))

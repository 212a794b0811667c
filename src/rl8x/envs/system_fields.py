"""Fields of the system that Brax and MuJoCo Playground simulate, replaced for each copy in a compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rl8x.envs.mujoco_model import ModelField, rows_of
from rl8x.envs.parameters import Parameter
from rl8x.envs.setter_base import Setter
from rl8x.envs.setters import Function, Scale
from rl8x.names import unknown_name


@dataclasses.dataclass(frozen=True)
class SystemField(Setter):
    """A field of a Brax `System`, or of an MJX model.

    What the environment has computed from it when it was made stays as it is.

    Attributes:
        path: Names with dots between them, such as `gravity`, `link.inertia.mass` or `geom_friction`.
        of: The name, or the names, whose rows are set: of links for `link.*`, else of what MuJoCo's field belongs to.
        index: The number within a row, or in a single vector such as `gravity`; None for all.
    """

    kind: ClassVar[str] = "system_field"
    path: str
    of: str | Sequence[str] | None = None
    index: int | None = None

    def read(self, simulator: Systems) -> Any:
        """Return a copy of the field's elements in the system that the environment came with."""
        array = np.asarray(self.array(simulator.system))
        if array.dtype.kind not in "iuf":
            raise ValueError(f"sets {self.path!r}, which must be numbers; it is {array.dtype}.")
        return array[self.where(simulator)].copy()

    def array(self, system: Any) -> Any:
        """Return the whole field.

        Raises:
            ValueError: If there is none.
        """
        value = system
        for name in self.path.split("."):
            if not hasattr(value, name):
                legal = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
                raise ValueError(unknown_name("field", name, legal, f" of {type(value).__name__}"))
            value = getattr(value, name)
        return value

    def where(self, simulator: Systems) -> Any:
        """Return the index of the elements within the field.

        Raises:
            ValueError: If there is no such name.
        """
        last = () if self.index is None else (self.index,)
        if self.of is None:
            return (..., *last)
        if not self.path.startswith("link."):
            return (np.array(rows_of(simulator.model, self.path, self.of)), ..., *last)
        links = list(simulator.system.link_names)
        names = [self.of] if isinstance(self.of, str) else self.of
        for name in names:
            if name not in links:
                raise ValueError(unknown_name("link", name, links, " of the system"))
        return (np.array([links.index(name) for name in names]), ..., *last)


class Systems:
    """The system of an environment, and those that take its place in the program of each copy.

    Args:
        setters: A setter for each parameter, by its name.
        env: The environment, whose system is `sys`, or `_mjx_model` in MuJoCo Playground.

    Raises:
        ValueError: If something of it is not there.
    """

    def __init__(self, setters: Mapping[str, Setter], env: Any) -> None:
        self.owner, self.setters = getattr(env, "unwrapped", env), dict(setters)
        self.attribute = "sys" if hasattr(self.owner, "sys") else "_mjx_model"
        if setters and not hasattr(self.owner, self.attribute):
            raise ValueError(f"BraxEnv: {type(self.owner).__name__} has neither `sys` nor `_mjx_model` to set.")
        self.system: Any = getattr(self.owner, self.attribute, None)
        self.model = getattr(self.system, "mj_model", None) or getattr(self.owner, "mj_model", None)
        self.originals: dict[str, Any] = {}
        self.parameters: dict[str, Parameter] = {}
        for name, setter in self.setters.items():
            try:
                self.originals[name] = self._read(setter)
                self.parameters[name] = setter.parameter(self.originals[name])
            except ValueError as error:
                raise ValueError(f"BraxEnv: parameters[{name!r}] {error}") from None

    def applied(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the environment that takes the values of one copy, by name, before its arguments."""

        def under(values: Mapping[str, Any], *arguments: Any) -> Any:
            if not self.setters:
                return function(*arguments)
            system = self.system
            for name, setter in self.setters.items():
                system = self._replaced(setter, system, self.originals[name], values[name])
            setattr(self.owner, self.attribute, system)
            try:
                return function(*arguments)
            finally:
                setattr(self.owner, self.attribute, self.system)

        return under

    def _read(self, setter: Any) -> Any:
        if isinstance(setter, Scale):
            return [self._read(part) for part in setter.parts]
        return setter.read(self.system) if isinstance(setter, Function) else _as_system_field(setter).read(self)

    def _replaced(self, setter: Any, system: Any, original: Any, value: Any) -> Any:
        """Return the system with what a setter sets: a value, or where it is None the original."""
        if isinstance(setter, Scale):
            for part, base in zip(setter.parts, original, strict=True):
                system = self._replaced(part, system, base * value, None)
            return system
        if isinstance(setter, Function):
            return setter.function(system, value)
        field = _as_system_field(setter)
        elements = original if value is None else value
        array = jax_array(field.array(system)).at[field.where(self)].set(elements)
        return _with_field(system, field.path.split("."), array)


def jax_array(value: Any) -> Any:
    """Return numbers as an array of JAX."""
    import jax

    return jax.numpy.asarray(value)


def _as_system_field(setter: Any) -> SystemField:
    if not isinstance(setter, ModelField):
        field: SystemField = setter
        return field
    shared = {each.name: getattr(setter, each.name) for each in dataclasses.fields(Setter)}
    return SystemField(setter.field, setter.of, setter.index, **shared)


def _with_field(owner: Any, names: list[str], array: Any) -> Any:
    """Return a copy of nested dataclasses with another array at the end of a path."""
    first, *rest = names
    return owner.replace(**{first: _with_field(getattr(owner, first), rest, array) if rest else array})

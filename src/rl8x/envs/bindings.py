"""Bindings connect parameters of `env_config` to values in a simulator.

    GymnasiumEnv("CartPole-v1", 16, parameters={"length": "length", "gravity": Scale("gravity", high=3.0)})
    GymnasiumEnv("HalfCheetah-v5", 16, parameters={"mass": Scale(ModelField("body_mass", "torso"))})

An adapter takes a mapping from the names that `env_config` uses to bindings. All except functions have a plain form for
run files, their kind with its first argument: `{"model_field": "body_mass", "of": "torso", "unit": "kg"}`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
from torch import Tensor

from rl8x.envs.parameters import Parameter
from rl8x.names import did_you_mean
from rl8x.plain import frozen

Value: TypeAlias = "float | Tensor"
"""A number or, for a simulator of many copies, one number per copy, float32 `[num_envs]`."""

_STEP: Final = re.compile(r"\.?(?P<name>[A-Za-z_]\w*)|\[\s*(?P<quote>['\"]?)(?P<key>[^\]'\"]+?)(?P=quote)\s*\]")


@dataclasses.dataclass(frozen=True)
class Binding(ABC):
    """Reads one parameter from a simulator, and sets it there.

    Attributes:
        default: Its value if `env_config` does not set it; None keeps the simulator's own value.
        low: The smallest legal value; by default 0, or -inf if the default is not positive.
        high: The largest legal value; by default inf, or 0 if the default is negative.
        unit: Its unit, for example `kg`.
        description: Its meaning in a few words; by default the call that makes the binding.
    """

    kind: ClassVar[str]
    """Its name in a run file."""
    default: float | None = dataclasses.field(default=None, kw_only=True)
    low: float | None = dataclasses.field(default=None, kw_only=True)
    high: float | None = dataclasses.field(default=None, kw_only=True)
    unit: str = dataclasses.field(default="", kw_only=True)
    description: str = dataclasses.field(default="", kw_only=True)

    @abstractmethod
    def read(self, simulator: Any) -> Any:
        """Return a copy of the present value, a number or an array; for several parts, a list of them.

        Args:
            simulator: The unwrapped simulator.

        Raises:
            ValueError: If the simulator has no such value, or it is not a number.
        """

    def write(self, simulator: Any, original: Any, value: Value | None) -> None:
        """Set a value; bindings of simulators that are replaced, rather than changed, do not support it.

        Args:
            simulator: The unwrapped simulator.
            original: The value before any `write`, as `read` returns it.
            value: The value, float32 `[num_envs]` for a simulator of many copies; None puts `original` back.

        Raises:
            NotImplementedError: If the simulator is one that is replaced.
            ValueError: If the value cannot be set.
        """
        raise NotImplementedError(f"{type(self).__name__} is for simulators that are replaced, and writes nothing.")

    def parameter(self, original: Any) -> Parameter:
        """Return the parameter, with the default and bounds that apply to `env_config`.

        Args:
            original: What `read` returned.

        Raises:
            ValueError: If `read` found several numbers and there is no `default`, or the default does not lie in the
                bounds.
        """
        found = np.unique(np.asarray(original, dtype=np.float64)) if self.default is None else [self.default]
        if len(found) != 1:
            raise ValueError(
                f"sets {np.size(original)} numbers that differ, from {found[0]:g} to {found[-1]:g}: name one of them, "
                "multiply all of them with Scale, or give `default`."
            )
        default = float(found[0])
        low = (0.0 if default > 0 else -math.inf) if self.low is None else float(self.low)
        high = (0.0 if default < 0 else math.inf) if self.high is None else float(self.high)
        return Parameter(default=default, low=low, high=high, unit=self.unit, description=self.description or str(self))

    def _given(self) -> list[tuple[dataclasses.Field[Any], Any]]:
        """Return the fields that differ from their defaults, with their values."""
        values = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [(field, value) for field, value in values if value != field.default]

    def to_dict(self) -> dict[str, object]:
        """Return the plain form, from which `binding_of` makes an equal one."""
        first = next(field.name for field in dataclasses.fields(self) if not field.kw_only)
        return {self.kind if field.name == first else field.name: _plain(value) for field, value in self._given()}

    def __str__(self) -> str:
        """Return the call that makes the binding, without default, bounds, unit and description."""
        shown = [_shown(value) for field, value in self._given() if not field.kw_only]
        return f"{type(self).__name__}({', '.join(shown)})"


def _plain(value: Any) -> Any:
    if isinstance(value, Binding):
        return value.to_dict()
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isinstance(value, Binding) else getattr(value, "__name__", repr(value))


@dataclasses.dataclass(frozen=True)
class Attribute(Binding):
    """An attribute of the unwrapped simulator: `"length"`, `"model.opt.gravity[2]"`, `"limits['x']"`.

    Attributes:
        path: Names joined by dots, with indices or keys in brackets. An array is set as a whole, in place.
        per_copy: Whether it is an array or tensor with a row for each copy, `[num_envs, ...]`, in a simulator of many
            copies.

    Raises:
        ValueError: If the path is not of that form.
    """

    kind: ClassVar[str] = "attribute"
    path: str
    per_copy: bool = False

    def __post_init__(self) -> None:
        _steps(self.path)

    def read(self, simulator: Any) -> Any:
        """Return a copy of the value at the path."""
        try:
            value = functools.reduce(_taken, _steps(self.path), simulator)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            hint = did_you_mean(self.path, [name for name in vars(simulator) if not name.startswith("_")])
            raise ValueError(f"{type(simulator).__name__} has no {self.path!r} ({error}).{hint}") from None
        if isinstance(value, Tensor):
            return value.clone()
        if isinstance(value, bool | np.bool_) or np.asarray(value).dtype.kind not in "iuf":
            raise ValueError(
                f"{self.path!r} of {type(simulator).__name__} must be a number or an array; it is {value!r}."
            )
        return value.copy() if isinstance(value, np.ndarray) else value

    def write(self, simulator: Any, original: Any, value: Value | None) -> None:
        """Set the attribute; all elements of an array get the value."""
        wanted: Any = original if value is None else fitted(value, original, self.path)
        *path, last = _steps(self.path)
        owner = functools.reduce(_taken, path, simulator)
        try:
            if isinstance(original, np.ndarray | Tensor):
                _taken(owner, last)[...] = wanted
            elif isinstance(last, str):
                setattr(owner, last, wanted)
            else:
                owner[last[0]] = wanted
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{self.path!r} of {type(simulator).__name__} cannot be set: {error}.") from error


def fitted(value: Value, original: Any, name: str) -> Any:
    """Return a value in the form of the original; raise `ValueError` for a fraction in the place of a whole number."""
    if is_whole(original):
        for number in value.tolist() if isinstance(value, Tensor) else [value]:
            if number % 1:
                raise ValueError(f"{name!r} is a whole number; got {number:g}. Draw whole ones with Choice.")
        value = value.long() if isinstance(value, Tensor) else int(value)
    return _rows(value, original) if isinstance(value, Tensor) else value


def is_whole(value: Any) -> bool:
    """Whether a number, array or tensor has whole numbers, which would cut what is set there."""
    return not (value.is_floating_point() if isinstance(value, Tensor) else np.asarray(value).dtype.kind == "f")


def _steps(path: str) -> list[str | tuple[Any]]:
    """Split a path into attribute names and keys, each key in a 1-tuple; raise `ValueError` for a malformed path."""
    matches = [*_STEP.finditer(path)]
    if not matches or not matches[0]["name"] or "".join(match[0] for match in matches) != path:
        raise ValueError(f"a path looks like `length`, `model.opt.gravity[2]` or `limits['x']`; got {path!r}.")
    steps: list[str | tuple[Any]] = []
    for match in matches:
        is_index = match["key"] and not match["quote"] and match["key"].lstrip("-").isdigit()
        steps.append(match["name"] or (int(match["key"]) if is_index else match["key"],))
    return steps


def _taken(owner: Any, step: str | tuple[Any]) -> Any:
    return getattr(owner, step) if isinstance(step, str) else owner[step[0]]


def _rows(values: Tensor, like: Any) -> Any:
    """Reshape one value per copy, `[num_envs]`, so that it sets or multiplies the rows of an array or tensor."""
    rows = values.reshape(-1, *(1,) * (like.ndim - 1))
    return rows.to(like.device) if isinstance(like, Tensor) else rows.double().cpu().numpy()


@dataclasses.dataclass(frozen=True)
class Scale(Binding):
    """A factor that multiplies the simulator's own values of other bindings; 1 keeps them.

    Attributes:
        of: The values that are multiplied: a binding, an attribute's path, a plain form, or several of them.
    """

    kind: ClassVar[str] = "scale"
    of: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", frozen(self.of))

    @property
    def parts(self) -> list[Any]:
        """The bindings and paths that are multiplied, as given."""
        return list(self.of) if isinstance(self.of, list | tuple) else [self.of]

    def read(self, simulator: Any) -> Any:
        """Return the values of the parts."""
        return [part.read(simulator) for part in self.parts]

    def parameter(self, original: Any) -> Parameter:
        """Return the bounds; the default is 1."""
        for part, base in zip(self.parts, original, strict=True):
            if is_whole(base):
                raise ValueError(f"{part} is a whole number, which has no factors; set it itself, with Choice.")
        return super().parameter(1.0)

    def write(self, simulator: Any, original: Any, value: Value | None) -> None:
        """Set each part to its original times the value."""
        for part, base in zip(self.parts, original, strict=True):
            factor = 1.0 if value is None else _rows(value, base) if isinstance(value, Tensor) else value
            part.write(simulator, base * factor, None)


@dataclasses.dataclass(frozen=True)
class Function(Binding):
    """A function `(env, value) -> None` that sets several things, such as an attribute and values derived from it.

    It gets the unwrapped environment and a number, or a tensor `[num_envs]` if the simulator has many copies. It has no
    plain form: files contain no code.

    Attributes:
        function: Sets the value; with the default it must change nothing.
        reads: Path of the attribute from which the default is read; by default the parameter's own name.
    """

    kind: ClassVar[str] = "function"
    function: Callable[[Any, Any], object]
    reads: str | None = None

    def read(self, simulator: Any) -> Any:
        """Return `default` if it is given, else the value of the attribute `reads`."""
        if self.default is not None:
            return self.default
        try:
            return Attribute(self.reads or "").read(simulator)
        except ValueError:
            name = getattr(self.function, "__name__", repr(self.function))
            raise ValueError(
                f"is set by the function {name}, and {type(simulator).__name__} has no attribute to read the default "
                f"from: use Function({name}, default=...)."
            ) from None

    def write(self, simulator: Any, original: Any, value: Value | None) -> None:
        """Call the function with the value, or with the default if it is None."""
        self.function(simulator, self.parameter(original).default if value is None else value)


def bindings_of(parameters: Mapping[str, Any] | None, kinds: Sequence[type[Binding]], owner: str) -> dict[str, Binding]:
    """Return the bindings of an adapter's parameters."""
    if not isinstance(parameters or {}, Mapping):
        raise TypeError(f"{owner}: parameters must be a mapping from names to what they set; got {parameters!r}.")
    bindings = {}
    for name, form in (parameters or {}).items():
        with in_parameter(name, owner):
            bindings[name] = binding_of(form, kinds, name)
    return bindings


@contextlib.contextmanager
def in_parameter(name: str, owner: str = "") -> Iterator[None]:
    """Re-raise a `TypeError` or `ValueError` of the context as a `ValueError` that names the parameter."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner}{': ' if owner else ''}parameters[{name!r}]: {error}") from error


def binding_of(form: Any, kinds: Sequence[type[Binding]], name: str = "") -> Binding:
    """Parse a binding; a function's default is read from the attribute `name`."""
    if isinstance(form, str):
        first: Any = kinds[0]
        form = first(form)
    elif isinstance(form, Mapping):
        by_kind: dict[str, Any] = {kind.kind: kind for kind in kinds if kind is not Function}
        chosen = [kind for kind in by_kind if kind in form]
        if len(chosen) != 1:
            raise ValueError(f"must have one of the keys {', '.join(by_kind)}; got {dict(form)!r}.")
        rest = {key: value for key, value in form.items() if key != chosen[0]}
        try:
            form = by_kind[chosen[0]](form[chosen[0]], **rest)
        except TypeError as error:
            raise ValueError(f"{chosen[0]!r} does not take that: {error}.") from None
    elif callable(form) and Function in kinds:
        form = Function(form)
    if not isinstance(form, tuple(kinds)):
        known = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"must be one of {known}, or its plain form; got {form!r}.")
    if isinstance(form, Function) and form.reads is None:
        form = dataclasses.replace(form, reads=name)
    if isinstance(form, Scale):
        parts = [binding_of(part, [kind for kind in kinds if kind not in (Scale, Function)]) for part in form.parts]
        form = dataclasses.replace(form, of=parts[0] if len(parts) == 1 else tuple(parts))
    binding: Binding = form
    return binding

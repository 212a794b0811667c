"""Conditions as plain data, for run files.

stop_conditions:
  - hits_upper_bound: {name: env/steps, bound: 1000000}
  - all:
      - plateau: {name: episodes/returns/mean, patience: 20}
      - not: {hits_lower_bound: [episodes/returns/mean, 100]}
  - wall_time: 2h
  - eval/returns/mean >= 475 and env/steps >= 50000
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from rl8x.conditions.base import And, Condition, FromCallable, Not, Or
from rl8x.conditions.expressions import looks_like_comparison, parse
from rl8x.conditions.kinds import KINDS
from rl8x.conditions.metrics import NonFinite
from rl8x.conditions.plain import plain
from rl8x.names import did_you_mean

_NAMES: Final = {cls: name for name, cls in KINDS.items()}
_BY_CLASS_NAME: Final = {cls.__name__: cls for cls in KINDS.values()}

Find = Callable[[str], Any]


def from_spec(spec: object, *, find: Find | None = None) -> Condition:
    """Make a condition from plain data.

    Args:
        spec: One entry, from the kind (`"plateau"` or `"Plateau"`) to its arguments by name, in order, or the only one;
            or the kind alone. `all` and `any` take a list of conditions, `not` one. Or a text that compares metrics
            with numbers, such as `"eval/returns/mean >= 475 and env/steps >= 5e4"`.
        find: Finds the class of a kind with a dot in its name, a user's own condition.

    Raises:
        ValueError: If the kind is unknown or the arguments are not its own.
        TypeError: If an argument is of the wrong type.
    """
    if isinstance(spec, str) and looks_like_comparison(spec):
        try:
            return parse(spec)
        except ValueError as error:
            raise _unknown(spec, f" {str(error)[:1].upper()}{str(error)[1:].removesuffix('.')}.") from None
    kind, arguments = _split(spec)
    cls = _find_class(kind, find)
    if cls in (And, Or):
        if not isinstance(arguments, list | tuple):
            raise ValueError(f"stop condition {kind!r} takes a list of conditions; got {arguments!r}.")
        return cls(*(from_spec(part, find=find) for part in arguments))
    if cls is Not:
        return Not(from_spec(arguments, find=find))
    positional: list[Any] = []
    named: dict[str, Any] = {}
    if isinstance(arguments, Mapping):
        named = {str(name): value for name, value in arguments.items()}
    elif isinstance(arguments, list | tuple) and cls is not NonFinite:
        positional = list(arguments)
    elif arguments is not None:
        positional = [arguments]
    inner = cls.condition_arguments
    if inner and len(named) == 1 and inner[0] not in named:
        # {confirmed: {hits_upper_bound: [returns/mean, 9]}}: the one entry is the condition
        positional, named = [named], {}
    signature = inspect.signature(cls)
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        raise ValueError(f"stop condition {kind!r} takes {', '.join(signature.parameters)}; {error}.") from None
    for name in inner:
        if bound.arguments.get(name) is not None:
            bound.arguments[name] = from_spec(bound.arguments[name], find=find)
    return cls(*bound.args, **bound.kwargs)


def _split(spec: object) -> tuple[str, Any]:
    if isinstance(spec, str):
        return spec, None
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise ValueError(
            "a stop condition is written as one entry, as in {plateau: {name: episodes/returns/mean, patience: 10}}; "
            f"got {dict(spec) if isinstance(spec, Mapping) else spec!r}."
        )
    (kind, arguments), *_ = spec.items()
    return str(kind), arguments


def _find_class(kind: str, find: Find | None) -> type[Condition]:
    known = KINDS.get(kind) or _BY_CLASS_NAME.get(kind)
    if known is not None:
        return known
    if find is not None and "." in kind:
        cls = find(kind)
        if isinstance(cls, type) and issubclass(cls, Condition):
            return cls
        raise ValueError(f"{kind!r} is not a subclass of rl8x.conditions.Condition.")
    raise _unknown(kind, did_you_mean(kind, [*KINDS, *_BY_CLASS_NAME]))


def _unknown(kind: str, hint: str) -> ValueError:
    return ValueError(f"unknown stop condition {kind!r}.{hint} There are {', '.join(KINDS)}.")


def kinds_in(specs: object) -> Iterator[str]:
    """Yield all keys in conditions that are plain data: kinds, and names of arguments."""
    for name, inner in specs.items() if isinstance(specs, Mapping) else ():
        yield str(name)
        yield from kinds_in(inner)
    for inner in specs if isinstance(specs, list | tuple) else ():
        yield from kinds_in(inner)


def to_spec(condition: Condition) -> Any:
    """Return the plain data from which `from_spec` makes the condition again.

    Args:
        condition: The condition, with all that it is composed of.

    Raises:
        ValueError: If it contains what has no such form: a plain callable, a class that is not an attribute of a
            module, or an argument that is not plain data.
    """
    if isinstance(condition, FromCallable):
        raise ValueError(f"a plain callable has no form in a run file: {condition!r}. Write a Condition subclass.")
    cls = type(condition)
    if "<locals>" in cls.__qualname__:
        raise ValueError(f"{cls.__qualname__} has no form in a run file: define it outside of functions.")
    kind = _NAMES.get(cls) or f"{cls.__module__}.{cls.__qualname__}"
    if isinstance(condition, And | Or):
        return {kind: [to_spec(part) for part in condition.children]}
    if isinstance(condition, Not):
        return {kind: to_spec(condition.condition)}
    arguments = {name: value for name, value in condition.arguments().items() if value is not None}
    try:
        return {kind: {name: to_spec(v) if isinstance(v, Condition) else plain(v) for name, v in arguments.items()}}
    except TypeError as error:
        raise ValueError(f"{condition!r} has no form in a run file: an argument is {error}.") from None

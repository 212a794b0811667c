"""Conditions as plain data and as texts, for run files and the command line.

A text has comparisons in Python's syntax, with `and`, `or`, `not` and parentheses. A comparison has a metric on one
side and a number on the other. A metric's name may contain spaces; a name with a word such as `and` or with other
special characters needs quotes. A text becomes conditions of the built-in kinds, which checkpoints and reasons show.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from rl8x.conditions.base import KINDS, And, Condition, FromCallable, Not, Or, plain
from rl8x.conditions.kinds import HitsLowerBound, HitsUpperBound, NonFinite
from rl8x.names import did_you_mean
from rl8x.output import shown
from rl8x.plain import MAX_DEPTH

_WORDS: Final = r"(?:and|or|not)(?![^\s()'\"<>=!])"
_DIGITS: Final = r"[0-9]+(?:_[0-9]+)*"
_TOKEN: Final = re.compile(
    rf"""\s*(?:
        (?P<mark>[<>]=?|[=!]=|[()]|{_WORDS})
        | (?P<quoted>"[^"]+"|'[^']+')
        | (?P<number>[-+]?(?:{_DIGITS}\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)(?=\s*(?:$|[<>=!()]|{_WORDS}))
        | (?P<name>(?:[\w./-]|:(?!\s))+(?:[ ]+(?!{_WORDS})(?:[\w./-]|:(?!\s))+)*)
    )\s*""",
    re.VERBOSE | re.IGNORECASE,
)
_COMPARISONS: Final[dict[type[ast.cmpop], Callable[[str, float], Condition]]] = {
    ast.GtE: HitsUpperBound,
    ast.LtE: HitsLowerBound,
    ast.Gt: lambda name, bound: ~HitsLowerBound(name, bound),
    ast.Lt: lambda name, bound: ~HitsUpperBound(name, bound),
    ast.Eq: lambda name, bound: HitsLowerBound(name, bound) & HitsUpperBound(name, bound),
    ast.NotEq: lambda name, bound: ~(HitsLowerBound(name, bound) & HitsUpperBound(name, bound)),
}
_TURNED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.GtE: ast.LtE,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.Lt: ast.Gt,
}

Find = Callable[[str], Any]


def from_spec(spec: object, *, find: Find | None = None) -> Condition:
    """Make a condition from plain data.

    Args:
        spec: A mapping of one entry, from the kind (`"plateau"` or `"Plateau"`) to its arguments: by name, in order, or
            a single one; or the kind alone. `all` and `any` take a list of conditions, `not` one. Or a text that
            compares metrics with numbers, such as `"eval/returns/mean >= 475 and env/steps >= 5e4"`.
        find: Returns the class of a kind with a dot in its name, a user's own condition.

    Raises:
        ValueError: If the kind is unknown or does not take the arguments.
        TypeError: If an argument has a wrong type.
    """
    if isinstance(spec, str) and re.search("[<>=]", spec):
        try:
            return parse(spec)
        except ValueError as error:
            raise _unknown(spec, f" {str(error)[:1].upper()}{str(error)[1:].removesuffix('.')}.") from None
    kind, given = _split(spec)
    cls = _find_class(kind, find)
    if cls in (And, Or):
        if not isinstance(given, list | tuple):
            raise ValueError(f"stop condition {kind!r} takes a list of conditions; got {shown(given)}.")
        return cls(*(from_spec(part, find=find) for part in given))
    inner, signature = cls.condition_arguments, inspect.signature(cls)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    # {confirmed: {hits_upper_bound: [returns/mean, 9]}}: the one entry is the condition
    if isinstance(given, Mapping) and not (inner and len(given) == 1 and inner[0] not in given):
        named = {str(name): value for name, value in given.items()}
    elif given is not None:
        positional = list(given) if isinstance(given, list | tuple) and cls is not NonFinite else [given]
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        raise ValueError(f"stop condition {kind!r} takes {', '.join(signature.parameters)}; {error}.") from None
    for name in inner:
        if bound.arguments.get(name) is not None:
            bound.arguments[name] = from_spec(bound.arguments[name], find=find)
    return cls(*bound.args, **bound.kwargs)


def _split(spec: object) -> tuple[str, Any]:
    """Return the kind of a condition, and its arguments or None."""
    if isinstance(spec, str):
        return spec, None
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise ValueError(
            "a stop condition is written as one entry, as in {plateau: {name: episodes/returns/mean, patience: 10}}; "
            f"got {shown(dict(spec) if isinstance(spec, Mapping) else spec)}."
        )
    [(kind, given)] = spec.items()
    return str(kind), given


def _find_class(kind: str, find: Find | None) -> type[Condition]:
    classes = KINDS | {cls.__name__: cls for cls in KINDS.values()}
    known = classes.get(kind)
    if known is not None:
        return known
    if find is None or "." not in kind:
        raise _unknown(kind, did_you_mean(kind, classes))
    cls = find(kind)
    if not isinstance(cls, type) or not issubclass(cls, Condition):
        raise ValueError(f"{kind!r} is not a subclass of rl8x.conditions.Condition.")
    return cls


def _unknown(kind: str, hint: str) -> ValueError:
    return ValueError(f"unknown stop condition {kind!r}.{hint} There are {', '.join(KINDS)}.")


def to_spec(condition: Condition) -> Any:
    """Return the plain data from which `from_spec` makes the condition again.

    Args:
        condition: The condition, with its children.

    Raises:
        ValueError: If a part has no such form: a plain callable, a class that is not an attribute of a module, or an
            argument that is not plain data.
    """
    if isinstance(condition, FromCallable):
        raise ValueError(f"a plain callable has no form in a run file: {condition!r}. Write a Condition subclass.")
    cls = type(condition)
    if "<locals>" in cls.__qualname__:
        raise ValueError(f"{cls.__qualname__} has no form in a run file: define it outside of functions.")
    kind = next((name for name, known in KINDS.items() if known is cls), f"{cls.__module__}.{cls.__qualname__}")
    if isinstance(condition, And | Or):
        return {kind: [to_spec(part) for part in condition.children]}
    if isinstance(condition, Not):
        return {kind: to_spec(condition.condition)}
    arguments = {name: value for name, value in condition.arguments().items() if value is not None}
    try:
        return {kind: {name: to_spec(v) if isinstance(v, Condition) else plain(v) for name, v in arguments.items()}}
    except TypeError as error:
        raise ValueError(f"{condition!r} has no form in a run file: an argument is {error}.") from None


# -- texts


def is_expression(text: str) -> bool:
    """Whether a text consists of legal comparisons."""
    try:
        parse(text)
    except ValueError:
        return False
    return True


def parse(text: str) -> Condition:
    """Make a condition of a text, which Python parses with `_0`, `_1`, ... in place of metrics and numbers."""
    operands, source, place, depth = list[str | float](), "", 0, 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"{text[place:]!r} cannot be read")
        place = match.end()
        if match["mark"] is not None:
            source += f" {match['mark'].lower()} "
            depth += (match["mark"] == "(") - (match["mark"] == ")")
            if depth > MAX_DEPTH:
                raise ValueError("it is nested too deeply")
            continue
        source += f" _{len(operands)} "
        number, quoted = match["number"], match["quoted"]
        if number is not None:
            operands.append(int(number) if re.fullmatch(f"[-+]?{_DIGITS}", number) else float(number))
        else:
            operands.append(match["name"] if quoted is None else quoted[1:-1])
    try:
        return _made(ast.parse(source.strip(), mode="eval").body, operands)
    except SyntaxError:
        raise ValueError("a metric, a number or a parenthesis is missing, or there is one too many") from None


def _made(node: ast.expr, operands: list[str | float]) -> Condition:
    """Make the condition of a node of the syntax tree in `parse`."""
    if isinstance(node, ast.BoolOp):
        join = And if isinstance(node.op, ast.And) else Or
        return join(*(_made(part, operands) for part in node.values))
    if isinstance(node, ast.UnaryOp):
        return ~_made(node.operand, operands)
    sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
    odd = next((side for side in sides or [node] if not (sides and isinstance(side, ast.Name))), None)
    if odd is not None:
        names = [operands[int(each.id[1:])] for each in ast.walk(odd) if isinstance(each, ast.Name)]
        raise ValueError(f"{names[0]!r} is compared with nothing" if names else "`()` has nothing in it")
    assert isinstance(node, ast.Compare)
    values = [operands[int(side.id[1:])] for side in sides if isinstance(side, ast.Name)]
    pairs = [_compared(values[i], type(mark), values[i + 1]) for i, mark in enumerate(node.ops)]
    return pairs[0] if len(pairs) == 1 else And(*pairs)


def _compared(left: str | float, mark: type[ast.cmpop], right: str | float) -> Condition:
    if isinstance(left, str) and not isinstance(right, str):
        return _COMPARISONS[mark](left, right)
    if isinstance(right, str) and not isinstance(left, str):
        return _COMPARISONS[_TURNED.get(mark, mark)](right, left)
    raise ValueError(f"of {left!r} and {right!r} one must be a metric and the other a number")

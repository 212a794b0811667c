"""Conditions as plain data and as texts, for run files and the command line.

stop_conditions:
  - hits_upper_bound: {name: env/steps, bound: 1000000}
  - all:
      - plateau: {name: episodes/returns/mean, patience: 20}
      - not: {hits_lower_bound: [episodes/returns/mean, 100]}
  - wall_time: 2h
  - eval/returns/mean >= 475 and not (losses/vf > 1 or env/steps < 5e4)

The grammar of the last, a text:

    either     = both ("or" both)*
    both       = negated ("and" negated)*
    negated    = "not"* ( "(" either ")" | comparison )
    comparison = operand (("<" | "<=" | ">" | ">=" | "==" | "!=") operand)+

Of two operands that are compared one is a metric and the other a number. A metric's name may have spaces within; one
with a word such as `and` in it, or other odd characters, stands in quotes. What comes of a text are the conditions that
there are, so that checkpoints and the reason for stopping show those.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from rl8x.conditions.base import KINDS, And, Condition, FromCallable, Not, Or, plain
from rl8x.conditions.kinds import HitsLowerBound, HitsUpperBound, NonFinite
from rl8x.names import did_you_mean
from rl8x.plain_yaml import MAX_DEPTH

_NAMES: Final = {cls: name for name, cls in KINDS.items()}
_BY_CLASS_NAME: Final = {cls.__name__: cls for cls in KINDS.values()}
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
_COMPARISONS: Final[dict[str, Callable[[str, float], Condition]]] = {
    ">=": HitsUpperBound,
    "<=": HitsLowerBound,
    ">": lambda name, bound: ~HitsLowerBound(name, bound),
    "<": lambda name, bound: ~HitsUpperBound(name, bound),
    "==": lambda name, bound: HitsLowerBound(name, bound) & HitsUpperBound(name, bound),
    "!=": lambda name, bound: ~(HitsLowerBound(name, bound) & HitsUpperBound(name, bound)),
}
_TURNED: Final = {">=": "<=", "<=": ">=", ">": "<", "<": ">", "==": "==", "!=": "!="}

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
    if isinstance(spec, str) and re.search("[<>=]", spec):
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


# -- texts


def is_expression(text: str) -> bool:
    """Whether a text is a legal comparison, or several."""
    try:
        parse(text)
    except ValueError:
        return False
    return True


def parse(text: str) -> Condition:
    """Make a condition of a text.

    Raises:
        ValueError: If it is no such text; the message says where.
    """
    parser = _Parser(text)
    condition = parser.either()
    if parser.token is not None:
        raise ValueError(f"{parser.token!r} is not expected there")
    return condition


class _Parser:
    """Reads a text from left to right; `token` is the next one, None at the end."""

    def __init__(self, text: str) -> None:
        self._text, self._place, self._depth = text, 0, 0
        self._advance()

    def _advance(self) -> None:
        self.token: str | None = None
        if self._place == len(self._text):
            return
        match = _TOKEN.match(self._text, self._place)
        if match is None:
            raise ValueError(f"{self._text[self._place :]!r} cannot be read")
        self._kind, self._place = match.lastgroup, match.end()
        self.token = match[str(self._kind)]
        if self._kind == "mark":
            self.token = self.token.lower()

    def _take(self, *tokens: str) -> str | None:
        """Take the next token if it is one of these marks."""
        token = self.token
        if token not in tokens or self._kind != "mark":
            return None
        self._advance()
        return token

    def either(self) -> Condition:
        """Read alternatives."""
        parts = [self._both()]
        while self._take("or"):
            parts.append(self._both())
        return parts[0] if len(parts) == 1 else Or(*parts)

    def _both(self) -> Condition:
        parts = [self._negated()]
        while self._take("and"):
            parts.append(self._negated())
        return parts[0] if len(parts) == 1 else And(*parts)

    def _negated(self) -> Condition:
        negated = False
        while self._take("not"):
            negated = not negated
        if self._take("("):
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ValueError("it is nested too deeply")
            condition = self.either()
            if not self._take(")"):
                raise ValueError("a `)` is missing")
            self._depth -= 1
        else:
            condition = self._comparison()
        return ~condition if negated else condition

    def _comparison(self) -> Condition:
        operands, marks = [self._operand()], []
        while mark := self._take(*_COMPARISONS):
            marks.append(mark)
            operands.append(self._operand())
        if not marks:
            raise ValueError(f"{operands[0]!r} is compared with nothing")
        pairs = [_compared(left, mark, right) for (left, right), mark in zip(pairwise(operands), marks, strict=True)]
        return pairs[0] if len(pairs) == 1 else And(*pairs)

    def _operand(self) -> str | float:
        token, kind = self.token, self._kind
        if token is None or kind == "mark":
            raise ValueError(
                f"a metric or a number is missing {'at the end' if token is None else f'before {token!r}'}"
            )
        self._advance()
        if kind == "number":
            return int(token) if re.fullmatch(f"[-+]?{_DIGITS}", token) else float(token)
        return token[1:-1] if kind == "quoted" else token


def _compared(left: str | float, mark: str, right: str | float) -> Condition:
    if isinstance(left, str) and not isinstance(right, str):
        return _COMPARISONS[mark](left, right)
    if isinstance(right, str) and not isinstance(left, str):
        return _COMPARISONS[_TURNED[mark]](right, left)
    raise ValueError(f"of {left!r} and {right!r} one must be a metric and the other a number")

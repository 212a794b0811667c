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
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from rl8x.conditions.base import KINDS, And, Condition, FromCallable, Not, Or, plain
from rl8x.conditions.kinds import HitsLowerBound, HitsUpperBound, NonFinite
from rl8x.names import did_you_mean
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
    kind, given = _split(spec)
    cls = _find_class(kind, find)
    if cls in (And, Or):
        if not isinstance(given, list | tuple):
            raise ValueError(f"stop condition {kind!r} takes a list of conditions; got {given!r}.")
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
    """Return the kind of a condition, and its arguments."""
    if isinstance(spec, str):
        return spec, None
    if not isinstance(spec, Mapping) or len(spec) != 1:
        raise ValueError(
            "a stop condition is written as one entry, as in {plateau: {name: episodes/returns/mean, patience: 10}}; "
            f"got {dict(spec) if isinstance(spec, Mapping) else spec!r}."
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
    """Whether a text is a legal comparison, or several."""
    try:
        parse(text)
    except ValueError:
        return False
    return True


def parse(text: str) -> Condition:
    """Make a condition of a text."""
    parser = _Parser(text)
    condition = parser.either()
    if parser.tokens:
        raise ValueError(f"{parser.tokens[0].text!r} is not expected there")
    return condition


class _Token(NamedTuple):
    kind: str
    text: str


class _Parser:
    """Takes the tokens of a text from left to right; each rule of the grammar is a method."""

    def __init__(self, text: str) -> None:
        self.tokens, self._depth, place = deque[_Token](), 0, 0
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                raise ValueError(f"{text[place:]!r} cannot be read")
            kind, place = str(match.lastgroup), match.end()
            self.tokens.append(_Token(kind, match[kind].lower() if kind == "mark" else match[kind]))

    def _take(self, *marks: str) -> str | None:
        """Take the next token if it is one of these marks."""
        if self.tokens and self.tokens[0].kind == "mark" and self.tokens[0].text in marks:
            return self.tokens.popleft().text
        return None

    def either(self) -> Condition:
        """Read alternatives."""
        return self._joined("or", Or, lambda: self._joined("and", And, self._negated))

    def _joined(self, word: str, join: type[Condition], read: Callable[[], Condition]) -> Condition:
        parts = [read()]
        while self._take(word):
            parts.append(read())
        return parts[0] if len(parts) == 1 else join(*parts)

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
        left, pairs = self._operand(), list[Condition]()
        while mark := self._take(*_COMPARISONS):
            right = self._operand()
            pairs.append(_compared(left, mark, right))
            left = right
        if not pairs:
            raise ValueError(f"{left!r} is compared with nothing")
        return pairs[0] if len(pairs) == 1 else And(*pairs)

    def _operand(self) -> str | float:
        if not self.tokens or self.tokens[0].kind == "mark":
            where = f"before {self.tokens[0].text!r}" if self.tokens else "at the end"
            raise ValueError(f"a metric or a number is missing {where}")
        kind, text = self.tokens.popleft()
        if kind == "number":
            return int(text) if re.fullmatch(f"[-+]?{_DIGITS}", text) else float(text)
        return text[1:-1] if kind == "quoted" else text


def _compared(left: str | float, mark: str, right: str | float) -> Condition:
    if isinstance(left, str) and not isinstance(right, str):
        return _COMPARISONS[mark](left, right)
    if isinstance(right, str) and not isinstance(left, str):
        return _COMPARISONS[_TURNED[mark]](right, left)
    raise ValueError(f"of {left!r} and {right!r} one must be a metric and the other a number")

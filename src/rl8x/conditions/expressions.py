"""Conditions as comparisons in a line: `eval/returns/mean >= 475 and not (losses/vf > 1 or env/steps < 5e4)`.

    either     = both ("or" both)*
    both       = negated ("and" negated)*
    negated    = "not"* ( "(" either ")" | comparison )
    comparison = operand (("<" | "<=" | ">" | ">=" | "==" | "!=") operand)+

Of two operands that are compared one is a metric and the other a number. A metric's name may have spaces within; one
with a word such as `and` in it, or other odd characters, stands in quotes. What comes of a text are the conditions that
there are, so that checkpoints and the reason for stopping show those.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Final

from rl8x.conditions.base import And, Condition, Or
from rl8x.conditions.metrics import HitsLowerBound, HitsUpperBound
from rl8x.plain_yaml import MAX_DEPTH

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


def looks_like_comparison(text: str) -> bool:
    """Whether a text compares something, legally or not."""
    return re.search("[<>=]", text) is not None


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

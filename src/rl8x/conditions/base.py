"""The base class of conditions, their registry and composition, and checks of conditions that users give.

A condition has no verdict, `None`, on a row that lacks a metric that it needs, or has NaN there. That is *not met*,
also under `~`; `&` and `|` follow Kleene's three-valued logic. A row's attribute `fresh`, a set of names, may say which
of its `eval/*` metrics are new, as rows keep the latest ones: conditions that count, like `Plateau`, count those only.
"""

from __future__ import annotations

import difflib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Final

from rl8x import keys
from rl8x.names import name_here
from rl8x.output import shown

Stats = Mapping[str, float]
Verdict = bool | None
ConditionLike = Any  # a Condition, or any callable on the statistics

KINDS: Final[dict[str, type[Condition]]] = {}
"""The conditions of rl8x by their names in run files, such as `wall_time`; defining a class adds it."""


class Condition(ABC):
    """Decides from a row of statistics whether to stop.

    A subclass implements `judge`, `arguments` unless its constructor's arguments are attributes of the same names, and
    `start` if it remembers something. Its attributes are saved in checkpoints; if they are not plain data, it also
    implements `own_state` and `load_own_state`.
    """

    condition_arguments: ClassVar[tuple[str, ...]] = ()
    """Names of the constructor's arguments that are conditions, for run files; its first argument comes first."""

    evaluates: ClassVar[bool] = False
    """Whether `judge` may evaluate; it is then called before the other conditions, which see its measurements."""

    def __init_subclass__(cls, kind: str | None = None, **options: Any) -> None:
        """Add a condition of rl8x to `KINDS` unless `kind` is `""`; a user's condition is named by its dotted path."""
        super().__init_subclass__(**options)
        name = re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower() if kind is None else kind
        if cls.__module__.startswith(f"{__package__}.") and name.strip("_") == name != "":
            KINDS[name] = cls

    @abstractmethod
    def judge(self, stats: Stats) -> Verdict:
        """Judge one row.

        Args:
            stats: Metrics by name.

        Returns:
            Whether the condition is met; None if the row lacks a metric that it needs.
        """

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, for `repr` and run files; by default the attributes so named.

        Raises:
            TypeError: If there is no such attribute.
        """
        names = inspect.signature(type(self)).parameters
        missing = [name for name in names if not hasattr(self, name)]
        if missing:
            listed = ", ".join(missing)
            raise TypeError(f"{type(self).__name__} has no attribute {listed} to show: keep it, or write arguments().")
        return {name: getattr(self, name) for name in names}

    def __call__(self, stats: Stats) -> bool:
        """Judge one row and return whether to stop."""
        return bool(self.judge(stats))

    @property
    def children(self) -> tuple[Condition, ...]:
        """The conditions that this one is composed of; by default the attributes named in `condition_arguments`."""
        held = (getattr(self, name, None) for name in self.condition_arguments)
        return tuple(each for each in held if isinstance(each, Condition))

    @property
    def metric_names(self) -> set[str]:
        """The metrics that it reads."""
        return {name for child in self.children for name in child.metric_names}

    @property
    def awaited_names(self) -> set[str]:
        """The metrics that it reads but does not measure itself."""
        if not self.children:
            return self.metric_names
        return {name for child in self.children for name in child.awaited_names}

    def start(self) -> None:
        """Clear the state, as a new run begins."""
        for child in self.children:
            child.start()

    def bind(self, trainer: object) -> None:
        """Connect the condition with the trainer whose rows it will see.

        Args:
            trainer: The trainer; conditions of your own may expect any object.
        """
        for child in self.children:
            child.bind(trainer)

    def own_state(self) -> dict[str, Any]:
        """Return its own state, without that of its children, as plain data: numbers, texts, flags, None, lists, dicts.

        By default these are its attributes, without children, and without constructor's arguments that are not plain
        data; an argument is state too, as a dataclass's field may change.

        Raises:
            TypeError: If another attribute holds something else.
        """
        arguments, children, state = self.arguments(), self.children, {}
        for name, value in vars(self).items():
            items = value if isinstance(value, list | tuple) else (value,)
            if items and all(any(item is child for child in children) for item in items):
                continue
            try:
                state[name] = plain(value)
            except TypeError as error:
                if name in arguments and not remembers(value):
                    continue
                raise TypeError(
                    f"{type(self).__name__}: its attribute `{name}` holds {error}, which no checkpoint can: keep "
                    "numbers, texts, lists and dicts, make conditions part of `children`, or write own_state() and "
                    "load_own_state() to say what is saved."
                ) from None
        return state

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore its own state; by default as attributes.

        Args:
            state: A state that `own_state` returned.
        """
        vars(self).update(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the condition and its children between two rows, as JSON data."""
        state = self.own_state()
        return {**state, "children": [child.state_dict() for child in self.children]} if self.children else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`.

        Args:
            state: A state that `state_dict` returned.

        Raises:
            ValueError: If the state belongs to another condition.
        """
        own, saved = dict(state), state.get("children", [])
        own.pop("children", None)
        now, by_attribute = set(self.own_state()) - set(self.arguments()), type(self).own_state is Condition.own_state
        # The first row may add an attribute or change an argument.
        fits = now <= set(own) if by_attribute else now == set(own)
        if not fits or len(saved) != len(self.children):
            raise ValueError(f"The saved state {dict(state)!r} is not of {self!r}. Resume with the conditions saved.")
        self.load_own_state(own)
        for child, child_state in zip(self.children, saved, strict=True):
            child.load_state_dict(child_state)

    def reason(self, stats: Stats) -> str:
        """Return why the run stops: the condition, and the values that it read from the row.

        Args:
            stats: The row that met it.
        """
        read = [f"{name} = {stats[name]:g}" for name in sorted(self.metric_names) if name in stats]
        return f"{self!r}: {', '.join(read)}" if read else repr(self)

    def __and__(self, other: ConditionLike) -> And:
        return And(self, other)

    def __rand__(self, other: ConditionLike) -> And:
        return And(other, self)

    def __or__(self, other: ConditionLike) -> Or:
        return Or(self, other)

    def __ror__(self, other: ConditionLike) -> Or:
        return Or(other, self)

    def __invert__(self) -> Condition:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            "A condition has no truth value before it sees a row: compose with &, | and ~, not with and, or, not."
        )

    def __repr__(self) -> str:
        defaults = {name: each.default for name, each in inspect.signature(type(self)).parameters.items()}
        shown = [
            repr(value) if defaults.get(name) is inspect.Parameter.empty else f"{name}={value!r}"
            for name, value in self.arguments().items()
            if value is not None and not (_is_zero(value) and _is_zero(defaults.get(name)))
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


def _is_zero(value: object) -> bool:
    return isinstance(value, int | float) and value == 0


class FromCallable(Condition, kind=""):
    """A plain callable as a condition; not met if it reads a metric that only other rows have, named in `missed`."""

    def __init__(self, function: Callable[[Stats], object]) -> None:
        self.function = function
        self.missed: str | None = None
        self._known: Collection[str] | None = None

    def bind(self, trainer: object) -> None:
        """Store which metrics the trainer's rows may have."""
        self._known = getattr(trainer, "metric_names", None)

    def judge(self, stats: Stats) -> Verdict:
        """Call the callable."""
        self.missed = None
        try:
            verdict = self.function(stats)
            return None if verdict is None else bool(verdict)
        except KeyError as error:
            name = error.args[0] if error.args else None
            if not isinstance(name, str) or name in stats:
                raise
            if name in self._known if self._known is not None else name.startswith((keys.EVAL_PREFIX, "episodes/")):
                self.missed = name
                return None
            hint = nearest_metrics(name, self._known or stats)
            raise ValueError(f"Unknown metric {name!r} in {self!r}.{hint}") from error

    def own_state(self) -> dict[str, Any]:
        """Return no state, as `missed` belongs to one row."""
        return {}

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", None) or repr(self.function)


class _Composed(Condition):
    """Conditions that are combined; each of them judges every row."""

    decisive: ClassVar[bool]
    """The verdict of one part that decides the combination."""

    def __init__(self, *conditions: ConditionLike) -> None:
        if not conditions:
            raise ValueError(f"{type(self).__name__} needs at least one condition; got none.")
        flat: list[Condition] = []
        for condition in map(as_condition, conditions):
            # a & b & c reads And(a, b, c), not And(And(a, b), c)
            flat.extend(condition.children if type(condition) is type(self) else (condition,))
        self.conditions = tuple(flat)

    @property
    def children(self) -> tuple[Condition, ...]:
        return self.conditions

    def judge(self, stats: Stats) -> Verdict:
        verdicts = [condition.judge(stats) for condition in in_turn(self.conditions)]
        if self.decisive in verdicts:
            return self.decisive
        return None if None in verdicts else not self.decisive

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.conditions))})"


class And(_Composed, kind="all"):
    """Met when all its conditions are; `a & b` is the same.

    Args:
        conditions: Conditions, or callables on the statistics; at least one.

    Raises:
        TypeError: If an argument is neither.
        ValueError: If there is no argument.
    """

    decisive = False


class Or(_Composed, kind="any"):
    """Met when at least one of its conditions is; `a | b` is the same. Arguments and errors are those of `And`."""

    decisive = True


class Not(Condition):
    """Met when its condition could be judged and is not met; `~a` is the same.

    Args:
        condition: A condition, or a callable on the statistics.

    Raises:
        TypeError: If it is neither.
    """

    condition_arguments = ("condition",)

    def __init__(self, condition: ConditionLike) -> None:
        self.condition = as_condition(condition)

    def judge(self, stats: Stats) -> Verdict:
        """Judge the condition and negate its verdict; None stays None."""
        verdict = self.condition.judge(stats)
        return None if verdict is None else not verdict

    def __invert__(self) -> Condition:
        return self.condition


def as_condition(condition: ConditionLike) -> Condition:
    """Return a condition unchanged, and wrap any other callable on the statistics as a condition.

    Args:
        condition: A condition, or a callable that takes a row and returns whether to stop.

    Raises:
        TypeError: If it is neither.
    """
    if isinstance(condition, Condition):
        return condition
    if isinstance(condition, type) or not callable(condition):
        got = shown(condition)
        hint = f" `rl8x.conditions.from_spec({got})` makes one of a text." if isinstance(condition, str) else ""
        raise TypeError(f"A stop condition is a Condition or a callable on the statistics; got {got}.{hint}")
    return FromCallable(condition)


def as_conditions(conditions: ConditionLike | Iterable[ConditionLike] | None) -> list[Condition]:
    """Return a user's stop conditions as a list; raise if one with a state occurs twice, as it would count twice."""
    if conditions is None:
        return []
    if isinstance(conditions, Condition | str) or callable(conditions):
        conditions = [conditions]
    listed = [*map(as_condition, conditions)]
    seen: set[int] = set()
    for condition in (part for root in listed for part in parts(root)):
        if id(condition) in seen and remembers(condition):
            raise ValueError(f"{condition!r} occurs twice and would count every row twice. Make one for each place.")
        seen.add(id(condition))
    return listed


def parts(condition: Condition) -> Iterable[Condition]:
    """Yield a condition and, recursively, its children."""
    yield condition
    for child in condition.children:
        yield from parts(child)


def in_turn(conditions: Iterable[Condition]) -> list[Condition]:
    """Return conditions in the order in which they judge a row: those that may evaluate first."""
    return sorted(conditions, key=lambda condition: not any(part.evaluates for part in parts(condition)))


def named(condition: Condition) -> str:
    """Return the repr of a condition without addresses in memory, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(condition))


def remembers(value: object) -> bool:
    """Whether a value is a condition with a state of its own."""
    try:
        return isinstance(value, Condition) and any(part.own_state().keys() - part.arguments() for part in parts(value))
    except TypeError:  # it has a state that cannot be saved
        return True


def plain(value: Any) -> Any:
    """Copy plain data: numbers, texts, flags, None, and lists, tuples and dicts of them; else raise `TypeError`."""
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        if not all(isinstance(key, str) and not key.startswith("$") for key in value):
            raise TypeError("a dict with keys that are not texts or begin with '$'")
        return {key: plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a value of type {type(value).__qualname__}")


def check_names(conditions: Iterable[Condition], known: Collection[str]) -> None:
    """Raise `ValueError` for the first condition on a metric that is not `known`, and name the nearest known ones."""
    for condition in conditions:
        for name in sorted({*condition.metric_names}.difference(known)):
            raise ValueError(f"Unknown metric {name!r} in {condition!r}.{nearest_metrics(name, known)}")


def nearest_metrics(name: str, known: Iterable[str]) -> str:
    """Return " It is 'this' here." for another library's metric, else " Nearest: " and up to three known metrics."""
    last, is_evaluated = name.rpartition("/")[2], name.startswith(keys.EVAL_PREFIX)
    others = {"min", "max", "std"} - {last}  # of a quantity its mean is meant, unless the name says otherwise
    legal = sorted(each for each in known if each.rpartition("/")[2] not in others)
    alike = [each for each in legal if each.startswith(keys.EVAL_PREFIX) == is_evaluated]
    here = name_here(last, [each.removeprefix(keys.EVAL_PREFIX) for each in alike])
    if here is not None:
        return f" It is {keys.EVAL_PREFIX * is_evaluated + here!r} here."
    near = [each for group in (alike, legal) for each in difflib.get_close_matches(name, group, cutoff=0.4)]
    listed = list(dict.fromkeys([*near, *(each for each in legal if last in each)]))[:3]
    return f" Nearest: {', '.join(listed)}." if listed else f" There are {', '.join(legal[:8])} and others."

"""What the docstrings of the reference hold: every argument, and shapes of tensors.

A method that overrides one takes over what that documents, and so do trackers from the protocol that they fulfil.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.pages import documented, resolve

from rl8x.tracking import MemoryTracker, MLflowTracker, NullTracker, Tracker

FULFILS = {MLflowTracker: Tracker, MemoryTracker: Tracker, NullTracker: Tracker}
UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
SHAPE = re.compile(r"`(?:int64 |float32 )?\[[^`]*\]`|\bscalars?\b|\b0-d\b")


class Documented(NamedTuple):
    """A public function, method or property, or the constructor of a public class."""

    name: str
    function: Callable[..., Any]
    texts: list[str]
    """Its docstring and those that it takes over."""
    is_property: bool = False
    options: frozenset[str] = frozenset()
    """Fields of a config, each of which explains itself where it is declared."""

    def section(self, title: str) -> str:
        found = [re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)*)", text + "\n", re.MULTILINE) for text in self.texts]
        return "\n".join(match[1] for match in found if match)

    def names_of(self, title: str) -> set[str]:
        """The names that a section explains, each at the beginning of a line."""
        return {
            name.strip("* ") for name in re.findall(r"^    ([\w.*]+)(?:, [\w.]+)*:", self.section(title), re.MULTILINE)
        }


def text_of(value: object) -> str:
    """The docstring of a class or function itself, not that which it inherits."""
    own = value.__dict__.get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)
    return inspect.cleandoc(own or "")


def own_bases(cls: type) -> list[type]:
    bases = [base for base in cls.__mro__ if base.__module__.startswith("rl8x")]
    return [*bases, *(FULFILS[base] for base in bases if base in FULFILS)]


def function_in(member: object) -> tuple[Any, bool]:
    """The function behind an attribute of a class, and whether it is read as a property."""
    if isinstance(member, property | functools.cached_property):
        return (member.fget if isinstance(member, property) else member.func), True
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    return (inspect.unwrap(member) if inspect.isfunction(member) else None), False


def members(path: str, cls: type) -> Iterator[Documented]:
    """What a class has that readers see: of itself, and of bases that are no public names."""
    shown = {resolve(name) for name in documented() if inspect.isclass(resolve(name))} - {cls}
    bases = own_bases(cls)
    seen = set()
    for base in (base for base in bases if base not in shown):
        for name, member in vars(base).items():
            function, is_property = function_in(member)
            if function is None or name.startswith("_") or name in seen:
                continue
            if not function.__module__.startswith("rl8x"):
                continue
            seen.add(name)
            overridden = [vars(other)[name] for other in bases if name in vars(other)]
            texts = [text_of(function_in(each)[0] or each) for each in overridden]
            yield Documented(f"{path}.{name}", function, texts, is_property)
    made = [text_of(base) for base in bases] + [text_of(vars(b)["__init__"]) for b in bases if "__init__" in vars(b)]
    fields = getattr(cls, "__dataclass_fields__", {})
    options = frozenset(name for name, field in fields.items() if field.metadata.get("help"))
    for name in ("__init__", "__post_init__"):
        owner = next((base for base in bases if base not in shown and name in vars(base)), None)
        if owner is not None and vars(owner)[name].__module__.startswith("rl8x"):
            texts = [*made, text_of(vars(owner)[name])]
            yield Documented(f"{path}.{name}", vars(owner)[name], texts, options=options)


@functools.cache
def everything() -> list[Documented]:
    found: list[Documented] = []
    for path in documented():
        value = resolve(path)
        if inspect.isclass(value):
            found += members(path, value)
        elif inspect.isfunction(value):
            found.append(Documented(path, inspect.unwrap(value), [text_of(value)]))
    return found


def arguments_of(each: Documented) -> set[str]:
    if each.is_property or each.name.endswith("__post_init__"):
        return set()
    parameters = list(inspect.signature(each.function).parameters.values())
    named = {parameter.name for parameter in parameters if parameter.kind not in UNNAMED}
    return named - {"self", "cls"} - each.options


def has_tensors(each: Documented) -> bool:
    annotations = [str(value) for value in inspect.get_annotations(each.function).values()]
    return any(re.search(r"\bTensor\b", annotation) for annotation in annotations)


def test_every_public_function_says_what_it_does() -> None:
    assert not [each.name for each in everything() if not any(each.texts)]


def test_every_argument_is_explained() -> None:
    untold = []
    for each in everything():
        missing = arguments_of(each) - each.names_of("Args") - each.names_of("Attributes")
        untold += [f"{each.name}: {', '.join(sorted(missing))}"] if missing else []
    assert not untold, "\n".join(untold)


def test_no_argument_is_explained_that_there_is_not() -> None:
    """A name under `Args:` of a function's own docstring is one of its parameters."""
    invented = []
    for each in everything():
        if each.name.endswith("__"):  # a class explains what its subclasses take
            continue
        own = Documented(each.name, each.function, each.texts[:1]).names_of("Args")
        taken = set(inspect.signature(each.function).parameters)
        invented += [f"{each.name}: {', '.join(sorted(own - taken))}"] if own - taken else []
    assert not invented, "\n".join(invented)


def test_every_tensor_has_a_shape() -> None:
    shapeless = [each.name for each in everything() if has_tensors(each) and not any(map(SHAPE.search, each.texts))]
    assert not shapeless, "\n".join(shapeless)

"""What the docstrings of the reference hold: every argument, the errors that code raises itself, shapes of tensors.

A method that overrides one takes over what that documents, and so do trackers from the protocol that they fulfil.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
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


def raised_by(function: Callable[..., Any]) -> set[str]:
    """The exceptions that a body raises itself, by name: not what it catches again, nor what others make for it."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError):  # what dataclasses and named tuples generate has no source
        return set()
    found: set[str] = set()

    def walk(node: ast.AST, caught: frozenset[str]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
                continue
            if isinstance(child, ast.Raise) and child.exc is not None:
                error = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
                if isinstance(error, ast.Name) and error.id[0].isupper() and error.id not in caught:
                    found.add(error.id)
            if isinstance(child, ast.Try):
                here = {
                    name.id
                    for each in child.handlers
                    for name in ast.walk(each.type or each)
                    if isinstance(name, ast.Name)
                }
                for part in child.body:
                    walk(ast.Module([part], []), caught | here)
                for part in (*child.handlers, *child.orelse, *child.finalbody):
                    walk(ast.Module([part], []) if isinstance(part, ast.stmt) else part, caught)
            else:
                walk(child, caught)

    walk(tree, frozenset())
    return found


def has_tensors(each: Documented) -> bool:
    annotations = [str(value) for value in inspect.get_annotations(each.function).values()]
    return any(re.search(r"\bTensor\b", annotation) for annotation in annotations)


def test_it_looks_at_what_there_is() -> None:
    names = {each.name for each in everything()}
    assert len(names) > 400
    assert names >= {
        "rl8x.policy.Policy.decide",  # from a base that is no public name
        "rl8x.trainers.GenericTrainerBase.resume",
        "rl8x.envs.Env.step",
        "rl8x.functional.moments",  # behind a decorator
        "rl8x.envs.Env.__init__",
        "rl8x.algorithms.PPOConfig.__post_init__",
    }


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


def test_every_error_that_a_function_raises_itself_is_told() -> None:
    untold = []
    for each in everything():
        missing = raised_by(each.function) - each.names_of("Raises")
        untold += [f"{each.name}: {', '.join(sorted(missing))}"] if missing else []
    assert not untold, "\n".join(untold)


def test_errors_that_are_told_exist() -> None:
    odd = []
    for each in everything():
        for name in each.names_of("Raises"):
            if not hasattr(builtins, name) and name not in (
                "CheckpointError",
                "NonFiniteError",
                "StudyError",
                "TrackingError",
            ):
                odd.append(f"{each.name}: {name}")
    assert not odd, "\n".join(odd)


def test_every_tensor_has_a_shape() -> None:
    shapeless = [each.name for each in everything() if has_tensors(each) and not any(map(SHAPE.search, each.texts))]
    assert not shapeless, "\n".join(shapeless)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ValueError('x')", {"ValueError"}),
        ("raise error", set()),
        ("raise self.fault()", set()),
        ("try:\n        raise TypeError\n    except TypeError:\n        raise ValueError from None", {"ValueError"}),
        ("def inner():\n        raise KeyError", set()),
        ("if x:\n        raise OSError", {"OSError"}),
    ],
)
def test_what_a_body_raises_itself(code: str, expected: set[str], tmp_path: Any) -> None:
    path = tmp_path / "made.py"
    path.write_text(f"def function(x=1, error=None, self=None):\n    {code}\n")
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    assert raised_by(namespace["function"]) == expected

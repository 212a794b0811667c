"""What the docstrings of the reference hold: every argument, and shapes of tensors.

A method that overrides one takes over what that documents, and so do trackers from the protocol that they fulfil.
"""

import dataclasses
import functools
import inspect
import re
from typing import Any

from tests.pages import documented, resolve

from rl8x.tracking import MemoryTracker, MLflowTracker, NullTracker, Tracker

FULFILS = {MLflowTracker: Tracker, MemoryTracker: Tracker, NullTracker: Tracker}
UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
SAME_ARGUMENTS = re.compile(r"\bthe\s+arguments\s+of\s+`(?:\w+\.)?(\w+)`")
SHAPE = re.compile(r"`(?:int64 |float32 )?\[[^`]*\]`|\bscalars?\b|\b0-d\b")


@dataclasses.dataclass
class Documented:
    """A public function, method or property, or the constructor of a public class.

    `texts` are its docstring and those that it takes over; `options` fields of a config, which explain themselves.
    """

    name: str
    function: Any
    texts: list[str]
    is_property: bool = False
    options: frozenset[str] = frozenset()

    def names_of(self, title, texts=None):
        """The names that a section explains, each at the beginning of a line."""
        found = [re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)*)", text + "\n", re.MULTILINE) for text in self.texts[:texts]]
        section = "\n".join(match[1] for match in found if match)
        return {name.strip("* ") for name in re.findall(r"^    ([\w.*]+)(?:, [\w.]+)*:", section, re.MULTILINE)}


def text_of(value):
    """The docstring of a class or function itself, not that which it inherits."""
    own = value.__dict__.get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)
    return inspect.cleandoc(own or "")


def function_in(member):
    """The function behind an attribute of a class, if there is one."""
    member = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
    return inspect.unwrap(member) if inspect.isfunction(member) else None


def members(path, cls):
    """What a class has that readers see: of itself, and of bases that are no public names."""
    shown = {resolve(name) for name in documented() if inspect.isclass(resolve(name))} - {cls}
    bases = [base for base in cls.__mro__ if base.__module__.startswith("rl8x")]
    bases += [FULFILS[base] for base in bases if base in FULFILS]
    own, seen = [base for base in bases if base not in shown], set()
    for name, member in (item for base in own for item in vars(base).items()):
        function = function_in(member)
        is_ours = function is not None and function.__module__.startswith("rl8x")
        if not is_ours or name.startswith("_") or name in seen:
            continue
        seen.add(name)
        overridden = [vars(other)[name] for other in bases if name in vars(other)]
        texts = [text_of(function_in(each) or each) for each in overridden]
        others = [other for text in texts for other in SAME_ARGUMENTS.findall(text)]
        texts += [text_of(vars(base)[other]) for other in others for base in bases if other in vars(base)]
        is_property = isinstance(member, property | functools.cached_property)
        yield Documented(f"{path}.{name}", function, texts, is_property)
    made = [text_of(base) for base in bases] + [text_of(vars(b)["__init__"]) for b in bases if "__init__" in vars(b)]
    fields = getattr(cls, "__dataclass_fields__", {})
    options = frozenset(name for name, field in fields.items() if field.metadata.get("help"))
    for name in ("__init__", "__post_init__"):
        function = next((vars(base)[name] for base in own if name in vars(base)), None)
        if function is not None and function.__module__.startswith("rl8x"):
            yield Documented(f"{path}.{name}", function, [*made, text_of(function)], options=options)


def everything():
    found = []
    for path in documented():
        value = resolve(path)
        if inspect.isclass(value):
            found += members(path, value)
        elif inspect.isfunction(value):
            found.append(Documented(path, inspect.unwrap(value), [text_of(value)]))
    return found


def complaints(each):
    """What is wrong with a docstring: silence, an argument untold or invented, or tensors without shapes."""
    taken = inspect.signature(each.function).parameters
    if not any(each.texts):
        yield "says nothing"
    if not each.is_property and not each.name.endswith("__post_init__"):
        named = {name for name, parameter in taken.items() if parameter.kind not in UNNAMED} - {"self", "cls"}
        explained = each.options | each.names_of("Args") | each.names_of("Attributes")
        yield from (f"does not explain {name}" for name in sorted(named - explained))
    if not each.name.endswith("__"):  # a class explains its subclasses' arguments
        yield from (f"explains {name}, which it does not take" for name in each.names_of("Args", 1) - {*taken})
    annotations = inspect.get_annotations(each.function).values()
    if any(re.search(r"\bTensor\b", str(value)) for value in annotations) and not any(map(SHAPE.search, each.texts)):
        yield "tells no shape of its tensors"


def test_every_public_function_explains_its_arguments_and_shapes_and_no_others():
    found = everything()
    assert len(found) > 300
    assert [f"{each.name} {wrong}" for each in found for wrong in complaints(each)] == []

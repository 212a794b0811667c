"""Plain data: read-only copies, and YAML 1.2, in which `3e-4` is a number and `no` is a word."""

from __future__ import annotations

import math
import numbers
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np
import yaml
from gymnasium import Space
from torch import Tensor

from rl8x.output import shown

MAX_DEPTH: Final = 32
"""Maximum nesting of mappings and lists in a file."""
MAX_VALUES: Final = 100_000
"""Maximum number of values in a file, including keys; the values of an alias count at every use."""
MAX_WHOLE: Final = 2**63 - 1
"""Largest whole number of an option, such as a seed; files and tables hold no larger ones."""

_TAG: Final = "tag:yaml.org,2002:"
# Sequences that are not lists in a file.
_NO_LISTS: Final = (tuple, bytes, bytearray, memoryview, Space)


class Loader(yaml.SafeLoader):
    """YAML 1.2's core schema. PyYAML reads 1.1: `3e-4` as text, `no` as false, `1:30` as 90."""

    yaml_implicit_resolvers: Final = {}  # type: ignore[misc]

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0
        self._values = 0
        # Number of values in each composed node; a node that is being composed has no entry yet.
        self._values_of: dict[yaml.Node, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Raise if a node is nested too deeply or too large, as 400 bytes with aliases of aliases can be."""
        # Counted before objects are built; Python's own limit of depth changes once torch has compiled.
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._values
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:
            raise yaml.YAMLError("nested too deeply")
        node = super().compose_node(parent, index)
        assert node is not None
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if node not in self._values_of:
                raise _refusal(f"nested too deeply: *{event.anchor:.40} stands within what it stands for", event)
            self._values += self._values_of[node]
        else:
            self._values += 1
            self._values_of[node] = self._values - before
        if self._values > MAX_VALUES:
            raise _refusal(f"too large: more than {MAX_VALUES:,} values, with what its aliases stand for", event)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Raise if a key is not a text or number, or occurs twice."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("keys are texts, neither lists nor mappings", key)
            if key.value in seen and key.tag != f"{_TAG}merge":
                raise _refusal(f"the key {key.value!r:.80} occurs twice", key)
            seen.add(key.value)
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Return a number; an explicit tag may precede any text, which raises if it is no number."""
        text = self.construct_scalar(node)
        # Python writes `.inf` and `.nan` without the dot, and rejects whole numbers of more than 4300 digits.
        return int(text) if node.tag == f"{_TAG}int" else float(re.sub(r"\.(?=[inIN])", "", text))


def _refusal(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    Loader.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(rf"^(?:{_pattern})$", re.ASCII), _first)
for _tag in ("int", "float"):
    Loader.add_constructor(f"{_TAG}{_tag}", Loader.construct_number)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that `Loader` would not read as text."""

    yaml_implicit_resolvers: Final = Loader.yaml_implicit_resolvers  # type: ignore[misc]


# For a subclass, such as a default hyperparameter.
_Dumper.add_multi_representer(int, lambda dumper, number: dumper.represent_int(int(number)))


def dump_run(data: Mapping[str, Any]) -> str:
    """Write plain data as YAML that `load_run_file` reads as the same.

    Args:
        data: A mapping of None, booleans, numbers, texts, lists and mappings alone.

    Raises:
        TypeError: If there is something else in it.
    """
    try:
        return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False)
    except yaml.representer.RepresenterError as error:
        raise TypeError(f"a run file holds plain data alone; got {error.args[-1]!r:.200}.") from None


def _refuse(self: object, *args: object, **options: object) -> NoReturn:
    raise TypeError(
        "what a config holds cannot be changed: change a copy.deepcopy() of this, and make another config of it by "
        "dataclasses.replace(config, ...)."
    )


class FrozenDict(dict[Any, Any]):
    """A dict that cannot be changed; a copy of it is a plain one."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class FrozenList(list[Any]):
    """A list that cannot be changed; a copy of it is a plain one."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def checked_number(value: Any, name: str, owner: str = "", *, least: float = -math.inf, whole: bool = False) -> Any:
    """Return an argument, which may be NumPy's number, as a Python number for files; else raise a `ValueError`."""
    value, kind = own_values(value), numbers.Integral if whole else numbers.Real
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    most: float = MAX_WHOLE if whole else sys.float_info.max
    if not is_number or not max(least, -most) <= value <= most:  # NaN is neither
        needed = f"a {'whole' if whole else 'finite'} number" + (f", at least {least:g}" if least > -math.inf else "")
        needed += ", of at most 63 bits" * (whole and is_number and abs(value) > most)
        raise ValueError(f"{owner}{': ' if owner else ''}`{name}` must be {needed}; got {shown(value)}.")
    return int(value) if isinstance(value, int) and abs(value) <= MAX_WHOLE else float(value)


def names_in(given: Any) -> tuple[Any, ...]:
    """Return names or paths given as a list or a single one, None as none."""
    return (given,) if isinstance(given, str | os.PathLike) else tuple(given or ())


def own_values(value: Any) -> Any:
    """Convert NumPy's numbers, subclasses of texts and floats, and sequences of any class, also nested, to Python's."""
    if isinstance(value, np.generic):  # such as np.int64(64)
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, dict):
        return {own_values(key): own_values(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(map(own_values, value))
    if isinstance(value, Sequence) and not isinstance(value, _NO_LISTS):
        return list(map(own_values, value))
    return value


def frozen(value: Any) -> Any:
    """Copy nested lists, dicts and arrays into read-only ones, and tensors; other objects, such as modules, stay."""
    return _copied(value, frozen)


def thawed(value: Any) -> Any:
    """Copy nested lists, dicts, arrays and tensors into plain, writable ones."""
    return _copied(value, thawed)


def _copied(value: Any, again: Callable[[Any], Any]) -> Any:
    if isinstance(value, np.ndarray):
        value = value.copy()
        value.flags.writeable = again is thawed
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        copied = {key: again(item) for key, item in value.items()}
        return copied if again is thawed else FrozenDict(copied)
    if isinstance(value, list):
        return list(map(again, value)) if again is thawed else FrozenList(map(again, value))
    if isinstance(value, set):
        return set(value)
    if isinstance(value, tuple):
        items = tuple(map(again, value))
        # A tuple of a subclass, such as torch.Size, becomes a plain tuple only if something in it was copied.
        return value if all(item is own for item, own in zip(items, value, strict=True)) else items
    return value

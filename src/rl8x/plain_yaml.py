"""Plain data as YAML in its version 1.2: `3e-4` is a number, `no` is a word, `010` is ten; no key occurs twice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import yaml

MAX_DEPTH: Final = 32
"""Mappings and lists within each other that a file may have."""


class Loader(yaml.SafeLoader):
    """YAML 1.2's core schema, where PyYAML reads 1.1: `3e-4` as text, `no` as false, `1:30` as 90."""

    yaml_implicit_resolvers: Final = {}  # type: ignore[misc]

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse what is nested too deeply: counted, since Python's own limit is another once torch has compiled."""
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:
            raise ValueError("nested too deeply")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Refuse a key that occurs twice."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} occurs twice", key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return node


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
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$", re.ASCII), _first)
Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
# Python writes `.inf` and `.nan` without the dot.
Loader.add_constructor("tag:yaml.org,2002:float", lambda _, node: float(re.sub(r"\.(?=[inIN])", "", node.value)))


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what `Loader` would not read as text."""

    yaml_implicit_resolvers: Final = Loader.yaml_implicit_resolvers  # type: ignore[misc]


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

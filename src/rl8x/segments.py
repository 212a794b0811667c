"""Immutable pieces of a large state, which checkpoints share with those before instead of writing them again."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, TypeAlias

from torch import Tensor

# Such a name becomes that of a file: nothing in it leads anywhere.
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")

Content: TypeAlias = dict[str, Tensor]
"""The tensors of a segment by name, of any shapes."""


class Segment:
    """A piece of a state that never changes under its name.

    Args:
        name: Its name, which nothing else ever has, in any run: small letters, digits and "-".
        content: Returns its tensors on the CPU, as copies; called only where they are wanted, which is while the state
            that the segment is part of is still the present one.

    Raises:
        ValueError: If the name is of another kind.
    """

    def __init__(self, name: str, content: Callable[[], Content]) -> None:
        if not is_segment_name(name):
            raise ValueError(f"a segment's name has small letters, digits and '-', 100 at most; got {name!r}.")
        self.name = name
        self.content = content


def is_segment_name(name: object) -> bool:
    """Whether something is a text that a segment can have as its name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None
